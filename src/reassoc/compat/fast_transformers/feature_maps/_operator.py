"""From a feature map of this package to what the operator takes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .... import feature_maps as maps
from .base import ActivationFunctionFeatureMap, elu_plus_one
from .fourier_features import Favor, GeneralizedRandomFeatures, RandomFourierFeatures

_RELU = (torch.relu, functional.relu)
_made = cache(maps.make)  # without parameters: one object serves all


def posed(
    feature_map: Any,
    queries: Tensor,
    keys: Tensor,
    legacy: str | None,
) -> tuple[Tensor, Tensor, maps.FeatureMap]:
    """Queries and keys as the operator takes them, and its map: the identity of features already made.

    By exact type: a derived class may compute something else. ReLU is the same operation there and here, so
    it serves both modes; the tail of ELU and the logarithms of FAVOR+ are not the original's.
    """
    kind = type(feature_map)
    if kind is GeneralizedRandomFeatures and feature_map.kernel_fn in _RELU:
        return (
            feature_map.project(queries),
            feature_map.project(keys),
            _made("relu", feature_map.omega.shape[1]),
        )
    if legacy is None:
        if kind is Favor and feature_map.legacy is None:
            return queries, keys, feature_map.positive()
        if kind is ActivationFunctionFeatureMap and feature_map.activation_function is elu_plus_one:
            return queries, keys, _made("elu+1", queries.shape[-1])
    features = feature_map.forward_queries(queries)
    return features, feature_map.forward_keys(keys), _made("identity", features.shape[-1])


def draws_itself(feature_map: Any) -> bool:
    """Whether the map knows when to draw in evaluation, which maps of users' own need not."""
    return getattr(type(feature_map), "new_feature_map", None) is RandomFourierFeatures.new_feature_map
