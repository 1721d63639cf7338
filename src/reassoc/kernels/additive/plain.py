"""Reading chunks where features are ordinary numbers and the decay is one number per token.

Two products a chunk: queries with the keys of their own chunk (a triangle), and queries with the
state of everything older.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import Before, KeyChunks
from .windows import Edge


def read(
    query: Tensor,  # (B, G, n, P, C, r)
    chunks: KeyChunks,
    before: Before,
    edge: Edge | None,
) -> Tensor:
    """``(B, G, n, P, C, c)``: what every query reads from its own chunk, the state and the edge."""
    groups = query.shape[3]
    key, value, log_decay = chunks.key.tensor, chunks.value, chunks.log_decay
    weight = query.flatten(3, 4) @ key.mT  # (B, G, n, P C, C)
    weight = weight.unflatten(3, (groups, -1))
    if log_decay is not None:
        weight = weight * decay_between(log_decay).exp()[:, :, :, None]
        since = log_decay.cumsum(-2)[:, :, :, None]  # from the start of the chunk through the query
        query = query * since.exp()
    read = weight.tril().flatten(3, 4) @ value + query.flatten(3, 4) @ before.memory
    if edge is not None:
        key, value = edge.chunks.key.tensor, edge.chunks.value
        if edge.log_after is not None and edge.log_between is not None:
            key = key * edge.log_after.exp()
            query = query * edge.log_between.exp()[:, :, :, None, None]
        weight = (query.flatten(3, 4) @ key.mT).unflatten(3, (groups, -1))
        read = read + weight.triu(1).flatten(3, 4) @ value
    reads: Tensor = read.unflatten(3, (groups, -1))
    return reads


def decay_between(log_decay: Tensor) -> Tensor:
    """``(..., C, 1)`` -> ``(..., C, C)``: decay from after key j (column) through query i (row).

    Each entry is a sum of its own terms, so gates of minus infinity and long chunks cost no digits.
    """
    size = log_decay.shape[-2]
    steps = log_decay.expand(*log_decay.shape[:-1], size)
    return torch.tril(steps, -1).cumsum(-2)
