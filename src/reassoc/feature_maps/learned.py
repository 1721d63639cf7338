"""Maps with trained weights: they have nothing to say before training, and can mimic softmax after."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import ExponentialMap, FeatureMap


def _weight(heads: int | None, rows: int, columns: int) -> Tensor:
    return torch.empty(*(() if heads is None else (heads,)), rows, columns)


class LearnedReLU(FeatureMap):
    """``phi(x) = relu(x W^T + b)``, one W and b for queries and keys.

    Args:
        dim: d. num_features: r, default d. heads: separate weights for each key head.

    Source: Kasai et al. 2021, "Finetuning Pretrained Transformers into RNNs" (T2R).
    """

    name = "t2r"
    papers = ("kasai2021",)
    nonnegative = True

    def __init__(self, dim: int, num_features: int | None = None, heads: int | None = None) -> None:
        super().__init__(dim, dim if num_features is None else num_features, heads)
        self.weight = nn.Parameter(_weight(heads, self.feature_dim, dim))
        self.bias = nn.Parameter(_weight(heads, 1, self.feature_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Orthogonal rows, zero bias."""
        for block in self.weight if self.heads is not None else [self.weight]:
            nn.init.orthogonal_(block)
        nn.init.zeros_(self.bias)

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., r)``."""
        return (x @ self.weight.mT.to(x.dtype) + self.bias.to(x.dtype)).relu()

    def query(self, x: Tensor) -> Tensor:
        """As :meth:`key`."""
        return self.key(x)


class Hedgehog(ExponentialMap):
    """``phi(x) = [softmax(x W^T), softmax(-x W^T)]``, separate W for queries and for keys.

    Starts at the identity, so that it sees the coordinates as they are; r = 2d.

    Args:
        dim: d. heads: separate weights for each key head.

    Source: Zhang et al. 2024, "The Hedgehog & the Porcupine".
    """

    name = "hedgehog"
    papers = ("zhang2024",)

    def __init__(self, dim: int, heads: int | None = None) -> None:
        super().__init__(dim, 2 * dim, heads)
        self.query_weight = nn.Parameter(_weight(heads, dim, dim))
        self.key_weight = nn.Parameter(_weight(heads, dim, dim))
        self.reset_parameters()

    @property
    def symmetric(self) -> bool:
        """Never: the two weights are trained apart."""
        return False

    def reset_parameters(self) -> None:
        """The identity for every head."""
        with torch.no_grad():
            for weight in (self.query_weight, self.key_weight):
                weight.copy_(torch.eye(self.dim).expand_as(weight))

    def log_query(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., 2 d)``."""
        return _two_softmaxes(x, self.query_weight)

    def log_key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., 2 d)``."""
        return _two_softmaxes(x, self.key_weight)


def _two_softmaxes(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight.mT.to(x.dtype)
    return torch.cat([y.log_softmax(-1), (-y).log_softmax(-1)], dim=-1)
