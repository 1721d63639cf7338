"""Feature maps. What takes one takes a function that makes it for a given size of queries."""

from .base import ActivationFunctionFeatureMap, FeatureMap, elu_feature_map
from .fourier_features import (
    Favor,
    GeneralizedRandomFeatures,
    RandomFourierFeatures,
    SmoothedRandomFourierFeatures,
    orthogonal_random_matrix_,
)

__all__ = [
    "ActivationFunctionFeatureMap",
    "Favor",
    "FeatureMap",
    "GeneralizedRandomFeatures",
    "RandomFourierFeatures",
    "SmoothedRandomFourierFeatures",
    "elu_feature_map",
    "orthogonal_random_matrix_",
]
