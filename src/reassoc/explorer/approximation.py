"""Panel "Approximation": estimates of exp(q.k) by random features over many draws, against the truth."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import attention_matrix
from ..feature_maps import PositiveFeatures, TrigonometricFeatures
from .controls import Control, choice, numbers, settle

DIM = 16
DRAWS = 32
WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024)
SAMPLE = 512
_YES = {"no": "no", "yes": "yes"}
_NORMS = tuple(step / 4 for step in range(17))

CONTROLS: tuple[Control, ...] = (
    numbers("qnorm", "Length of q", _NORMS, 1, (0.5, 1, 2)),
    numbers("knorm", "Length of k", _NORMS, 1, (0.5, 1, 2)),
    numbers("angle", "Angle, degrees", tuple(range(0, 181, 15)), 60, (0, 60, 120, 180)),
    choice(
        "kind", "Features", {"positive": "positive", "optimal": "optimal positive", "trig": "trigonometric"}
    ),
    choice("orthogonal", "Orthogonal", _YES, "yes"),
    choice("calibrated", "Calibrated", _YES),
)


def approximation(given: Mapping[str, str]) -> dict[str, Any]:
    """Estimates of ``exp(x . y)`` for x, y of the lengths and the angle asked for, in 16 dimensions.

    Returns:
        ``truth`` and ``product`` x . y; ``widths``: for each number m of projections ``estimates`` (32 draws,
        divided by the truth), their ``mean`` and ``deviation``, and ``predicted``, the standard deviation in
        closed form; ``exact``: whether that is exact or an upper bound; ``negative``: how many estimates are.

    Raises:
        InputError: see :func:`.controls.settle`.
    """
    settings = settle(CONTROLS, given)
    x, y = pair(*(float(settings[name]) for name in ("qnorm", "knorm", "angle")))
    sample = spread(x, y) if settings["calibrated"] == "yes" else None
    truth = (x @ y).exp()
    widths: list[dict[str, Any]] = []
    for m in WIDTHS:
        phi = feature_map(settings["kind"], m, settings["orthogonal"] == "yes")
        if sample is not None:
            phi = copy.deepcopy(phi)
            phi.calibrate_(*sample)
        one = x.expand(1, DRAWS, 1, DIM), y.expand(1, DRAWS, 1, DIM)
        estimates = attention_matrix(*one, phi, normalize="none").flatten() / truth
        variance = phi.relative_variance(one[0][0], one[1][0])[0, 0, 0]  # of every draw the same
        widths.append(
            {
                "m": m,
                "estimates": estimates,
                "mean": estimates.mean(),
                "deviation": estimates.std(),
                "predicted": variance.sqrt(),
            }
        )
    exact = settings["kind"] == "positive" or (settings["kind"] == "trig" and settings["orthogonal"] == "no")
    negative = sum(int((width["estimates"] < 0).sum()) for width in widths)
    return {"truth": truth, "product": x @ y, "widths": widths, "exact": exact, "negative": negative}


def pair(query_norm: float, key_norm: float, angle: float) -> tuple[Tensor, Tensor]:
    """Two vectors ``(16,)``, float64."""
    turn = torch.tensor(angle, dtype=torch.float64).deg2rad()
    x, y = torch.zeros(2, DIM, dtype=torch.float64)
    x[0] = query_norm
    y[0], y[1] = key_norm * turn.cos(), key_norm * turn.sin()
    return x, y


def spread(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """512 queries and keys ``(1, 32, 512, 16)`` among which x and y are ordinary, to calibrate on.

    Half of a vector's mean square is common to all, half its own; x and y are such vectors, neither at
    the center: common parts ``x/2 + u`` with u across x and y and as long as ``x/2``.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for axis, center in ((2, x), (3, y)):
        size = center.norm()
        common = center / 2
        common[axis] = size / 2
        own = torch.randn(SAMPLE, DIM, generator=generator, dtype=torch.float64) * size / (2 * DIM) ** 0.5
        found.append((common + own).expand(1, DRAWS, SAMPLE, DIM))
    return found[0], found[1]


@functools.lru_cache(maxsize=6 * len(WIDTHS))
def feature_map(kind: str, m: int, orthogonal: bool) -> PositiveFeatures | TrigonometricFeatures:
    """32 draws of one map, as 32 heads; scale 1, so that queries and keys are what the kernel multiplies.

    All kinds see the same projections. Kept, because drawing is what takes time; not to be changed.
    """
    options: dict[str, Any] = {"scale": 1.0, "heads": DRAWS, "orthogonal": orthogonal}
    if kind == "trig":
        return TrigonometricFeatures(DIM, m, **options)
    return PositiveFeatures(DIM, m, optimal=kind == "optimal", **options)
