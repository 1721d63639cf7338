"""What one choice changes: recipes compared two by two, seed by seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..recipes import RULES, Recipe, usual_normalization
from .run import Results

# What a choice is when nothing is said, in every pair the one that others are compared with.
_PLAIN: dict[str, Any] = {
    "rule": "sum", "context": "truncated", "projections": "orthogonal", "redraw": "fixed", "position": "none",
    "convolution": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Contrast:
    """``other`` against ``base``.

    Attributes:
        choice: what differs, ``"recipe"`` for more than one thing. ``"context"`` is judged carried in both.
            base, other: names of recipes.
        was, now: the choice in each. changes: relative change of test perplexity of each seed that both
            have; below 0 ``other`` is better. apart: every seed of one beats every seed of the other;
            ``None`` with fewer than two seeds each.
    """

    choice: str
    base: str
    other: str
    was: str
    now: str
    changes: list[float]
    apart: bool | None

    @property
    def change(self) -> float:
        """The median over seeds; NaN without a number."""
        return median(self.changes) if self.changes else math.nan


def scores(results: Results, name: str, way: str | None = None) -> dict[int, float]:
    """Nats per token on the test text of each seed, without NaN.

    Args:
        way: of judging, ``"truncated"`` or ``"carried"``; default as the recipe was trained.
    """
    if way is None:
        way = "carried" if next(r for r in results.recipes if r.name == name).carried else "truncated"
    runs = [run for run in results.runs if run["recipe"] == name]
    found = {run["seed"]: run["nats"]["test"][way] for run in runs}
    return {seed: value for seed, value in found.items() if value == value}


def against_first(results: Results) -> list[Contrast]:
    """Every other recipe against the first one."""
    first, *others = (recipe.name for recipe in results.recipes)
    return [_contrast(results, "recipe", first, other, first, other) for other in others]


def contrasts(results: Results) -> list[Contrast]:
    """Every two recipes that differ in one choice only, the plain choice first.

    Normalization counts as the same where it is the same division, and where each recipe has what is usual
    for its rule: a delta rule as published against a sum as published is a difference of rules.
    """
    found = []
    for choice in ("rule", "normalization", "context", "redraw", "projections", "position", "convolution"):
        for base in results.recipes:
            for other in results.recipes:
                pair = _differ(base, other, choice)
                if pair is not None:
                    found.append(_contrast(results, choice, base.name, other.name, *pair))
    return found


def choices(recipe: Recipe) -> dict[str, str]:
    """What was chosen, by name."""
    attention = recipe.attention
    options = attention.map_options
    rule = next(name for name, pair in RULES.items() if pair == (attention.rule, attention.decay))
    return {
        "map": "softmax attention" if recipe.softmax else attention.feature_map,
        "rule": "" if recipe.softmax else rule,
        "normalization": "" if recipe.softmax else attention.normalization,
        "features": str(options.get("num_features", "")),
        "projections": "orthogonal" if options.get("orthogonal", True) else "independent",
        "redraw": "fixed" if recipe.redraw is None else f"redrawn every {recipe.redraw} steps",
        "context": "carried" if recipe.carried else "truncated",
        "position": "learned" if recipe.learned else attention.position,
        "convolution": str(attention.convolution) if attention.convolution else "none",
    }


def _differ(base: Recipe, other: Recipe, choice: str) -> tuple[str, str] | None:
    """The two values, if the recipes differ in this choice alone and ``base`` has the plain one."""
    first, second = choices(base), choices(other)
    was, now = first.pop(choice), second.pop(choice)
    plain = usual_normalization(base) if choice == "normalization" else _PLAIN[choice]
    if was == now or was != plain or base.softmax != other.softmax:
        return None
    if choice != "normalization" and _as_published(base) and _as_published(other):
        del first["normalization"], second["normalization"]
    return (was, now) if first == second else None


def _as_published(recipe: Recipe) -> bool:
    return recipe.attention.normalization == usual_normalization(recipe)


def _contrast(results: Results, choice: str, base: str, other: str, was: str, now: str) -> Contrast:
    # Context carried in training shows only where both have it: judged with more context, most gain anyway.
    way = "carried" if choice == "context" else None
    first, second = scores(results, base, way), scores(results, other, way)
    changes = [math.expm1(second[seed] - first[seed]) for seed in first if seed in second]
    apart = None
    if min(len(first), len(second)) > 1:
        ranges = [(min(s.values()), max(s.values())) for s in (first, second)]
        apart = ranges[0][1] < ranges[1][0] or ranges[1][1] < ranges[0][0]
    return Contrast(choice, base, other, was, now, changes, apart)
