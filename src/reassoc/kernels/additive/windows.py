"""A window as a composition: nothing is ever subtracted from a state.

With chunks of C positions (C at most the window W), the queries of one chunk see

- the keys of their own chunk up to themselves: a lower triangle;
- the W - C positions before the chunk, all of them: the *middle*, composed of whole chunks and one
  partial chunk at its old end;
- of the C positions before that, the *edge*, those not yet out of the window: a strict upper triangle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunks import CHUNK, Before, KeyChunks, Written, compose, decay_after, slide, write


class Edge(NamedTuple):
    """The oldest C positions a chunk's queries may see, position j by the queries i < j only.

    Attributes:
        chunks: their keys and values. log_after: ``(B, G, n, C, 1 or r)``: decay from after each to
            the end of the edge. log_between: ``(B, G, n, 1 or r)``: decay of the whole middle.
            Both ``None`` without decay.
    """

    chunks: KeyChunks
    log_after: Tensor | None
    log_between: Tensor | None


def chunk_size(window: int | None, length: int) -> int:
    """Positions per chunk, a power of two: no longer than the sequence, or than a window.

    With a window a short piece takes whole chunks all the same: its context, the window, is not short.
    """
    if window is None:
        return min(CHUNK, 1 << max(length - 1, 0).bit_length())
    return min(CHUNK, 1 << (window.bit_length() - 1))


def split(
    keys: KeyChunks,  # W positions of context, then the segment, cut in ONE chunk: (B, G, 1, W + L, ·)
    window: int,
    chunk: int,  # divides L
) -> tuple[KeyChunks, Before, Edge]:
    """Own chunks, the state of the middle, and the edge, for every chunk of the segment."""
    total = keys.value.shape[-2]
    length = total - window
    whole, rest = divmod(window - chunk, chunk)

    def take(start: int, count: int, size: int = chunk) -> KeyChunks:
        def slice_(x: Tensor) -> Tensor:
            chunks: Tensor = x[:, :, 0, start : start + count].unflatten(2, (-1, chunk))
            return chunks[..., :size, :]

        return KeyChunks(
            keys.key.map(slice_),
            slice_(keys.value),
            None if keys.log_decay is None else slice_(keys.log_decay),
        )

    own, edge = take(window, length), take(0, length)
    middle: Written | None = write(take(chunk, length, rest)) if rest else None
    if whole:
        start = window - whole * chunk
        run = slide(write(take(start, total - start - chunk)), whole)
        middle = run if middle is None else compose(middle, run)
    if middle is None:
        middle = _nothing(own)
    after = None if edge.log_decay is None else decay_after(edge.log_decay)
    between = middle.log_decay
    if after is not None and between is None:
        between = after.new_zeros(()).expand(*after.shape[:3], after.shape[-1])
    return own, Before(middle.memory, middle.scale), Edge(edge, after, between)


def _nothing(own: KeyChunks) -> Written:
    features = own.key.tensor.shape[-1] if own.key.mantissa is None else own.key.mantissa.shape[-1]
    shape = (*own.value.shape[:3], features)
    scale = None if own.key.log is None else own.value.new_full((1,), -torch.inf).expand(shape)
    return Written(own.value.new_zeros(()).expand(*shape, own.value.shape[-1]), scale, None)
