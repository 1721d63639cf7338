"""Training data in a fixed order: every model sees the same tokens at the same step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..._errors import InputError


class Segment(NamedTuple):
    """What one step takes: inputs and targets int64 ``(streams, segment)``, a token apart.

    ``fresh``: the streams begin here, so there is no context to carry.
    """

    inputs: Tensor
    targets: Tensor
    fresh: bool


class Streams:
    """A text cut into streams that run side by side, each step taking the next segment of every one.

    Segments of a stream follow each other in the text, so a state carried from step to step is the context
    that the text really has. After the last whole segment the streams begin again.

    Args:
        tokens: int64 ``(n,)``. batch: number of streams. segment: tokens of a step and stream.
        rank, ranks: this process and how many there are; streams are divided among them in order.

    Raises:
        InputError: the batch cannot be divided among the processes.
    """

    def __init__(self, tokens: Tensor, batch: int, segment: int, rank: int = 0, ranks: int = 1) -> None:
        if batch % ranks:
            raise InputError(f"--batch: {batch} streams cannot be divided among {ranks} processes")
        own = batch // ranks
        length = (len(tokens) - 1) // batch
        self.segments = length // segment
        self._size = segment
        # One token more than the inputs: the last target. (streams, length + 1), neighbors overlap in it.
        windows = tokens.unfold(0, length + 1, length)[:batch]
        self._streams = windows[rank * own : (rank + 1) * own]

    def at(self, step: int) -> Segment:
        """The segment of a step, counted from 0."""
        index = step % self.segments
        start = index * self._size
        piece = self._streams[:, start : start + self._size + 1]
        return Segment(piece[:, :-1].contiguous(), piece[:, 1:].contiguous(), index == 0)
