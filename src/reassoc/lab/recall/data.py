"""Multi-query associative recall (MQAR): pairs of a key and its value, then keys whose values are asked.

Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models", with their sizes
of everything but the ones a user chooses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._errors import InputError

# How the distance of a question falls off: the probability of the j-th free place goes like j^(0.01 - 1),
# so most questions come soon after the pairs and some much later.
POWER = 0.01
IGNORED = -100  # the label of a position where nothing is asked, as torch's cross entropy has it


class Size(NamedTuple):
    """How long a sequence is and how much it asks: written ``TOKENS:PAIRS``."""

    tokens: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.tokens}:{self.pairs}"


def check_size(size: Size, vocabulary: int, option: str) -> None:
    """Raise ``InputError`` if no sequence of this size can be drawn from the vocabulary."""
    if not 1 <= size.pairs <= size.tokens // 4:
        raise InputError(
            f"{option}: expected TOKENS:PAIRS with at least 1 pair, and 4 tokens for each (a key, its value, "
            f"room for its question), got {size}"
        )
    if size.pairs > vocabulary // 2 - 1:
        raise InputError(
            f"{option}: {size} has more pairs than a vocabulary of {vocabulary} has keys "
            f"({vocabulary // 2 - 1}): raise --vocabulary"
        )


def draw(size: Size, count: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences and what is to be answered.

    A sequence is key, value, key, value, ...: keys of 1 to V/2 - 1 and values of V/2 to V - 1, each once.
    Then every key is asked once, on every other place at most; the places between hold any token at random,
    so a key may stand there too, unasked.

    Args:
        size: tokens N and pairs. count: sequences B. vocabulary: V. generator: source of all chance.

    Returns:
        (tokens, labels), int64 ``(B, N)``; a label is the value of the key at that position, or
        :data:`IGNORED`.
    """
    tokens, pairs = size
    half = vocabulary // 2
    keys = 1 + _distinct(count, half - 1, pairs, generator)
    values = half + _distinct(count, vocabulary - half, pairs, generator)
    sequence = torch.randint(vocabulary, (count, tokens), generator=generator)
    sequence[:, 0 : 2 * pairs : 2] = keys
    sequence[:, 1 : 2 * pairs : 2] = values
    free = (tokens - 2 * pairs) // 2
    weights = torch.arange(1, free + 1, dtype=torch.float64) ** (POWER - 1)
    places = torch.multinomial(weights.expand(count, free), pairs, generator=generator)
    at = 2 * pairs + 2 * places
    sequence.scatter_(1, at, keys)
    labels = torch.full((count, tokens), IGNORED).scatter_(1, at, values)
    return sequence, labels


def _distinct(count: int, among: int, chosen: int, generator: torch.Generator) -> Tensor:
    """``(count, chosen)``: in each row different numbers of 0 to among - 1, every choice as likely."""
    return torch.rand(count, among, generator=generator).argsort(dim=1)[:, :chosen]
