"""Packed sequences as a few padded batches of sequences of similar length."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .._layout import padded_batches
from .additive import problem as additive
from .answer import Answer
from .delta import problem as delta

P = TypeVar("P", additive.Problem, delta.Problem)


def packed(problem: P, cu_queries: Tensor, cu_keys: Tensor, solve: Callable[[P], Answer]) -> Answer:
    """Answer a packed call with a solver of batches that are not packed."""
    shapes = problem.answer_shapes()
    if cu_queries.shape[0] == 1:  # no sequence at all
        return Answer(*(None if s is None else problem.value.new_zeros(s) for s in shapes))  # type: ignore[arg-type]
    _, heads, total, columns = shapes[0] or ()
    read = problem.value.new_zeros(total, heads, columns)
    log_row = None if shapes[1] is None else problem.value.new_zeros(total, heads)
    memories, scales, order = [], [], []
    for batch in padded_batches(cu_queries, cu_keys):
        answer = solve(problem.batch(batch))
        places = batch.queries[batch.query_mask]
        read = read.index_copy(0, places, answer.read.transpose(1, 2)[batch.query_mask])
        if log_row is not None and answer.log_row is not None:
            log_row = log_row.index_copy(0, places, answer.log_row.transpose(1, 2)[batch.query_mask])
        memories.append(answer.memory)
        scales.append(answer.scale)
        order.append(batch.sequences)
    back = torch.cat(order).argsort()

    def whole(parts: list[Tensor | None]) -> Tensor | None:
        found = [part for part in parts if part is not None]
        return torch.cat(found)[back] if found else None

    read = read.transpose(0, 1)[None]
    return Answer(
        read, None if log_row is None else log_row.transpose(0, 1)[None], whole(memories), whole(scales)
    )
