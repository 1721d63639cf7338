"""Kernel families and backends: the one table of what computes what, and where.

Kernels know features, values, gates and layouts; they know no feature map, rule object or
normalization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._library import library, reason
from .additive import reference as additive_reference
from .answer import Answer
from .delta import problem as delta
from .delta import reference as delta_reference
from .native import solve as native
from .native.call import KINDS
from .traced import FAMILIES, Problem, traced

BACKENDS = ("reference", "torch", "native")
_REFERENCES: dict[str, Callable[[Any], Answer]] = {
    "additive": additive_reference.additive,
    "delta": delta_reference.delta,
}


def choose(backend: str, like: Tensor | None = None) -> str:
    """The backend that a call on such tensors will use: the one named, or for "auto" the fastest that can.

    Raises:
        ValueError: no such backend, or one that cannot serve the call.
    """
    if backend == "auto":
        return "torch" if like is None or _not_native(like) else "native"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of 'auto', 'reference', 'torch', 'native'; got {backend!r}")
    if backend == "native":
        why = reason() if library() is None else like is not None and _not_native(like)
        if why:
            raise ValueError(f"backend 'native' cannot serve this call: {why}. Use 'auto' or 'torch'")
    return backend


def _not_native(like: Tensor) -> str:
    """Why the native backend cannot take tensors like this one; empty: it can."""
    if library() is None:
        return reason()
    if like.device.type != "cpu":
        return f"it runs on the CPU, the tensors are on {like.device}"
    if like.dtype not in KINDS:
        return f"it takes {', '.join(map(str, KINDS))}, not {like.dtype}"
    if transformed():
        return "it knows no torch.func transforms and no forward-mode differentiation"
    return ""


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work: for torch operations only."""
    # Not peek_interpreter_stack: a compiler takes its None for something.
    inside = torch._C._functorch.maybe_current_level() is not None
    return inside or getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def backends() -> dict[str, str]:
    """Which backends this machine has: name -> ``"available"``, or why not.

    Example:
        >>> import reassoc
        >>> reassoc.backends()["torch"]
        'available'
    """
    return {"reference": "available", "torch": "available", "native": reason()}


def solve(problem: Problem, backend: str) -> Answer:
    """Run a problem of either family on a backend that :func:`choose` returned."""
    family = "delta" if isinstance(problem, delta.Problem) else "additive"
    if backend == "reference":
        return _REFERENCES[family](problem)
    if backend == "native":
        return native.solve(problem)
    if torch.compiler.is_compiling():
        return traced(family, problem)
    return FAMILIES[family][1](problem)
