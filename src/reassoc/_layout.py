"""What a query may see, as index arithmetic: packed sequences, and tails in front of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


def check_boundaries(cu_seqlens: Tensor, total: int) -> list[int]:
    """Boundaries of packed sequences as Python integers.

    Raises:
        ValueError: not starting at 0, decreasing, or not ending at the number of positions.
    """
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start with 0, got {bounds[0]}")
    for index, (left, right) in enumerate(pairwise(bounds)):
        if right < left:
            raise ValueError(f"cu_seqlens must not decrease, got {left} then {right} at index {index + 1}")
    if bounds[-1] != total:
        raise ValueError(f"cu_seqlens must end with the number of packed positions {total}, got {bounds[-1]}")
    return bounds


class PaddedBatch(NamedTuple):
    """Some of the packed sequences as a padded batch of k rows.

    Attributes:
        sequences: int64 ``(k,)``: which ones.
        queries, keys: int64 ``(k, L)``: packed positions, those of the padding arbitrary but valid.
        query_mask, key_mask: bool ``(k, L)``: True for real positions.
    """

    sequences: Tensor
    queries: Tensor
    query_mask: Tensor
    keys: Tensor
    key_mask: Tensor

    def take_queries(self, x: Tensor) -> Tensor:
        """``(1, H, N, ...)`` -> ``(k, H, L, ...)``."""
        return x[0][:, self.queries].transpose(0, 1)

    def take_keys(self, x: Tensor) -> Tensor:
        """``(1, G, M, ...)`` -> ``(k, G, L, ...)``."""
        return x[0][:, self.keys].transpose(0, 1)

    def visible(self, key_mask: Tensor | None) -> Tensor:
        """The mask ``(1, M)`` of the packed keys as one of these ``(k, L)``."""
        return self.key_mask if key_mask is None else self.key_mask & key_mask[0][self.keys]


def padded_batches(cu_queries: Tensor, cu_keys: Tensor) -> Iterator[PaddedBatch]:
    """Group packed sequences by the power of two of their length: at most half of it is padding."""
    device = cu_queries.device
    starts = torch.stack([cu_queries[:-1], cu_keys[:-1]]).long()
    sizes = torch.stack([cu_queries.diff(), cu_keys.diff()]).long()
    buckets: dict[int, list[int]] = {}
    for index, size in enumerate(sizes[0].tolist()):
        buckets.setdefault(size.bit_length(), []).append(index)
    for members in buckets.values():
        rows = torch.tensor(members, device=device)
        places = []
        for start, size in zip(starts[:, rows], sizes[:, rows], strict=True):
            offsets = torch.arange(int(size.max()), device=device)
            mask = offsets < size[:, None]
            places += [torch.where(mask, start[:, None] + offsets, 0), mask]
        yield PaddedBatch(rows, *places)


class Interleave(NamedTuple):
    """A tail of T positions in front of each of n packed sequences, as one packed run.

    Attributes:
        gather: int64 ``(N + n T,)``: where each position comes from in ``[tails end to end, tokens]``.
        cu_keys: ``(n + 1,)``: boundaries of the result.
        last: int64 ``(n, T)``: positions in the result of each sequence's new tail.
    """

    gather: Tensor
    cu_keys: Tensor
    last: Tensor


def interleave(cu_seqlens: Tensor, total: int, tail: int) -> Interleave:
    """Index arithmetic only: no value is read back, so it traces and never waits for a device."""
    count = cu_seqlens.shape[0] - 1
    device = cu_seqlens.device
    cu_seqlens = cu_seqlens.long()
    cu_keys = cu_seqlens + torch.arange(count + 1, device=device) * tail
    place = torch.arange(total + count * tail, device=device)
    sequence = torch.searchsorted(cu_keys[1:].contiguous(), place, right=True)
    offset = place - cu_keys[sequence]
    token = count * tail + cu_seqlens[sequence] + offset - tail
    gather = torch.where(offset < tail, sequence * tail + offset, token)
    last = cu_keys[1:, None] - tail + torch.arange(tail, device=device)
    return Interleave(gather, cu_keys, last)
