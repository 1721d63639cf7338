"""Names in a state dict, which tell the release that its weights were trained with.

From 1.0.9 on every entry of the layers is named a second time under ``proj_updater.instance``, and a counter
is there too. Older copies, scBERT's for one, have neither: their counter is the performer's own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_UPDATER, _COUNTER = "proj_updater.", "calls_since_last_redraw"


def is_older(state_dict: dict[str, Any], prefix: str) -> bool:
    """Whether the layers under ``prefix`` are of a copy from before 1.0.9."""
    layers = any(name.startswith(f"{prefix}net.") for name in state_dict)
    return layers and f"{prefix}{_UPDATER}{_COUNTER}" not in state_dict


def complete(state_dict: dict[str, Any], prefix: str, net: nn.Module, counter: Tensor) -> None:
    """Give an older copy the names that it lacks; ``counter`` stands in for one that it has not either."""
    state_dict[f"{prefix}{_UPDATER}{_COUNTER}"] = state_dict.pop(f"{prefix}{_COUNTER}", counter)
    for entry in net.state_dict():
        if f"{prefix}net.{entry}" in state_dict:
            state_dict.setdefault(f"{prefix}{_UPDATER}instance.{entry}", state_dict[f"{prefix}net.{entry}"])


def reduce(state_dict: dict[str, Any], prefix: str) -> None:
    """The names of an older copy."""
    counter = state_dict[f"{prefix}{_UPDATER}{_COUNTER}"]
    for name in [name for name in state_dict if name.startswith(f"{prefix}{_UPDATER}")]:
        del state_dict[name]
    state_dict[f"{prefix}{_COUNTER}"] = counter
