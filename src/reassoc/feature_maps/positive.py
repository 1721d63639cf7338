"""Positive random features: unbiased estimates of the softmax kernel that are never negative."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import ExponentialMap
from .random import RandomFeatures
from .variance import optimal_variance, pairwise_sums, positive_variance


class PositiveFeatures(RandomFeatures, ExponentialMap):
    """FAVOR+: ``m^-1/2 exp(w . x - |x|^2 / 2)``, with expectation ``exp(scale * q . k)``.

    Carried as logarithms: exact for inputs of any norm. (The estimate is what it is: its relative
    variance grows like ``exp(|x + y|^2)``; see ``reassoc fidelity``.)

    Args:
        dim: d.
        num_features: number m of projections; default ``ceil(d ln d)``. r = m, hyperbolic 2m.
        orthogonal: rows orthogonal in blocks of d.
        norms: ``"chi"``, or ``"sqrt_dim"`` for the regularised kernel SMREG (biased for softmax).
        hyperbolic: both ``w`` and ``-w``: antithetic pairs, less variance a feature where x + y is small.
        optimal: FAVOR++, ``(1-4A)^(d/4) m^-1/2 exp(A|w|^2 + sqrt(1-4A) w.x - |x|^2/2)``, with A <= 0
            set from data by :meth:`RandomFeatures.calibrate_`; before that A is 0, which is FAVOR+.
        scale, seed, projections, heads: see :class:`reassoc.feature_maps.random.RandomFeatures`.

    Sources: Choromanski et al. 2021, lemma 1 and section 2.4; Likhosherstov et al. 2022 (optimal).
    """

    name = "favor+"
    nonnegative = True

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        orthogonal: bool = True,
        norms: str = "chi",
        hyperbolic: bool = False,
        optimal: bool = False,
        scale: float | None = None,
        seed: int = 0,
        projections: Tensor | None = None,
        heads: int | None = None,
    ) -> None:
        if optimal and norms == "sqrt_dim":
            raise ValueError(
                "optimal=True needs norms='chi': its weights are for Gaussian projections, "
                "norms='sqrt_dim' estimates another kernel"
            )
        self.hyperbolic, self.optimal = hyperbolic, optimal
        super().__init__(
            dim, num_features, per_projection=2 if hyperbolic else 1, orthogonal=orthogonal, norms=norms,
            scale=scale, seed=seed, projections=projections, heads=heads,
        )  # fmt: skip

    @property
    def papers(self) -> tuple[str, ...]:  # type: ignore[override]
        """What to cite for these options."""
        return ("choromanski2021", "likhosherstov2022") if self.optimal else ("choromanski2021",)

    def _options(self) -> str:
        return f", hyperbolic={self.hyperbolic}, optimal={self.optimal}"

    def _tilt(self, dtype: torch.dtype) -> Tensor:
        """A of the optimal map, ``()`` or ``(G, 1, 1)``, from g = E|x + y|^2."""
        g, d = self.mean_square.to(dtype), self.dim
        # Written so that g = 0 keeps its digits.
        ratio = 2 * d / (2 * g + d + torch.sqrt((2 * g + d) ** 2 + 8 * d * g))
        return (1 - 1 / ratio) / 8

    def _factors(self, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logarithms of the features as one product of ``(..., k)`` and ``(m, k)``.

        What is added to a whole row, or to a whole feature, travels as further coordinates: sums over
        (..., m) would cost as much as the product, in memory traffic.
        """
        rows = self.projections.to(x.dtype)
        offset = -x.square().sum(-1, keepdim=True) / 2 - math.log(self.feature_dim) / 2
        left = [x, offset if weight is None else offset + weight]
        right = [rows, torch.ones_like(rows[..., :1])]
        if self.optimal:
            tilt = self._tilt(x.dtype)
            per_feature = tilt * rows.square().sum(-1, keepdim=True) + (self.dim / 4) * (1 - 4 * tilt).log()
            right = [rows * (1 - 4 * tilt).sqrt(), right[1], per_feature]
            left.append(torch.ones_like(offset))
        if self.hyperbolic:
            mirrored = (-right[0], *right[1:])
            right = [torch.cat([part, other], -2) for part, other in zip(right, mirrored, strict=True)]
        return torch.cat(left, -1), torch.cat(right, -1)

    def relative_variance(self, query: Tensor, key: Tensor) -> Tensor:
        """Predicted variance of the kernel estimate over draws, relative to ``exp(scale q.k)^2``.

        Args:
            query: ``(..., N, d)``. key: ``(..., M, d)``; with ``heads``, G on axis -3.

        Returns:
            float64 ``(..., N, M)``. Above about 1 an estimate is worthless: most draws miss the few
            projections that carry the kernel. For ``optimal`` an upper bound (see variance.py).

        Raises:
            ValueError: ``norms="sqrt_dim"``, which estimates another kernel.
        """
        if self.norms != "chi":
            raise ValueError(
                "relative_variance: norms='sqrt_dim' estimates the regularised kernel, not softmax"
            )
        x, y = self._queries(query.double()), self._keys(key.double())[0]
        squares = pairwise_sums(x, y, 1.0)
        if self.optimal:
            tilt = self._tilt(torch.float64)
            return optimal_variance(squares, self.dim, self.num_features, tilt, self.hyperbolic)
        return positive_variance(squares, self.dim, self.num_features, self.orthogonal, self.hyperbolic)

    def log_query_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(..., k)`` and ``(r, k)`` or ``(G, r, k)``: their product is :meth:`log_query`."""
        return self._factors(self._queries(x))

    def log_key_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(..., k)`` and ``(r, k)`` or ``(G, r, k)``: their product is :meth:`log_key`."""
        return self._factors(*self._keys(x))

    def log_query(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., r)``; calibrated, without :meth:`RandomFeatures.log_query_factor`."""
        left, right = self.log_query_factors(x)
        return left @ right.mT

    def log_key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., r)``."""
        left, right = self.log_key_factors(x)
        return left @ right.mT
