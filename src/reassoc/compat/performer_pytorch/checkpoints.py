"""State dicts of copies older than 1.1.4."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from .fast_attention import FastAttention
from .layers import find_modules
from .performer import Performer


def load_older(model: nn.Module, state_dict: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Load a state dict of any release into ``model``, strictly, and say what it lacked.

    From 1.0.9 on every entry of the layers is named a second time under ``proj_updater.instance``, and the
    counter is there too. Older copies, scBERT's for one, have neither: their counter is the performer's own.
    Such a state dict sets ``FastAttention.older``, since it was trained with that arithmetic; to save the
    model under the new names loses it, so keep the old file or set it again.
    Entries that are missing otherwise, or left over, are errors as ever.

    Args:
        model: with any number of ``Performer`` inside, or one itself.
        state_dict: names and tensors; a file is read with ``torch.load(path, weights_only=True)`` first.

    Returns:
        The names that the state dict lacked, in order.

    Raises:
        RuntimeError: as ``load_state_dict(strict=True)``.
    """
    given = dict(state_dict)
    lacked = []
    for name, module in model.named_modules():
        if not isinstance(module, Performer):
            continue
        prefix = f"{name}." if name else ""
        counter = f"{prefix}proj_updater.calls_since_last_redraw"
        old_counter = given.pop(
            f"{prefix}calls_since_last_redraw", module.proj_updater.calls_since_last_redraw
        )
        older = counter not in given
        for attention in find_modules(module, FastAttention):
            attention.older = older
        if older:
            given[counter] = old_counter
            lacked.append(counter)
        for entry in module.net.state_dict():
            source, copy = f"{prefix}net.{entry}", f"{prefix}proj_updater.instance.{entry}"
            if source in given and copy not in given:
                given[copy] = given[source]
                lacked.append(copy)
    model.load_state_dict(given, strict=True)
    return tuple(lacked)
