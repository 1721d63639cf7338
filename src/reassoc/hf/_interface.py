"""What transformers calls in place of its softmax attention, and what it calls for a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from .._errors import InputError
from .cache import of_key

NAME = "reassoc"
SLOT = "reassoc"  # the attribute of an attention module that holds its KernelLayer
OBSERVERS: list[Callable[..., None] | None] = []  # the innermost one sees; see observe.py


def attend(
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
    """The attention function registered as ``"reassoc"``; a module without a kernel layer gets softmax.

    Args:
        query: ``(B, H, N, d)``. key: ``(B, G, M, d)``. value: ``(B, G, M, e)``; after rotary embedding.
        attention_mask: bool ``(B, seen + N)`` as :func:`padding` gives it, or ``None``.
        dropout: has no counterpart in a kernel layer; conversion has set it to zero.

    Returns:
        ``(B, N, H, e)``, and no weights.
    """
    layer = getattr(module, SLOT, None)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise InputError(
            f"{type(module).__name__} got an attention mask of shape {tuple(attention_mask.shape)}; kernel "
            "attention takes padding only, (batch, tokens), True = real: an arbitrary mask has no summary"
        )
    if layer is None:
        causal = one_way(module, is_causal)
        span = kwargs.get("sliding_window")
        output = softmax(query, key, value, attention_mask, scaling, causal, span, dropout)
        return output.transpose(1, 2).contiguous(), None
    store = of_key(key)
    # Under autocast rotary embedding leaves queries and keys in float32, and values are what a product gave.
    key, value = key.to(query.dtype), value.to(query.dtype)
    length = query.shape[2]
    if key.shape[2] != length:
        raise InputError(
            f"{type(module).__name__} got {key.shape[2]} keys for {length} queries: a cache that is not of "
            "constant size. Pass no cache (generate() then makes the right one) or a new DynamicCache"
        )
    mask = None if attention_mask is None else attention_mask[:, -length:].bool()
    if mask is not None and mask.device.type == "cpu" and bool(mask.all()):
        mask = None
    if OBSERVERS:
        site = layer.site
        output = softmax(query, key, value, mask, site.scale, site.causal, site.span, 0.0)
        if (observe := OBSERVERS[-1]) is not None:
            observe(layer, query, key, value, mask, output)
    else:
        state = None if store is None else store.state
        output, after = layer(query, key, value, mask, state, store is not None)
        if store is not None:
            store.state = after
    return output.transpose(1, 2).contiguous(), None


def one_way(module: nn.Module, is_causal: bool | None) -> bool:
    """Whether queries see earlier keys only: as the call says, or else the module."""
    return bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)


def softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,  # bool (B, M or more): the last M count
    scaling: float | None,
    causal: bool,
    span: int | None,
    dropout: float,
) -> Tensor:
    """Softmax attention ``(B, H, N, e)``; queries are the last N of M positions where causal."""
    length, keys = query.shape[2], key.shape[2]
    plain = mask is None and (span is None or span >= keys) and (not causal or length in (1, keys))
    visible: Tensor | None = None
    if not plain:
        visible = torch.ones(length, keys, dtype=torch.bool, device=query.device)
        if causal:
            ahead = torch.arange(keys, device=query.device) - torch.arange(
                keys - length, keys, device=query.device
            ).unsqueeze(1)
            visible = (ahead <= 0) & (ahead > -(span or keys))
        if mask is not None:
            visible = visible & mask[:, None, None, -keys:].bool()
            # A row without a visible key has no softmax: it looks at itself, and counts for nothing.
            visible = visible | (~visible.any(-1, keepdim=True) & (ahead == 0 if causal else True))
    output: Tensor = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, dropout_p=dropout, scale=scaling,
        is_causal=plain and causal and length > 1, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output


def padding(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """The mask function registered as ``"reassoc"``: which keys are real, bool ``(B, seen + N)``.

    Raises:
        InputError: a mask that hides a position from its neighbour (packed sequences, blocks): no summary
            shared by all queries exists for it; or a cache of fixed length.
    """
    last = q_offset + q_length
    if mask_function is not None and kv_offset + kv_length > last:
        row, zero, end = (torch.full((), n, device=device) for n in (0, 0, last))
        if not bool(torch.as_tensor(mask_function(row, zero, end - 1, end))):
            raise InputError(
                "the cache is of fixed length ('static'), which kernel attention has no use for: leave out "
                "cache_implementation, and the cache is of constant size"
            )
    if mask_function is not None and q_length > 1:
        if use_vmap:
            raise InputError(
                "this model adds a mask over pairs of positions, which kernel attention cannot have"
            )
        later = torch.arange(q_offset + 1, q_offset + q_length, device=device)
        row = torch.arange(batch_size, device=device)[:, None]
        zero = torch.zeros((), dtype=torch.int64, device=device)
        joined = torch.as_tensor(mask_function(row, zero, later, later - 1), device=device)
        if attention_mask is not None:
            joined = joined | ~attention_mask[:, later - 1].bool()
        if not bool(joined.all()):
            raise InputError(
                "the mask hides a token from the next one, as packed sequences do: give one sequence a row, "
                "with padding"
            )
    return attention_mask


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, padding)
