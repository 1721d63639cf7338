"""The interface of feature maps here, and maps of one coordinate at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class FeatureMap(nn.Module):
    """``(..., D) -> (..., C)`` for queries and keys of size D = ``query_dims``.

    A new map defines :meth:`new_feature_map`, and :meth:`forward`, or :meth:`forward_queries` and
    :meth:`forward_keys` where the two differ.
    """

    def __init__(self, query_dims: int) -> None:
        super().__init__()
        self.query_dims = query_dims

    def new_feature_map(self, device: torch.device | str) -> None:
        """A new sequence, or batch, begins: a random map may draw its numbers anew."""
        raise NotImplementedError(f"{type(self).__name__} must define new_feature_map(device)")

    def forward_queries(self, x: Tensor) -> Tensor:
        """Features of queries."""
        features: Tensor = self(x)
        return features

    def forward_keys(self, x: Tensor) -> Tensor:
        """Features of keys."""
        features: Tensor = self(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Features of either."""
        raise NotImplementedError(
            f"{type(self).__name__} must define forward(x), or forward_queries(x) and forward_keys(x)"
        )

    @classmethod
    def factory(cls, *args: Any, **kwargs: Any) -> Callable[[int], FeatureMap]:
        """A function of ``query_dims`` that makes this map with these options."""

        def make(query_dims: int) -> FeatureMap:
            return cls(query_dims, *args, **kwargs)

        return make


class ActivationFunctionFeatureMap(FeatureMap):
    """A function of each coordinate."""

    def __init__(self, query_dims: int, activation_function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(query_dims)
        self.activation_function = activation_function

    def new_feature_map(self, device: torch.device | str) -> None:
        """Nothing is random."""

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D) -> (..., D)``."""
        return self.activation_function(x)


def elu_plus_one(x: Tensor) -> Tensor:
    """``elu(x) + 1``, which below about -15 has no digits left in float32."""
    return functional.elu(x) + 1


elu_feature_map = ActivationFunctionFeatureMap.factory(elu_plus_one)
