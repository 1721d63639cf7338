"""Exact softmax weights for the few keys a query may see that way: the recent ones, and the first ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kernels.segments import SEGMENT, pieces, walk

BLOCK = 64  # queries that share one product: fewer waste less, more make larger products


class First(NamedTuple):
    """The first keys of every sequence.

    Attributes:
        key: ``(B, G, s, d)``. value: ``(B, G, s, e)``.
        since: int64 ``(B, s)``: the first query of this call that sees it; N or more: none does.
    """

    key: Tensor
    value: Tensor
    since: Tensor


def exact_reads(
    query: Tensor,  # (B, H, N, d), scaled
    key: Tensor,  # (B, G, window + N, d): `window` positions before the first query, then its own and on
    value: Tensor,  # (B, G, window + N, e)
    mask: Tensor,  # bool (B, window + N): keys that count here
    first: First,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Sums ``(B, H, N, e + 1)`` of weights times values and of weights, and their log scale ``(B, H, N)``.

    A query sees the ``window`` positions that end with its own, and the first keys. The true sums are
    ``exp(scale)`` times these; a row that sees nothing has sums of zero. The weights are made one segment
    of queries at a time, and made again for the gradient: all of them would take the most memory by far.
    """
    length = query.shape[2]
    if length <= SEGMENT:
        return _segment(query, key, value, mask, *first, window)
    missing, span = -length % SEGMENT, window + SEGMENT
    # One unfold, not slices, which would each send back a gradient as long as the sequence.
    keys, values = (pad(t, (0, 0, 0, missing)).unfold(2, span, SEGMENT).unbind(2) for t in (key, value))
    masks = pad(mask, (0, missing)).unfold(1, span, SEGMENT).unbind(1)
    found = []
    for index, part in enumerate(pieces(query, SEGMENT, 2)):
        assert part is not None
        own = window + part.shape[2]
        near = keys[index][..., :own].mT, values[index][..., :own].mT, masks[index][:, :own]
        since = first.since - index * SEGMENT
        found.append(walk(_segment, False, part, *near, first.key, first.value, since, window))
    sums, scales = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    return sums, scales


def _segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    first_key: Tensor,
    first_value: Tensor,
    first_since: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    """:func:`exact_reads` at once: blocks of queries, each beside the keys that one of them sees."""
    heads, length = query.shape[1:3]
    groups = key.shape[1]
    size = min(BLOCK, max(length, 1))
    blocks = max(-(-length // size), 1)
    missing = blocks * size - length
    span = window + size
    # Query heads that read one key head are rows of one product.
    rows = pad(query, (0, 0, 0, missing)).unflatten(2, (blocks, size)).unflatten(1, (groups, -1))
    rows = rows.transpose(2, 3).flatten(3, 4)  # (B, G, blocks, P size, d)
    near_key = pad(key, (0, 0, 0, missing)).unfold(2, span, size)  # (B, G, blocks, d, span)
    near_value = pad(value, (0, 0, 0, missing)).unfold(2, span, size)
    counted = pad(mask, (0, missing)).unfold(1, span, size)[:, :, None]  # (B, blocks, 1, span)
    ahead = torch.arange(span, device=key.device) - torch.arange(size, device=key.device)[:, None]
    visible = (counted & (ahead >= 1) & (ahead <= window))[:, None, :, None]  # (B, 1, blocks, 1, size, span)
    place = torch.arange(blocks * size, device=key.device).view(blocks, size, 1)
    since = (first_since[:, None, None, :] <= place)[:, None, :, None]  # (B, 1, blocks, 1, size, s)
    shape = (heads // groups, size)
    near = (rows @ near_key).unflatten(3, shape).masked_fill(~visible, -torch.inf)
    early = (rows @ first_key[:, :, None].mT).unflatten(3, shape).masked_fill(~since, -torch.inf)
    scores = torch.cat([near, early], -1)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
    recent, old = weights.flatten(3, 4).split([span, first_since.shape[1]], -1)
    sums = recent @ near_value.mT + old @ first_value[:, :, None]
    sums = torch.cat([sums.unflatten(3, shape), weights.sum(-1, keepdim=True)], -1)

    def rejoin(x: Tensor) -> Tensor:  # (B, G, blocks, P, size, c) -> (B, H, N, c)
        return x.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, :length]

    return rejoin(sums), rejoin(top)[..., 0]
