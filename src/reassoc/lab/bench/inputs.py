"""Random inputs of a problem: the same tensors for every contender."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from .settings import DTYPES, Problem, Settings


class Inputs(NamedTuple):
    """Tensors of one call.

    Attributes:
        query, key: ``(B, H, N, d)``. value: ``(B, H, N, e)``. beta: ``(B, H, N)`` or ``None``.
        log_decay: ``(B, H, N)``, for ``kda`` ``(B, H, N, r)``, or ``None``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor | None
    log_decay: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that there are: what gradients are taken of."""
        return tuple(t for t in self if t is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def part(self, start: int, stop: int) -> Inputs:
        """Tokens from start to stop."""
        return self.like(tuple(t[:, :, start:stop] for t in self.tensors))

    def like(self, tensors: tuple[Tensor, ...]) -> Inputs:
        """Other tensors in the places of :attr:`tensors`."""
        rest = iter(tensors)
        q, k, v = next(rest), next(rest), next(rest)
        beta = None if self.beta is None else next(rest)
        return Inputs(q, k, v, beta, None if self.log_decay is None else next(rest))


def make_inputs(settings: Settings, problem: Problem, length: int) -> Inputs:
    """Standard normal queries, keys and values; gates as models start with.

    Identity features get queries and keys of norm one, as gated and delta layers do: a longer key would
    make a delta write overshoot.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (settings.batch, settings.heads, length)

    def normal(*size: int) -> Tensor:
        return torch.randn(*shape, *size, generator=generator)

    query, key = normal(settings.head_dim), normal(settings.head_dim)
    value = normal(settings.value_dim)
    beta = normal().sigmoid() if problem.delta else None
    log_decay = None
    if problem.decays:
        size = (settings.feature_map(problem.map).feature_dim,) if problem.rule == "kda" else ()
        log_decay = logsigmoid(normal(*size) + 4.0)  # a token keeps 0.98 of the state in the median
    if problem.map == "identity":
        query, key = normalize(query, dim=-1), normalize(key, dim=-1)
    dtype = DTYPES[settings.dtype]
    found = Inputs(query, key, value, beta, log_decay)
    return found.like(tuple(t.to(dtype) for t in found.tensors))
