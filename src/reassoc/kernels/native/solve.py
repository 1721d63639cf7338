"""Problems of either family on the native library: features and values as they are, reads as they come."""

from __future__ import annotations

import math

import torch

from ..additive import problem as additive
from ..answer import Answer
from ..delta import problem as delta
from .call import Inputs, Options
from .operator import run


def solve(problem: additive.Problem | delta.Problem) -> Answer:
    """As the other backends answer it; the normalizer of an additive rule is one more column of values."""
    p, dtype = problem, str(problem.value.dtype).removeprefix("torch.")
    if isinstance(p, delta.Problem):
        value = p.value[..., :-1] if p.has_z else p.value
        inputs = Inputs(
            p.query, None, p.key, None, value, p.log_decay, p.beta, p.key_mask, _long(p.cu_seqlens), p.memory
        )
        # Without queries only the state is asked for, which no order of reads matters to.
        causal, normalizer, window = p.query.shape[2] == value.shape[2], p.has_z, 0
    else:
        inputs = Inputs(
            *p.query, *p.key, p.value, p.log_decay, None, p.key_mask, _long(p.cu_keys), p.memory, p.scale,
            None, None, _long(p.cu_queries) if p.window else None,
        )  # fmt: skip
        causal, normalizer, window = p.causal, False, p.window or 0
    found = run(inputs, Options(causal, "identity", False, normalizer, False, 0.0, math.nan, dtype, window))
    return Answer(found.out, found.log_row, found.memory, found.scale)


def _long(boundaries: torch.Tensor | None) -> torch.Tensor | None:
    return None if boundaries is None else boundaries.long()
