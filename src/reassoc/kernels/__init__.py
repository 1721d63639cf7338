"""Kernel families and backends: the one table of what computes what, and where.

Kernels know features, values, gates and layouts; they know no feature map, rule object or
normalization.
"""

from __future__ import annotations

import torch

from .additive import chunked, reference, traced
from .additive.problem import Answer, Problem

BACKENDS = ("reference", "torch")


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


def additive(problem: Problem, backend: str) -> Answer:
    """Run a problem of the additive family on a backend that :func:`choose` returned."""
    if backend == "reference":
        return reference.additive(problem)
    if torch.compiler.is_compiling():
        return traced.traced(problem)
    return chunked.additive(problem)
