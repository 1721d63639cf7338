"""Random Fourier features: signed estimates of the Gaussian kernel, and through it of softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._features import Features
from .random import RandomFeatures
from .variance import pairwise_sums, trigonometric_variance


class TrigonometricFeatures(RandomFeatures):
    """``m^-1/2 [sin(w . x), cos(w . x)]``, r = 2m. Signed: weights and denominators may be negative.

    Args:
        dim: d. num_features: number m of projections; default ``ceil(d ln d)``.
        kernel: ``"gaussian"``: expectation ``exp(-scale |q - k|^2 / 2)``. ``"softmax"``: times
            ``exp(|x|^2 / 2)`` on both sides, expectation ``exp(scale q . k)``; that factor travels as
            a logarithm beside the bounded features.
        orthogonal, norms, scale, seed, projections, heads: see
            :class:`reassoc.feature_maps.random.RandomFeatures`.

    Sources: Rahimi and Recht 2007; Choromanski et al. 2021, equation 6.
    """

    name = "trig"
    papers = ("rahimi2007", "choromanski2021")

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        kernel: str = "softmax",
        orthogonal: bool = True,
        norms: str = "chi",
        scale: float | None = None,
        seed: int = 0,
        projections: Tensor | None = None,
        heads: int | None = None,
    ) -> None:
        if kernel not in ("softmax", "gaussian"):
            raise ValueError(f"kernel must be 'softmax' or 'gaussian', got {kernel!r}")
        self.kernel = kernel
        super().__init__(
            dim, num_features, per_projection=2, orthogonal=orthogonal, norms=norms, scale=scale,
            seed=seed, projections=projections, heads=heads,
        )  # fmt: skip

    def _options(self) -> str:
        return f", kernel={self.kernel}"

    def calibrate_(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> TrigonometricFeatures:
        """As :meth:`RandomFeatures.calibrate_`; the identities are the softmax kernel's alone.

        Raises:
            ValueError: ``kernel="gaussian"``, which centring and balancing would change.
        """
        if self.kernel == "gaussian":
            raise ValueError("calibrate_: the identities hold for kernel='softmax', this map has 'gaussian'")
        super().calibrate_(query, key, mask)
        return self

    def _features(self, x: Tensor, weight: Tensor | None) -> Features:
        u = self._project(x)
        bounded = torch.cat([u.sin(), u.cos()], dim=-1) * (1 / math.sqrt(self.num_features))
        if self.kernel == "gaussian":
            return Features(bounded, None)
        log = x.square().sum(-1, keepdim=True) / 2
        return Features(bounded, log if weight is None else log + weight)

    def query_features(self, x: Tensor) -> Features:
        """Bounded features ``(..., r)`` and one logarithm ``(..., 1)`` for each query."""
        return self._features(self._queries(x), None)

    def key_features(self, x: Tensor) -> Features:
        """Bounded features ``(..., r)`` and one logarithm ``(..., 1)`` for each key."""
        return self._features(*self._keys(x))

    def relative_variance(self, query: Tensor, key: Tensor) -> Tensor:
        """Predicted variance of the kernel estimate over draws, relative to ``exp(scale q.k)^2``.

        Args:
            query: ``(..., N, d)``. key: ``(..., M, d)``; with ``heads``, G on axis -3.

        Returns:
            float64 ``(..., N, M)``; an upper bound where rows are orthogonal.

        Raises:
            ValueError: ``kernel="gaussian"`` or ``norms="sqrt_dim"``, which estimate other kernels.
        """
        if self.kernel != "softmax" or self.norms != "chi":
            raise ValueError("relative_variance: this map does not estimate the softmax kernel")
        x, y = self._queries(query.double()), self._keys(key.double())[0]
        return trigonometric_variance(pairwise_sums(x, y, -1.0), self.num_features)

    def query(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., 2 m)``; calibrated, without :meth:`RandomFeatures.log_query_factor`."""
        return self.query_features(x).value()

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., 2 m)``."""
        return self.key_features(x).value()
