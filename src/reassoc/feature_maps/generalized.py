"""Generalised random kernels: any nonnegative function of random projections."""

from __future__ import annotations

import math
from typing import NoReturn

from torch import Tensor

from .random import RandomFeatures

FUNCTIONS = {
    "relu": Tensor.relu,
    "abs": Tensor.abs,
    "sigmoid": Tensor.sigmoid,
    "square": Tensor.square,
}


class GeneralizedFeatures(RandomFeatures):
    """``m^-1/2 f(W x)`` with f = ReLU or another function: estimates its own kernel, not softmax.

    Nothing is added to the features: an epsilon inside, as is customary, makes the output drift to
    the mean of the values as norms grow. Zero denominators are reported instead.

    Args:
        dim: d. num_features: number m of projections; default ``ceil(d ln d)``. r = m.
        function: ``"relu"``, ``"abs"``, ``"sigmoid"`` or ``"square"``.
        orthogonal, norms, scale, seed, projections, heads: see
            :class:`reassoc.feature_maps.random.RandomFeatures`.

    Source: Choromanski et al. 2021, section 2.2 (generalized attention).
    """

    name = "generalized"
    papers = ("choromanski2021",)
    nonnegative = True

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        function: str = "relu",
        orthogonal: bool = True,
        norms: str = "chi",
        scale: float | None = None,
        seed: int = 0,
        projections: Tensor | None = None,
        heads: int | None = None,
    ) -> None:
        if function not in FUNCTIONS:
            raise ValueError(f"function must be one of {tuple(FUNCTIONS)}, got {function!r}")
        self.function = function
        super().__init__(
            dim, num_features, per_projection=1, orthogonal=orthogonal, norms=norms, scale=scale,
            seed=seed, projections=projections, heads=heads,
        )  # fmt: skip

    def _options(self) -> str:
        return f", function={self.function}"

    def calibrator(self) -> NoReturn:
        """Refused.

        Raises:
            ValueError: always: the identities are the softmax kernel's.
        """
        raise ValueError(
            "calibrate_: the identities are the softmax kernel's; this map has a kernel of its own"
        )

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., m)``."""
        return FUNCTIONS[self.function](self._project(self._keys(x)[0])) * (1 / math.sqrt(self.num_features))

    def query(self, x: Tensor) -> Tensor:
        """As :meth:`key`."""
        return self.key(x)
