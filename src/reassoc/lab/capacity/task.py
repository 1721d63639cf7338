"""The retrieval task of Schlag et al. 2021: pairs of a key and a value, then one key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Sequences of B times T pairs with one question each: int64, numbers of keys and values below N."""

    keys: Tensor  # (B, T)
    values: Tensor  # (B, T)
    query: Tensor  # (B,)
    target: Tensor  # (B,)


def pairs(
    count: int, length: int, batch: int, repeats: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Keys and values of sequences, ``(batch, length)`` each.

    Args:
        count: N different keys and as many values. length: pairs of a sequence.
        repeats: drawn with replacement (setting 2), or each key and value at most once (setting 1).
    """
    if repeats:
        keys, values = (torch.randint(count, (batch, length), generator=generator) for _ in range(2))
    else:
        keys, values = (
            torch.rand(batch, count, generator=generator).argsort(dim=1)[:, :length] for _ in range(2)
        )
    return keys, values


def draw(count: int, length: int, batch: int, repeats: bool, generator: torch.Generator) -> Batch:
    """Sequences to learn from: the question is a key that was there, the answer the last value it had."""
    keys, values = pairs(count, length, batch, repeats, generator)
    query = keys.gather(1, torch.randint(length, (batch, 1), generator=generator))
    places = torch.arange(length).expand(batch, -1)
    last = places.where(keys == query, -1).amax(1, keepdim=True)
    return Batch(keys, values, query[:, 0], values.gather(1, last)[:, 0])


def answers(keys: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The last value of every key, ``(B, N)``, and whether the key was there at all, bool ``(B, N)``."""
    places = torch.arange(keys.shape[1]).expand_as(keys)
    last = torch.full((len(keys), count), -1).scatter_reduce(1, keys, places, "amax")
    return values.gather(1, last.clamp(min=0)), last >= 0
