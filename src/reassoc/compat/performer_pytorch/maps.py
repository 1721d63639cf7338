"""Feature maps over a given matrix, without a draw of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...feature_maps import ExponentialMap, FeatureMap
from .kernels import project

_TOKENS = 512  # whose logarithms are there at once


class Projections(ExponentialMap):
    """``exp(W x)`` with x the input times ``d^-1/4``: softmax features without what a whole token shares."""

    name = "performer-projections"
    papers = ("choromanski2021",)

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(int(matrix.shape[1]), int(matrix.shape[0]))
        self.rows = matrix * self.dim**-0.25

    def log_query_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input as it is, and the matrix with the scale in it."""
        return x, self.rows

    log_key_factors = log_query_factors

    def log_query(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., m)``."""
        log: Tensor = x @ self.rows.mT
        return log

    log_key = log_query

    def largest(self, x: Tensor) -> Tensor:
        """The largest logarithm, ``(B, H, N, d) -> (B, H, N, 1)``; all of them are never there at once."""
        with torch.no_grad():
            parts = [self.log_query(part).argmax(-1) for part in x.split(_TOKENS, dim=2)]
        largest: Tensor = (x * self.rows[torch.cat(parts, dim=2)]).sum(-1, keepdim=True)
        return largest


class SoftmaxFeatures(Projections):
    """``m^-1/2 exp(W x - |x|^2 / 2)`` with x the input times ``d^-1/4``: FAVOR+ over a matrix that changes.

    :class:`reassoc.feature_maps.PositiveFeatures` remembers by a digest which matrix made a state; here no
    state outlives a call. What is common to a query's features is left out: no copy of the queries.

    Source: Choromanski et al. 2021, lemma 1.
    """

    name = "performer-softmax"
    papers = ("choromanski2021",)

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        self.rows_and_one = torch.cat([self.rows, torch.ones_like(self.rows[:, :1])], -1)

    def log_query_factor(self, x: Tensor) -> Tensor:
        """``-|x|^2 / 2`` and the logarithm of ``m^-1/2``, ``(...,)``."""
        half: Tensor = x.square().sum(-1) * (self.dim**-0.5 / 2)
        return -half - math.log(self.feature_dim) / 2

    def log_key_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The keys with one more coordinate, for what belongs to a whole key."""
        return torch.cat([x, self.log_query_factor(x)[..., None]], -1), self.rows_and_one

    def log_key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., m)``."""
        left, right = self.log_key_factors(x)
        log: Tensor = left @ right.mT
        return log


class ProjectedFeatures(FeatureMap):
    """``f(W x) + eps`` for any function f, x the input times ``d^-1/4``.

    Source: Choromanski et al. 2021, section 2.2 (generalized attention).
    """

    name = "performer-generalized"
    papers = ("choromanski2021",)

    def __init__(self, matrix: Tensor, function: Callable[[Tensor], Tensor], eps: float) -> None:
        super().__init__(int(matrix.shape[1]), int(matrix.shape[0]))
        self.matrix, self.function, self.eps = matrix, function, eps

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., m)``."""
        features = self.function(project(x, self.matrix, self.dim**-0.25))
        return features + self.eps if self.eps else features

    def query(self, x: Tensor) -> Tensor:
        """As :meth:`key`."""
        return self.key(x)
