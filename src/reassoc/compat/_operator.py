"""Attention from features that are plain numbers, as the originals computed it, in linear time and memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import linear_attention


def attend(
    query: Tensor,  # (B, H, N, r)
    key: Tensor,  # (B, H, M, r)
    value: Tensor,  # (B, H, M, e)
    *,
    causal: bool = False,
    eps: float = 0.0,
    key_eps: float = 0.0,
) -> Tensor:  # (B, H, N, e)
    """``q.S / (q.(z + key_eps) + eps)`` of given features; NaN where the denominator is zero.

    Args:
        query, key: features. value: values. causal: query i sees keys 0..i.
        eps: added to the denominator. key_eps: added to every entry of the summed key features.
    """
    if not key_eps:
        return linear_attention(query, key, value, "identity", causal=causal, eps=eps)
    together = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)
    sums = linear_attention(query, key, together, "identity", normalize="none", causal=causal)
    return sums[..., :-1] / (sums[..., -1:] + key_eps * query.sum(-1, keepdim=True) + eps)


def hide_values(value: Tensor, key_mask: Tensor | None) -> Tensor:
    """``(B, H, M, e)`` with zeros where ``key_mask`` ``(B, M)`` is False: what the originals' masks do."""
    return value if key_mask is None else value.masked_fill(~key_mask[:, None, :, None], 0.0)
