"""Which attention layers a model has, seen by running it once on a few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .._beyond import beyond_softmax
from .._errors import InputError
from ._interface import one_way, padding, softmax
from ._settings import Site

_NAME = "reassoc_probe"
_NEAR = "_reassoc_near"  # on a mask that hides keys far back
_FAR = 1 << 40
_SEEN: dict[nn.Module, tuple[Site, bool]] = {}  # module -> what it asked for, and whether of its own tokens


def _watch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if (extra := beyond_softmax(kwargs)) is not None:
        raise InputError(
            f"{type(module).__name__} adds {extra}: kernel attention cannot represent that, because no "
            "summary shared by all queries holds it"
        )
    causal = one_way(module, is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    span = kwargs.get("sliding_window")
    if causal and not isinstance(span, int) and getattr(attention_mask, _NEAR, False):
        raise InputError(
            f"{type(module).__name__} hides far keys by its mask alone, without a sliding_window that kernel "
            "attention could follow: not supported"
        )
    site = Site(
        query.shape[1], key.shape[1], query.shape[3], value.shape[3], scale, causal,
        span if isinstance(span, int) else None,
    )  # fmt: skip
    if module in _SEEN:
        raise InputError(f"{type(module).__name__} runs twice in one pass (shared layers): not supported")
    _SEEN[module] = site, query.shape[2] == key.shape[2]
    output = softmax(query, key, value, attention_mask, scaling, causal, site.span, 0.0)
    return output.transpose(1, 2).contiguous(), None


def _mask(*, mask_function: Any = None, **options: Any) -> Tensor | None:
    """The padding, marked where the model means more by its mask: that keys far back are hidden."""
    found = padding(mask_function=mask_function, **options)
    if mask_function is None:
        return found
    device = options["device"]
    row, far = torch.zeros((), dtype=torch.int64, device=device), torch.tensor(_FAR, device=device)
    if not bool(torch.as_tensor(mask_function(row, row, far, row))):
        if found is None:
            found = torch.ones(options["batch_size"], options["kv_length"], dtype=torch.bool, device=device)
        setattr(found, _NEAR, True)
    return found


AttentionInterface.register(_NAME, _watch)
AttentionMaskInterface.register(_NAME, _mask)


def find_sites(model: PreTrainedModel, example: dict[str, Tensor] | None) -> dict[nn.Module, Site]:
    """Self-attention modules in the order they run; cross-attention is left out.

    Raises:
        InputError: a model that does not use transformers' attention interface, or whose attention is
            more than softmax.
    """
    before = model.config._attn_implementation
    training = model.training
    try:
        model.set_attn_implementation(_NAME)
        model.eval()
        with torch.no_grad():
            model(**(example_inputs(model) if example is None else example))
        found = {module: site for module, (site, own) in _SEEN.items() if own}
    except InputError:
        raise
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{type(model).__name__} cannot be run with another attention function ({reason:.300}); pass "
            "example= with inputs that it takes, or it is not supported"
        ) from error
    finally:
        _SEEN.clear()
        model.train(training)
        if before != _NAME:
            model.set_attn_implementation(before)
    if not found:
        raise InputError(
            f"{type(model).__name__} does not use transformers' attention interface, so its attention "
            "cannot be replaced"
        )
    return found


def example_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """A few tokens, or a blank image: encoder and decoder of different lengths, to tell them apart."""
    config: Any = model.config
    device = model.device
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(1, config.num_channels, height, width, device=device)}
    found = {"input_ids": torch.ones(1, 5, dtype=torch.int64, device=device)}
    if config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.ones(1, 3, dtype=torch.int64, device=device)
    return found
