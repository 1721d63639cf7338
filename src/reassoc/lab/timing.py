"""How long each map takes on this machine, next to softmax: kept apart, as times never repeat."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .. import linear_attention
from ..feature_maps import LandmarkFeatures, RandomFeatures
from ._progress import Progress
from .candidates import Candidate
from .fidelity import Results
from .tables import write_csv

LENGTH = 2048
REPEATS = 5


@dataclass(frozen=True)
class Time:
    """Forward time of one map on inputs shaped like a model's layer, float32, one sequence.

    Attributes:
        model, map, features: which. length: tokens. milliseconds: median of the repeats.
        softmax_milliseconds: of torch's scaled_dot_product_attention, measured alternately.
        ratio: the median of the two paired: below 1 is faster than softmax.
    """

    model: str
    map: str
    features: int
    length: int
    milliseconds: float
    softmax_milliseconds: float
    ratio: float


def measure_times(results: Results, progress: Progress | None = None) -> list[Time]:
    """Time every map of a sweep once for each model, on random inputs of its first site's shape."""
    sites = results.manifest["sites"]
    pairs = list(dict.fromkeys((row["model"], row["map"], row["features"]) for row in results.heads))
    found = []
    for index, (model, name, features) in enumerate(pairs):
        if progress is not None:
            progress(index, len(pairs), f"{model}  {name} {features}")
        site = next(about for about in sites.values() if about["model"] == model)
        found.append(_time(model, Candidate(name, features), features, site))
    return found


def _time(model: str, candidate: Candidate, features: int, site: dict[str, Any]) -> Time:
    heads, groups = len(site["query_heads"]), len(site["key_heads"])
    generator = torch.Generator().manual_seed(0)

    def random(count: int, size: int) -> torch.Tensor:
        return torch.randn(1, count, LENGTH, size, generator=generator)

    query, key = random(heads, site["head_size"]), random(groups, site["head_size"])
    value = random(groups, site["value_size"])
    phi = candidate.build(site["head_size"], groups, site["scale"], 0)
    if candidate.calibrated and isinstance(phi, RandomFeatures | LandmarkFeatures):
        phi.calibrate_(query, key)

    def kernel() -> object:
        return linear_attention(query, key, value, phi, causal=site["causal"])

    def softmax() -> object:
        return scaled_dot_product_attention(
            query, key, value, is_causal=site["causal"], scale=site["scale"], enable_gqa=heads != groups
        )

    mine, theirs = [], []
    with torch.no_grad():
        for repeat in range(REPEATS + 1):
            first, second = _clock(kernel), _clock(softmax)
            if repeat:  # the first pair warms up
                mine.append(first)
                theirs.append(second)
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    medians = (1e3 * statistics.median(mine), 1e3 * statistics.median(theirs))
    return Time(model, candidate.name, features, LENGTH, *medians, ratio)


def _clock(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def write_times(times: list[Time], folder: Path) -> None:
    """Write ``times.csv``."""
    write_csv(folder / "times.csv", [asdict(t) for t in times])
