"""What the tests of modules share: models of every map, rule and position, and how close is close enough.

A name that `reassoc.feature_maps.names()`, or `RULES`, `DECAYS` or `POSITIONS` of the config, lists anew
inherits the tests.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from reassoc import feature_maps
from reassoc.feature_maps import LandmarkFeatures, RandomFeatures
from reassoc.nn import AttentionConfig, LanguageModel, LanguageModelConfig, Mixer, ModelState
from reassoc.nn.config import DECAYS, POSITIONS, RULES

MAPS = feature_maps.names()
# A rule that is not known to have no decay is tried with each.
RULE_CASES = tuple((r, d) for r in RULES for d in (("token",) if r in ("sum", "delta") else DECAYS))
VOCABULARY, WIDTH, DIM, E, HEADS = 13, 16, 6, 5, 4
# Of sums that may cancel: their denominators are as small as the data makes them.
SIGNED = ("identity", "taylor", "trig", "landmark")

# Relative to the largest number of an output. The operator's own budgets (tests/laws/budgets.py) are 1e-10
# and 1e-5; here two layers, each with projections of some 20 terms and norms around it, follow each other.
BUDGET = {torch.float64: 1e-10, torch.float32: 5e-5}
SIGNED_FACTOR = 100.0  # what a cancelling denominator may amplify

# What is around the attention: each map x rule x position takes one of these, in turn.
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"convolution": 3},
    {"key_heads": 2},
    {"query_key_norm": True, "key_heads": 1},
    {"output_norm": True, "output_gate": True},
    {"window": 4},
    {"normalize": "none", "convolution": 1},
    {"normalize": "sum"},
    {"normalize": "sum+attention", "key_heads": 2, "convolution": 4},
    {"normalize": "attention", "output_norm": True},
)
SHUFFLED = tuple(EXTRAS[(3 * i) % len(EXTRAS)] for i in range(len(EXTRAS)))


@functools.cache
def map_options(name: str) -> dict[str, Any]:
    """Few features, where a map lets one choose."""
    phi = feature_maps.make(name, DIM)
    if isinstance(phi, LandmarkFeatures):
        return {"num_features": 6, "landmarks": 12}
    return {"num_features": 6} if isinstance(phi, RandomFeatures) else {}


def config(feature_map: str = "elu+1", **options: Any) -> AttentionConfig:
    """Small heads with d != e, and few features."""
    options = {
        "heads": HEADS,
        "head_dim": DIM,
        "value_dim": E,
        "map_options": map_options(feature_map),
    } | options
    return AttentionConfig(feature_map=feature_map, **options)


def possible(feature_map: str, position: str) -> bool:
    """Rotated features come in pairs."""
    size = feature_maps.make(feature_map, DIM, **map_options(feature_map)).feature_dim
    return position != "rotary-after" or size % 2 == 0


def pick(index: int, rule: str) -> dict[str, Any]:
    """One of the extras that have a meaning for the rule: delta rules have no window."""
    fitting = [extra for extra in SHUFFLED if "delta" not in rule or "window" not in extra]
    return fitting[index % len(fitting)]


def lively(module: nn.Module) -> nn.Module:
    """Weights of order one everywhere, and fitted maps: at the start attention adds next to nothing."""
    generator = torch.Generator().manual_seed(5)
    for part in module.modules():
        if isinstance(part, Mixer):
            for linear in (part.query, part.key_value, part.output):
                nn.init.xavier_uniform_(linear.weight, gain=1.5, generator=generator)
            if part.convolution is not None:
                nn.init.normal_(part.convolution.weight, std=0.5, generator=generator)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.5, generator=generator)
        elif isinstance(part, LandmarkFeatures):
            query = torch.randn(1, HEADS, 50, DIM, generator=generator)
            part.calibrate_(query, torch.randn(1, part.heads or 1, 50, DIM, generator=generator))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "gates" in name and parameter.ndim == 2:
                parameter.normal_(std=0.5, generator=generator)
    return module


def language_model(
    attention: AttentionConfig,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    layers: int = 2,
    **options: Any,
) -> LanguageModel:
    """A small model whose attention matters."""
    torch.manual_seed(seed)
    whole = LanguageModelConfig(
        vocabulary=VOCABULARY, width=WIDTH, layers=layers, hidden=WIDTH, attention=attention, **options
    )
    model = lively(LanguageModel(whole))
    return model.to(dtype).eval()


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    """int64 ``(batch, length)``."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def positions() -> list[tuple[str, dict[str, Any]]]:
    """Kinds of position: those of the attention, and learned ones, with what the model is given for it."""
    return [*((name, {}) for name in POSITIONS), ("learned", {"learned_positions": 40})]


def attention_position(name: str) -> str:
    """What the attention is told."""
    return "none" if name == "learned" else name


def streamed(
    model: LanguageModel, ids: Tensor, cuts: tuple[int, ...] = (5, 9, 15, 17)
) -> tuple[Tensor, ModelState]:
    """Logits at every position: a prefill, single steps, a segment, single steps, a segment."""
    logits, states = model(ids[:, :5], return_states=True)
    parts = [logits]
    for number, (start, stop) in enumerate(itertools.pairwise((5, 8, 14, 15, ids.shape[1]))):
        if number % 2 == 0:
            parts += [model.step(ids[:, i : i + 1], states) for i in range(start, stop)]
        else:
            logits, states = model(ids[:, start:stop], states=states.detach(), return_states=True)
            parts.append(logits)
    return torch.cat(parts, 1), states


def assert_near(got: Tensor, want: Tensor, allowed: float, what: str = "") -> None:
    """Every position, relative to the largest number of all."""
    assert got.shape == want.shape, f"{what}: shapes {tuple(got.shape)} and {tuple(want.shape)}"
    assert got.isfinite().all() and want.isfinite().all(), f"{what}: not finite"
    if not got.numel():
        return
    error = (got.double() - want.double()).abs().flatten(2).amax((0, 2)) / want.double().abs().max()
    worst = error.max().item()
    assert worst <= allowed, (
        f"{what}: {worst:.3g} apart at position {int(error.argmax())}, allowed {allowed:.3g}"
    )
