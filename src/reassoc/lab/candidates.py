"""What a fidelity report compares: feature maps by name, with options, at a number of features.

A candidate is written ``name[:option[:option]]``, for example ``favor+:calibrated:hyperbolic``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .._errors import InputError
from ..feature_maps import FeatureMap, make, names

OPTIONS = {
    "calibrated": "centre and balance keys and queries on the calibration half",
    "hyperbolic": "antithetic pairs of positive features",
    "iid": "independent instead of orthogonal projections",
}
CALIBRATED = ("trig", "favor+", "favor++")
PROJECTED = (*CALIBRATED, "generalized-relu")
FITTED = ("landmark", "codebook")  # to the calibration half, always
RANDOM = (*PROJECTED, *FITTED)
LEARNED = ("hedgehog", "t2r")


WIDEST = 1 << 20  # more features than any memory here: a typing mistake
MEAN = "mean"
LANDMARKS = 256  # the default of LandmarkFeatures


class MeanOfValues(FeatureMap):
    """One feature, always 1: every visible value weighs the same. What no kernel should lose to."""

    name = MEAN
    nonnegative = True

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1)

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., 1)``."""
        return x[..., :1] * 0 + 1

    def query(self, x: Tensor) -> Tensor:
        """As :meth:`key`."""
        return self.key(x)


@dataclass(frozen=True)
class Candidate:
    """A feature map at a width: what is measured, repeated over seeds where it is random.

    Attributes:
        name: as the user wrote it, in canonical order of options.
        width: number of features r; ``None`` for a map that has only one size.
    """

    name: str
    width: int | None

    @property
    def base(self) -> str:
        """The name that :func:`reassoc.feature_maps.make` knows."""
        return self.name.split(":")[0]

    @property
    def options(self) -> frozenset[str]:
        """What follows the name."""
        return frozenset(self.name.split(":")[1:])

    @property
    def random(self) -> bool:
        """Whether seeds matter."""
        return self.base in RANDOM

    @property
    def calibrated(self) -> bool:
        """Whether the map learns from the calibration half."""
        return "calibrated" in self.options or self.base in FITTED

    @property
    def per_projection(self) -> int:
        """Features that one projection yields."""
        return 2 if self.base == "trig" or "hyperbolic" in self.options else 1

    def build(self, dim: int, heads: int, scale: float, seed: int) -> FeatureMap:
        """The map for ``heads`` key heads of size ``dim``, not yet calibrated."""
        if self.base == MEAN:
            return MeanOfValues(dim)
        if not self.random:
            return make(self.base, dim, **({"heads": heads} if self.base in LEARNED else {}))
        assert self.width is not None
        if self.base in FITTED:
            return make(self.base, dim, num_features=self.width, scale=scale, seed=seed, heads=heads)
        options = {"hyperbolic": True} if "hyperbolic" in self.options else {}
        return make(
            self.base, dim, num_features=self.width // self.per_projection, scale=scale, seed=seed,
            heads=heads, orthogonal="iid" not in self.options, **options,
        )  # fmt: skip

    def feature_operations(self, dim: int, features: int) -> int:
        """Multiplications and additions to make the features of one vector; transcendentals count 10."""
        if self.base == "landmark":
            rank = (math.isqrt(8 * features + 1) - 1) // 2
            return 2 * LANDMARKS * (dim + rank) + 10 * LANDMARKS + 2 * features
        if self.base == "codebook":
            return 2 * dim * features + 10 * features
        if self.base in PROJECTED:
            projections = features // self.per_projection
            calibration = 2 * dim * dim if self.calibrated else 0
            return 2 * projections * dim + 2 * dim + calibration + 10 * features
        if self.base in LEARNED:
            return 2 * dim * features + 10 * features
        if self.base in ("exp", "softmax", "elu+1"):
            return 10 * dim
        return features


def candidates(maps: list[str], widths: list[int]) -> list[Candidate]:
    """Every map at every width that it can have, in the order given.

    Raises:
        InputError: an unknown map or option (the valid ones are listed), or a width that is not one.
    """
    for width in widths:
        if width < 1:
            raise InputError(f"--widths: a number of features must be at least 1, got {width}")
        if width > WIDEST:
            raise InputError(f"--widths: a number of features must be at most {WIDEST}, got {width}")
    found: dict[Candidate, None] = {}
    for text in maps:
        name = _canonical(text)
        if name.split(":")[0] not in RANDOM:
            found[Candidate(name, None)] = None
            continue
        for width in widths:
            candidate = Candidate(name, width)
            if width % candidate.per_projection:
                raise InputError(f"--widths: {name} has features in pairs, {width} is odd")
            found[candidate] = None
    return list(found)


def _canonical(text: str) -> str:
    base, *options = text.strip().split(":")
    known = (*names(), MEAN)
    shift = base.removeprefix("dpfp-")
    if base not in known and not (base != shift and shift.isdecimal() and int(shift) > 0):
        raise InputError(f"--maps: unknown map {base!r}; known: {', '.join(known)} (dpfp-n for any n)")
    for option in options:
        if option not in OPTIONS:
            raise InputError(f"--maps: unknown option {option!r} in {text!r}; known: {', '.join(OPTIONS)}")
        allowed = {"calibrated": CALIBRATED, "hyperbolic": ("favor+", "favor++"), "iid": PROJECTED}[option]
        if base not in allowed:
            raise InputError(f"--maps: option {option!r} is for {', '.join(allowed)}, not for {base!r}")
    if base == "favor++" and "calibrated" not in options:
        raise InputError("--maps: favor++ takes its parameter from calibration: write favor++:calibrated")
    return ":".join([base, *sorted(set(options))])
