"""What every backend of the delta family is asked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._layout import PaddedBatch


class Problem(NamedTuple):
    """One call of a delta rule (delta, gated delta) on features at their true scale; always causal.

    Shapes: B batch, G key heads, H = G P query heads, N queries, M keys, r features, c value columns.
    All tensors have the dtype of accumulation, float32 or float64.

    Attributes:
        query: ``(B, H, N, r)``, N == M, or N == 0 where only the state is asked for.
        key: ``(B, G, M, r)``. value: ``(B, G, M, c)``. beta: ``(B, G, M)``.
        log_decay: ``(B, G, M, 1 or r)`` or ``None``.
        key_mask: bool ``(B, M)``: a hidden key is the identity on the state. ``None``: all are real.
        cu_seqlens: int ``(n + 1,)``: B is 1 and holds n packed sequences end to end.
        memory: ``(B or n, G, r, c)``: the state before the first key, or ``None`` for zero.
        has_z: the last value column holds ones and is *added* to the state as it is, neither weighted by
            beta nor reduced by what the state holds: that is the normalizer z.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    log_decay: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    memory: Tensor | None = None
    has_z: bool = False

    @property
    def width(self) -> int:
        """Feature size r."""
        return self.key.shape[-1]

    def start(self) -> Tensor:
        """The state before the first key."""
        if self.memory is not None:
            return self.memory
        shape = self.answer_shapes()[2]
        assert shape is not None
        return self.value.new_zeros(shape)

    def hide_masked(self) -> Problem:
        """Hidden keys become features of zero that write zero and do not decay."""
        if self.key_mask is None:
            return self
        hidden = ~self.key_mask[:, None, :, None]
        return self._replace(
            key=self.key.masked_fill(hidden, 0.0),
            value=self.value.masked_fill(hidden, 0.0),
            beta=self.beta.masked_fill(hidden[..., 0], 0.0),
            log_decay=None if self.log_decay is None else self.log_decay.masked_fill(hidden, 0.0),
            key_mask=None,
        )

    def batch(self, part: PaddedBatch) -> Problem:
        """Some of the packed sequences as a padded batch."""
        of_key = part.take_keys
        return self._replace(
            query=part.take_queries(self.query),
            key=of_key(self.key),
            value=of_key(self.value),
            beta=of_key(self.beta),
            log_decay=None if self.log_decay is None else of_key(self.log_decay),
            key_mask=part.visible(self.key_mask),
            cu_seqlens=None,
            memory=None if self.memory is None else self.memory[part.sequences],
        )

    def flatten(self) -> tuple[list[Tensor | None], list[int]]:
        """Tensors and options, for an operator that takes nothing else; :meth:`restore` is the inverse."""
        return list(self[:-1]), [self.has_z]

    @classmethod
    def restore(cls, tensors: list[Tensor | None], options: list[int]) -> Problem:
        """What :meth:`flatten` took apart."""
        return cls(*tensors, bool(options[0]))  # type: ignore[call-arg, arg-type]

    def answer_shapes(self) -> tuple[tuple[int | torch.SymInt, ...] | None, ...]:
        """Shapes of an :class:`reassoc.kernels.answer.Answer`, ``None`` for its empty places."""
        batch, heads, _, columns = self.value.shape
        count = batch if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return (*self.query.shape[:3], columns), None, (count, heads, self.width, columns), None
