"""Maps of one coordinate at a time, and the softmax over coordinates: no parameters, r = d."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import ExponentialMap, FeatureMap


class _Symmetric(FeatureMap):
    """A map with one function for queries and keys."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def query(self, x: Tensor) -> Tensor:
        """As :meth:`key`."""
        return self.key(x)


class _SymmetricExponential(ExponentialMap):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def log_query(self, x: Tensor) -> Tensor:
        """As :meth:`log_key`."""
        return self.log_key(x)


class Identity(_Symmetric):
    """``phi(x) = x``: the kernel is the dot product. Signed: weights may be negative."""

    name = "identity"
    papers = ("schmidhuber1992",)

    def key(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x


class ELU1(_Symmetric):
    """``phi(x) = ELU(x) + 1``: ``x + 1`` above zero, ``exp(x)`` below.

    The exponential branch is computed as such: subtracting one and adding it again would lose the
    tail. It underflows only as a product: where q and k are both below about -45 in float32, as
    features go (use a map that travels in logarithms there). Source: Katharopoulos et al. 2020, equation 7.
    """

    name = "elu+1"
    papers = ("katharopoulos2020",)
    nonnegative = True

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., d)``, positive."""
        # The clamp keeps the branch not taken finite, and its gradient with it.
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


class ReLU(_Symmetric):
    """``phi(x) = max(0, x)``: an all-negative key writes nothing; denominators can be zero."""

    name = "relu"
    nonnegative = True

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., d)``."""
        return x.relu()


class SquaredReLU(_Symmetric):
    """``phi(x) = max(0, x)^2``."""

    name = "relu^2"
    nonnegative = True

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., d)``."""
        return x.relu().square()


class Exp(_SymmetricExponential):
    """``phi(x) = exp(x)``, coordinate by coordinate, carried as its logarithm ``x``."""

    name = "exp"

    def log_key(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x


class Softmax(_SymmetricExponential):
    """``phi(x) = softmax(x)`` over the d coordinates. Source: Shen et al. 2021, Efficient Attention."""

    name = "softmax"
    papers = ("shen2021",)

    def log_key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., d)``."""
        return x.log_softmax(-1)
