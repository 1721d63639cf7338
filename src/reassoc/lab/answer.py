"""What a sweep means for the person who ran it: which map to choose, or that none will do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from .candidates import FITTED, MEAN, PROJECTED
from .fidelity import Results, Row

WORTHLESS = 1.0  # relative variance above which one draw's kernel estimate says next to nothing


@dataclass(frozen=True)
class Line:
    """A map at a width over all heads of one model.

    Attributes:
        map, features: which. median, best, worst: relative output error over heads (median over seeds).
        within: number of heads within the target. heads: of how many.
        operations, state_bytes: per token and head, and for each head.
        predicted_variance: median over heads, or ``None`` where there is no prediction.
    """

    map: str
    features: int
    median: float
    best: float
    worst: float
    within: int
    heads: int
    operations: int
    state_bytes: int
    predicted_variance: float | None


@dataclass(frozen=True)
class Answer:
    """The answer for one model.

    Attributes:
        model: its name. lines: every map, cheapest first.
        choice: the cheapest map whose median error is within the target, or ``None``.
        closest: the map with the smallest median error.
        per_head: (site, head) -> the cheapest (map, features) within the target, or ``None``.
        sentences: the answer in words, worked out from the numbers.
    """

    model: str
    lines: list[Line]
    choice: Line | None
    closest: Line
    per_head: dict[tuple[str, int], tuple[str, int] | None]
    sentences: list[str]


def answers(results: Results) -> list[Answer]:
    """One answer per model of the input, in the order of the input."""
    target = results.manifest["target_error"]
    models = dict.fromkeys(row["model"] for row in results.heads)
    return [
        _answer(model or "input", [r for r in results.heads if r["model"] == model], target)
        for model in models
    ]


def _answer(model: str, rows: list[Row], target: float) -> Answer:
    lines = sorted(_lines(rows, target), key=lambda line: (line.operations, line.features, line.map))
    real = [line for line in lines if line.map != MEAN]
    pool = real or lines
    choice = next((line for line in pool if line.median <= target), None)
    closest = min(pool, key=lambda line: line.median)
    per_head: dict[tuple[str, int], tuple[str, int] | None] = {}
    for row in sorted(rows, key=lambda r: (r["operations_per_token"], r["features"], r["map"])):
        key = (row["site"], row["head"])
        per_head.setdefault(key, None)
        if per_head[key] is None and row["map"] != MEAN and row["output_error"] <= target:
            per_head[key] = (row["map"], row["features"])
    per_head = {(r["site"], r["head"]): per_head[r["site"], r["head"]] for r in rows}
    sentences = list(_sentences(model, lines, choice, closest, per_head, target))
    return Answer(model, lines, choice, closest, per_head, sentences)


def _lines(rows: list[Row], target: float) -> Iterable[Line]:
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["map"], row["features"]), []).append(row)
    for (name, features), group in groups.items():
        errors = [_or_inf(row["output_error"]) for row in group]
        variances = [v for v in (row["predicted_relative_variance"] for row in group) if v == v]
        yield Line(
            name, features, median(errors), min(errors), max(errors), sum(e <= target for e in errors),
            len(errors),
            round(median(row["operations_per_token"] for row in group)),
            round(median(row["state_bytes"] for row in group)), median(variances) if variances else None,
        )  # fmt: skip


def _sentences(
    model: str,
    lines: list[Line],
    choice: Line | None,
    closest: Line,
    per_head: dict[tuple[str, int], tuple[str, int] | None],
    target: float,
) -> Iterable[str]:
    good = sum(found is not None for found in per_head.values())
    if choice is not None:
        yield (
            f"{model}: the cheapest map with a median output error of at most {target:g} is "
            f"{title(choice)} features: median {choice.median:.2g}, worst head {choice.worst:.2g}, "
            f"{choice.within} of {choice.heads} heads within the target."
        )
    else:
        yield (
            f"{model}: none of these will do. No map reaches a median output error of {target:g}; the "
            f"closest, {title(closest)} features, has {closest.median:.2g} (best head {closest.best:.2g}, "
            f"worst {closest.worst:.2g}){_scale(closest.median)}. Train a map on this model, or keep softmax."
        )
    if good == 0:
        yield f"For none of the {len(per_head)} heads is any of these untrained maps within {target:g}."
    elif good < len(per_head):
        yield f"{good} of {len(per_head)} heads have a map within {target:g}; for the others keep softmax."
    mean = next((line for line in lines if line.map == MEAN), None)
    yield from _comparisons(lines, mean)
    if mean is not None:
        worse = [line for line in lines if line.map != MEAN and line.median >= mean.median]
        if worse:
            yield (
                "No better than giving every visible value the same weight "
                f"(median error {mean.median:.2g}): {_by_map(worse)}."
            )
    bad = [
        line for line in lines if line.predicted_variance is not None and line.predicted_variance > WORTHLESS
    ]
    if bad:
        worst = max(bad, key=lambda line: line.predicted_variance or 0.0)
        yield (
            f"Warning: the predicted relative variance of the kernel estimate is above {WORTHLESS:g} for "
            f"{_by_map(bad)} (up to {worst.predicted_variance:.1g}). One draw then says little about most "
            "weights; a few seeds show less variance only because none met the rare projections that "
            "carry it."
        )


def _by_map(lines: list[Line]) -> str:
    """``favor+ (64, 256), taylor (561)``: every map once, with its widths."""
    widths: dict[str, list[int]] = {}
    for line in lines:
        widths.setdefault(line.map, []).append(line.features)
    return ", ".join(
        f"{name} ({', '.join(f'{w:,}' for w in sorted(found))})" for name, found in widths.items()
    )


def _comparisons(lines: list[Line], mean: Line | None) -> Iterable[str]:
    """Where a map that learned from data beats larger ones that did not."""
    limit = math.inf if mean is None else mean.median
    useful = [line for line in lines if line.median < limit]
    plain = [line for line in lines if line.map == "favor+"]
    pairs = [
        (large.features / small.features, small, large)
        for small in useful
        for large in plain
        if small.map in ("favor+:calibrated", "favor++:calibrated")
        and small.features < large.features
        and small.median < large.median
    ]
    if pairs:
        factor, small, large = max(pairs, key=lambda pair: (pair[0], -pair[1].median))
        yield (
            f"Calibration pays: {title(small)} features ({small.median:.2g}) is closer than the plain map at "
            f"{large.features:,} ({large.median:.2g}), with {factor:.0f} times fewer."
        )
    drawn = [line for line in lines if line.map.split(":")[0] in PROJECTED]
    if drawn:
        best = min(drawn, key=lambda line: line.median)
        fitted = [line for line in useful if line.map in FITTED and line.median < best.median]
        if fitted:
            smallest = min(fitted, key=lambda line: line.features)
            yield (
                f"Fitting pays more: {title(smallest)} features ({smallest.median:.2g}), fitted to the "
                "calibration half, is closer than every random map measured "
                f"({title(best)}: {best.median:.2g})."
            )


def _scale(error: float) -> str:
    return "; an error of 1 is what an output of zeros has" if error >= 0.5 else ""


def _or_inf(error: float) -> float:
    """An error that is not a number counts as the worst."""
    return math.inf if error != error else error


def title(line: Line) -> str:
    """``map at features``, as the report and the terminal write it."""
    return f"{line.map} at {line.features:,}"
