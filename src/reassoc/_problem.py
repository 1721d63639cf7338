"""Prepared queries and keys as a problem of the rule's kernel family."""

from __future__ import annotations

from torch import Tensor

from ._features import Features
from ._prepare import Keys, Settings
from ._state import require_scale
from .kernels.additive import problem as additive
from .kernels.delta import problem as delta


def pose(
    query: Features,  # (B, H, N, r)
    keys: Keys,
    s: Settings,
    *,
    cu_queries: Tensor | None = None,
    cu_keys: Tensor | None = None,
    memory: Tensor | None = None,  # the state before the first key
    scale: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
) -> additive.Problem | delta.Problem:
    """The problem that :func:`reassoc.kernels.solve` takes; a delta rule is causal and has no window."""
    if memory is not None and keys.beta is None:
        require_scale(keys.features.log is not None, scale)
    if keys.beta is None:
        return additive.Problem(
            query, keys.features, keys.value, keys.log_decay, keys.mask, cu_queries, cu_keys, memory, scale,
            causal, window,
        )  # fmt: skip
    return delta.Problem(
        query.tensor, keys.features.tensor, keys.value, keys.beta, keys.log_decay, keys.mask, cu_keys, memory,
        s.has_z,
    )  # fmt: skip
