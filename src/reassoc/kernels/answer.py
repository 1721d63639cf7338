"""What a backend of either family answers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Answer(NamedTuple):
    """Unnormalized reads and the state after the last key.

    Attributes:
        read: ``(B, H, N, c)``; the true read is ``exp(log_row) * read``.
        log_row: ``(B, H, N)`` without gradient, or ``None`` (zero) where nothing is exponential.
        memory: ``(B or n, G, r, c)``; ``None`` with a window (the tail is the state then).
        scale: ``(B or n, G, r)`` without gradient, or ``None``.
    """

    read: Tensor
    log_row: Tensor | None = None
    memory: Tensor | None = None
    scale: Tensor | None = None
