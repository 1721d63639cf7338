"""What every backend of the additive family is asked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._features import Features
from ..._layout import PaddedBatch


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
    log_decay: Tensor | None = None
    key_mask: Tensor | None = None
    cu_queries: Tensor | None = None
    cu_keys: Tensor | None = None
    memory: Tensor | None = None
    scale: Tensor | None = None
    causal: bool = False
    window: int | None = None

    @property
    def exponential(self) -> bool:
        """Whether logarithms travel: the answer then carries ``log_row`` and ``scale``."""
        return self.key.log is not None

    @property
    def width(self) -> int:
        """Feature size r: one logarithm may serve a whole vector, so it is the widest part's."""
        return max(part.shape[-1] for part in (*self.query, *self.key) if part is not None)

    def batch(self, part: PaddedBatch) -> Problem:
        """Some of the packed sequences as a padded batch."""
        return self._replace(
            query=self.query.map(part.take_queries),
            key=self.key.map(part.take_keys),
            value=part.take_keys(self.value),
            log_decay=None if self.log_decay is None else part.take_keys(self.log_decay),
            key_mask=part.visible(self.key_mask),
            cu_queries=None,
            cu_keys=None,
            memory=None if self.memory is None else self.memory[part.sequences],
            scale=None if self.scale is None else self.scale[part.sequences],
        )

    def flatten(self) -> tuple[list[Tensor | None], list[int]]:
        """Tensors and options, for an operator that takes nothing else; :meth:`restore` is the inverse."""
        return [*self.query, *self.key, *self[2:9]], [self.causal, self.window or 0]

    @classmethod
    def restore(cls, tensors: list[Tensor | None], options: list[int]) -> Problem:
        """What :meth:`flatten` took apart."""
        query, key = Features(*tensors[:2]), Features(*tensors[2:4])
        causal, window = options
        return cls(query, key, *tensors[4:], bool(causal), window or None)  # type: ignore[call-arg, arg-type]

    def answer_shapes(self) -> tuple[tuple[int | torch.SymInt, ...] | None, ...]:
        """Shapes of an :class:`reassoc.kernels.answer.Answer`, ``None`` for its empty places."""
        batch, heads, _, columns = self.value.shape
        count = batch if self.cu_queries is None else self.cu_queries.shape[0] - 1
        rows = self.query.tensor.shape[:3]
        state = (count, heads, self.width)
        return (
            (*rows, columns),
            tuple(rows) if self.exponential else None,
            (*state, columns) if self.window is None else None,
            state if self.window is None and self.exponential else None,
        )
