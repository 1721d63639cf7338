"""What every backend of the additive family is asked, and what it answers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..._features import Features


class Problem(NamedTuple):
    """One call of an additive rule (sum, decay) on features.

    Shapes: B batch, G key heads, H = G P query heads, N queries, M keys, r features, c value columns
    (a last column of ones makes the normalizer z a part of the state like any value). All tensors
    have the dtype of accumulation, float32 or float64.

    Attributes:
        query: features ``(B, H, N, r)``. key: features ``(B, G, M, r)``; both have logarithms or neither.
        value: ``(B, G, M, c)``.
        log_decay: ``(B, G, M, 1 or r)`` or ``None``.
        key_mask: bool ``(B, M)``: a hidden key is the identity on the state. ``None``: all are real.
        cu_queries, cu_keys: int ``(n + 1,)``: B is 1 and holds n packed sequences end to end.
        memory: ``(B or n, G, r, c)``: the state before the first key, or ``None`` for zero.
        scale: ``(B or n, G, r)``: its ``log_scale``, where features are exponential.
        causal: query i sees keys up to its own position; queries are aligned with the LAST N keys.
            Otherwise every query sees all keys.
        window: with ``causal``, only the most recent ``window`` positions, its own included.
    """

    query: Features
    key: Features
    value: Tensor
    log_decay: Tensor | None
    key_mask: Tensor | None
    cu_queries: Tensor | None
    cu_keys: Tensor | None
    memory: Tensor | None
    scale: Tensor | None
    causal: bool
    window: int | None

    @property
    def exponential(self) -> bool:
        """Whether logarithms travel: the answer then carries ``log_row`` and ``scale``."""
        return self.key.log is not None


class Answer(NamedTuple):
    """Unnormalized reads and the state after the last key.

    Attributes:
        read: ``(B, H, N, c)``; the true read is ``exp(log_row) * read``.
        log_row: ``(B, H, N)`` without gradient, or ``None`` (zero) where nothing is exponential.
        memory: ``(B or n, G, r, c)``; ``None`` with a window (the tail is the state then).
        scale: ``(B or n, G, r)`` without gradient, or ``None``.
    """

    read: Tensor
    log_row: Tensor | None
    memory: Tensor | None
    scale: Tensor | None
