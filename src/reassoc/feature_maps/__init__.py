"""Feature maps: how a key, and a query, becomes r numbers. See docs of each class for its kernel."""

from __future__ import annotations

import inspect
from typing import Any

from .base import ExponentialMap, FeatureMap
from .calibration import Calibrator
from .codebook import CodebookFeatures
from .deterministic import DPFP, TaylorFeatures
from .elementwise import ELU1, Exp, Identity, ReLU, Softmax, SquaredReLU
from .generalized import GeneralizedFeatures
from .landmark import LandmarkFeatures
from .learned import Hedgehog, LearnedReLU
from .positive import PositiveFeatures
from .projections import orthogonalize
from .random import RandomFeatures
from .trigonometric import TrigonometricFeatures

__all__ = [
    "DPFP",
    "ELU1",
    "Calibrator",
    "CodebookFeatures",
    "Exp",
    "ExponentialMap",
    "FeatureMap",
    "GeneralizedFeatures",
    "Hedgehog",
    "Identity",
    "LandmarkFeatures",
    "LearnedReLU",
    "PositiveFeatures",
    "RandomFeatures",
    "ReLU",
    "Softmax",
    "SquaredReLU",
    "TaylorFeatures",
    "TrigonometricFeatures",
    "for_layer",
    "make",
    "names",
    "orthogonalize",
]

_MAPS: dict[str, tuple[type[FeatureMap], dict[str, Any]]] = {
    "identity": (Identity, {}),
    "elu+1": (ELU1, {}),
    "relu": (ReLU, {}),
    "relu^2": (SquaredReLU, {}),
    "exp": (Exp, {}),
    "softmax": (Softmax, {}),
    "taylor": (TaylorFeatures, {}),
    "trig": (TrigonometricFeatures, {}),
    "favor+": (PositiveFeatures, {}),
    "favor++": (PositiveFeatures, {"optimal": True}),
    "generalized-relu": (GeneralizedFeatures, {"function": "relu"}),
    "landmark": (LandmarkFeatures, {}),
    "codebook": (CodebookFeatures, {}),
    "hedgehog": (Hedgehog, {}),
    "t2r": (LearnedReLU, {}),
}
_DPFP_SHOWN = 3


def names() -> tuple[str, ...]:
    """All names that :func:`make` knows; ``dpfp-n`` goes on for any n."""
    return (*_MAPS, *(f"dpfp-{n}" for n in range(1, _DPFP_SHOWN + 1)))


def make(name: str, dim: int, **options: Any) -> FeatureMap:
    """A feature map by name.

    Args:
        name: one of :func:`names`.
        dim: size d of queries and keys.
        options: passed to the class, for example ``num_features=256, seed=1`` for random maps.

    Raises:
        ValueError: unknown name (the valid ones are listed).
        TypeError: an option that the class does not take.

    Example:
        >>> from reassoc.feature_maps import make
        >>> make("dpfp-2", 8).feature_dim
        32
    """
    kind, fixed = _kind(name)
    return kind(dim, **fixed, **options)


def for_layer(
    name: str, dim: int, heads: int, layer: int, *, scale: float | None = None, **options: Any
) -> FeatureMap:
    """A map for one layer of a model: with parameters of its own for each key head, where the map can.

    A random map takes the draw of (seed, layer), so layers differ and every process agrees.

    Args:
        name, dim, options: as for :func:`make`.
        heads: number G of key heads. layer: which layer.
        scale: of the layer's scores, for maps that take one; ``None``: the map's default.

    Raises:
        ValueError, TypeError: as :func:`make`.
    """
    kind, _ = _kind(name)
    taken = takes(name)
    own = {"heads": heads} if scale is None else {"heads": heads, "scale": scale}
    options |= {key: value for key, value in own.items() if key in taken and key not in options}
    if issubclass(kind, RandomFeatures) and options.get("projections") is None:
        options["seed"] = (int(options.get("seed", 0)) << 16) + layer
    return make(name, dim, **options)


def takes(name: str) -> tuple[str, ...]:
    """Names of the options that a map can be made with; ``ValueError`` for an unknown map."""
    return tuple(inspect.signature(_kind(name)[0].__init__).parameters)


def _kind(name: str) -> tuple[type[FeatureMap], dict[str, Any]]:
    if name.startswith("dpfp-") and name[5:].isdecimal() and int(name[5:]) > 0:
        return DPFP, {"nu": int(name[5:])}
    if name not in _MAPS:
        raise ValueError(f"unknown feature map {name!r}; known: {', '.join(names())} (dpfp-n for any n)")
    return _MAPS[name]


def parameterless(name: str, dim: int) -> FeatureMap:
    """A map that a call may name by a string: no parameters and no randomness, so nobody needs to own it.

    Raises:
        ValueError: unknown, or a random or learned map, which the caller must make and keep.
    """
    found = make(name, dim)
    owned = isinstance(found, RandomFeatures | LandmarkFeatures) or any(True for _ in found.parameters())
    if owned:
        raise ValueError(
            f"feature map {name!r} is random, fitted or learned and must be kept by its owner: make it once "
            f"with reassoc.feature_maps.make({name!r}, dim={dim}) and pass the object"
        )
    return found
