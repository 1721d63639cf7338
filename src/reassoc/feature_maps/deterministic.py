"""Maps to more features than coordinates, without randomness and without parameters."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from .base import FeatureMap


class DPFP(FeatureMap):
    """Deterministic parameter-free projection: ``x+ * roll(x+, s)`` for shifts s = 1..nu.

    ``x+ = relu([x, -x])`` has 2d entries, and entry i of shift s is ``x+_i x+_{(i+s) mod 2d}``.

    Args:
        dim: d.
        nu: number of shifts. Shift d is identically zero and shifts above d repeat earlier ones, so
            the capacity is ``2 d min(nu, d - 1)``; nu >= d warns.

    Source: Schlag, Irie, Schmidhuber 2021, section 5.3 ("DPFP").
    """

    name = "dpfp"
    papers = ("schlag2021",)
    nonnegative = True

    def __init__(self, dim: int, nu: int = 1) -> None:
        if not isinstance(nu, int) or not 1 <= nu < 2 * dim:
            raise ValueError(f"nu must be an integer from 1 to 2 * dim - 1 = {2 * dim - 1}, got {nu!r}")
        super().__init__(dim, 2 * dim * nu)
        self.nu = nu
        if nu >= dim:
            warnings.warn(
                f"DPFP: nu={nu} >= dim={dim}: shift {dim} is zero and later shifts repeat earlier ones; "
                f"nu={max(dim - 1, 1)} has the same capacity with fewer features",
                stacklevel=2,
            )

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., 2 d nu)``."""
        both = torch.cat([x, -x], dim=-1).relu()
        return torch.cat([both * both.roll(-shift, dims=-1) for shift in range(1, self.nu + 1)], dim=-1)

    def query(self, x: Tensor) -> Tensor:
        """As :meth:`key`."""
        return self.key(x)


class TaylorFeatures(FeatureMap):
    """Second-order Taylor features: the kernel is ``1 + s + s^2 / 2`` with ``s = scale * q.k``.

    The kernel is at least 1/2 whatever s, though single features are signed. Of the d^2 second-order
    products the d (d + 1) / 2 different ones are kept, off-diagonal ones with weight sqrt(2).

    Args:
        dim: d. scale: of the dot product; default ``dim ** -0.5``, as in softmax attention.

    Source: Arora et al. 2024 ("Based").
    """

    name = "taylor"
    papers = ("arora2024",)

    def __init__(self, dim: int, scale: float | None = None) -> None:
        super().__init__(dim, 1 + dim + dim * (dim + 1) // 2)
        self.scale = dim**-0.5 if scale is None else float(scale)
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {scale!r}")

    @property
    def fingerprint(self) -> str:
        """With the scale."""
        return f"taylor(dim={self.dim}, scale={self.scale:.17g})"

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., 1 + d + d (d + 1) / 2)``."""
        x = x * math.sqrt(self.scale)
        # Made anew for the device and mode of each call: one object of this map serves all callers.
        left, right = torch.triu_indices(self.dim, self.dim, device=x.device)
        weight = x.new_ones(left.shape).masked_fill(left == right, math.sqrt(0.5))
        second = x[..., left] * x[..., right] * weight
        return torch.cat([torch.ones_like(x[..., :1]), x, second], dim=-1)

    def query(self, x: Tensor) -> Tensor:
        """As :meth:`key`."""
        return self.key(x)
