"""Kernel families and backends: the one table of what computes what, and where.

Kernels know features, values, gates and layouts; they know no feature map, rule object or
normalization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .additive import reference as additive_reference
from .answer import Answer
from .delta import problem as delta
from .delta import reference as delta_reference
from .traced import FAMILIES, Problem, traced

BACKENDS = ("reference", "torch")
_REFERENCES: dict[str, Callable[[Any], Answer]] = {
    "additive": additive_reference.additive,
    "delta": delta_reference.delta,
}


def choose(backend: str) -> str:
    """The backend that a call will use: the one named, or for "auto" the fastest that supports it.

    Raises:
        ValueError: no such backend, or one that this machine or version does not have.
    """
    if backend == "auto":
        return "torch"
    if backend == "native":
        raise ValueError(f"backend 'native' is not available: {backends()['native']}; use 'auto' or 'torch'")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of 'auto', 'reference', 'torch', 'native'; got {backend!r}")
    return backend


def backends() -> dict[str, str]:
    """Which backends this machine has: name -> ``"available"``, or why not.

    Example:
        >>> import reassoc
        >>> reassoc.backends()["torch"]
        'available'
    """
    return {
        "reference": "available",
        "torch": "available",
        "native": "not part of this version of reassoc; 'torch' serves every call",
    }


def solve(problem: Problem, backend: str) -> Answer:
    """Run a problem of either family on a backend that :func:`choose` returned."""
    family = "delta" if isinstance(problem, delta.Problem) else "additive"
    if backend == "reference":
        return _REFERENCES[family](problem)
    if torch.compiler.is_compiling():
        return traced(family, problem)
    return FAMILIES[family][1](problem)
