"""Panel "Capacity": how much of what was stored comes back, and what happens to a key written again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import linear_attention, read
from ..feature_maps import FeatureMap, make
from ..rules import Delta, GatedDelta, Rule, Sum
from .controls import Control, choice, numbers, settle

DIM = 8
VALUES = 8
BATCH = 8
COUNTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAPS = {
    "identity": "identity", "elu+1": "ELU+1", "relu": "ReLU", "dpfp-1": "DPFP-1", "dpfp-2": "DPFP-2",
    "favor+": "positive (FAVOR+)",
}  # fmt: skip
RULES = ("sum", "delta", "gated delta")
WRITES = (("a", 1.0), ("b", -1.0), ("a", 3.0), ("c", 2.0), ("b", 1.0), ("a", -2.0))
_GATES = tuple(step / 20 for step in range(10, 21))

_MEMORY = choice("memory", "Feature map", MAPS, "dpfp-2")
_PASSES = numbers("passes", "Times written", (1, 2, 4, 8, 16, 32), 1, (1, 4, 32))
_BETA = numbers("beta", "Writing strength β", tuple(step / 10 for step in range(1, 11)), 1, (0.5, 1))
_DECAY = numbers("decay", "Gated delta keeps", _GATES, 0.95, (0.8, 0.95, 1))
CONTROLS: tuple[Control, ...] = (
    _MEMORY,
    numbers("pairs", "Stored pairs", COUNTS, 8, (4, 8, 16, 32)),
    _PASSES,
    _BETA,
    _DECAY,
)
OVERWRITING: tuple[Control, ...] = (_MEMORY, _BETA, _DECAY)


def capacity(given: Mapping[str, str]) -> dict[str, Any]:
    """Retrieval error of random keys: for one map along the number of pairs, and of all maps at one number.

    The error is the mean squared distance of a read from its value over the mean square of values: 0 is
    perfect, 1 as bad as reading nothing.

    Returns:
        ``features`` r of the map; ``lines``: for each number ``pairs`` an error by rule, and ``bound``, below
        which no rule can get; ``maps``: for each map ``name``, ``features`` and the same.

    Raises:
        InputError: see :func:`.controls.settle`.
    """
    settings = settle(CONTROLS, given)
    how = int(settings["passes"]), float(settings["beta"]), float(settings["decay"])
    memory = settings["memory"]
    return {
        "features": feature_map(memory).feature_dim,
        "lines": [{"pairs": count} | errors(memory, count, *how) for count in COUNTS],
        "maps": [
            {"name": words, "features": feature_map(name).feature_dim}
            | errors(name, int(settings["pairs"]), *how)
            for name, words in MAPS.items()
        ],
    }


def overwriting(given: Mapping[str, str]) -> dict[str, Any]:
    """What each rule returns for each key while keys are written again and again.

    Returns:
        ``writes``: for each the ``key``, its ``value`` and, by rule and by key, the ``reads`` after it; and
        ``wanted``, by key the last value written, ``None`` before the first.

    Raises:
        InputError: see :func:`.controls.settle`.
    """
    settings = settle(OVERWRITING, given)
    phi = feature_map(settings["memory"])
    names = sorted({key for key, _ in WRITES})
    keys = dict(zip(names, _keys(1, len(names), phi.dim)[0, 0], strict=True))
    key = torch.stack([keys[name] for name, _ in WRITES])[None, None]
    value = torch.tensor([value for _, value in WRITES], dtype=torch.float64)[None, None, :, None]
    queries = torch.stack([keys[name] for name in names])[None, None]
    found = []
    wanted: dict[str, float | None] = dict.fromkeys(names)
    for last, (name, written) in enumerate(WRITES, start=1):
        wanted[name] = written
        reads = {}
        for rule in RULES:
            answer = store(
                phi, rule, key[:, :, :last], value[:, :, :last], queries,
                float(settings["beta"]), float(settings["decay"]),
            )  # fmt: skip
            reads[rule] = dict(zip(names, answer[0, 0, :, 0], strict=True))
        found.append({"key": name, "value": written, "reads": reads, "wanted": dict(wanted)})
    return {"writes": found}


def store(
    phi: FeatureMap,
    rule: str,
    key: Tensor,  # (B, 1, n, d)
    value: Tensor,  # (B, 1, n, e)
    query: Tensor,  # (B, 1, Q, d)
    beta: float,
    decay: float,
) -> Tensor:  # (B, 1, Q, e)
    """Write pairs in order by a rule, then read.

    The sum rule is divided by its denominator. Delta writes are beta times an exact one: at beta 1 a key
    read at once gives its value.
    """
    size = phi.key(key).square().sum(-1)
    strength = torch.where(size > 0, beta / size, 0.0)
    gate = torch.full_like(strength, decay).log()
    rules: dict[str, Rule] = {
        "sum": Sum(), "delta": Delta(strength), "gated delta": GatedDelta(strength, gate)
    }  # fmt: skip
    normalize = "attention" if rule == "sum" else "none"
    _, state = linear_attention(
        key,
        key,
        value,
        phi,
        rule=rules[rule],
        normalize=normalize,
        causal=True,
        undefined="zero",
        return_state=True,
    )
    return read(query, phi, state, normalize=normalize, undefined="zero")


@functools.lru_cache(maxsize=4096)  # most changes of one control leave most of these as they were
def errors(name: str, count: int, passes: int, beta: float, decay: float) -> dict[str, float]:
    """Error of a map by rule after all pairs were written in order ``passes`` times, and the bound."""
    phi = feature_map(name)
    key = _keys(BATCH, count, phi.dim)
    value = torch.randn(BATCH, 1, count, VALUES, generator=_generator(1), dtype=torch.float64)
    written = key.repeat(1, 1, passes, 1), value.repeat(1, 1, passes, 1)
    found = {}
    for rule in RULES:
        wrong = store(phi, rule, *written, key, beta, decay) - value
        found[rule] = float(wrong.square().mean() / value.square().mean())
    ranks = torch.linalg.matrix_rank(phi.key(key)).double()
    return found | {"bound": 1 - float(ranks.mean()) / count}


def feature_map(name: str) -> FeatureMap:
    """A map for keys of size 8, in float64."""
    if name == "favor+":
        return make(name, DIM, num_features=4 * DIM, seed=0).double()
    return make(name, DIM)


def _keys(batch: int, count: int, dim: int) -> Tensor:
    """The first keys are the same for every count."""
    return torch.randn(batch, 1, max(COUNTS), dim, generator=_generator(0), dtype=torch.float64)[:, :, :count]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
