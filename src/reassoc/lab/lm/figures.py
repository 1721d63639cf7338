"""Figures of a comparison: how the loss fell, and what a state of some size buys."""

from __future__ import annotations

import math
from statistics import median

from .._lines import Line, line_figure, spread
from .._series import short
from ..figures import Plot
from .contrasts import scores
from .evaluate import perplexity
from .run import Results

POINTS = 60  # of a loss curve: each the mean over a stretch of steps


def plots(results: Results) -> list[Plot]:
    """Every figure that there are numbers for."""
    about = short(results.text.name)
    loss = line_figure(_losses(results), x="tokens trained on", y="nats per token", log_x=True)
    state = line_figure(_states(results), x="bytes of state per sequence", y="test perplexity", log_x=True)
    return [
        Plot(name, about, title, caption, figure)
        for name, title, caption, figure in (
            (
                "lm-loss",
                "Training loss",
                "Nats per token, means over stretches of steps and over seeds, the band from the least to "
                "the largest; the first stretch is left out. All models see the same tokens in the same "
                "order. A line that ends early diverged.",
                loss,
            ),
            (
                "lm-state",
                "Perplexity against the size of the state",
                "Judged as trained; medians, bars from the best to the worst seed. Left and low is good. "
                "Softmax (hollow) is drawn at what its cache holds after one segment; it goes on growing, "
                "the others do not.",
                state,
            ),
        )
        if figure is not None
    ]


def binned(losses: list[float]) -> list[tuple[int, float]]:
    """(last step of a stretch counted from 1, mean loss over it), at most :data:`POINTS` of them."""
    size = max(1, math.ceil(len(losses) / POINTS))
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    ends = [min((index + 1) * size, len(losses)) for index in range(len(parts))]
    return [(end, sum(part) / len(part)) for end, part in zip(ends, parts, strict=True)]


def _losses(results: Results) -> list[Line]:
    settings = results.manifest["settings"]
    tokens = settings["batch"] * settings["segment"]
    lines = []
    for recipe in results.recipes:
        found: dict[float, list[float]] = {}
        for run in results.runs:
            if run["recipe"] == recipe.name:
                stretches = binned(run["losses"])
                # From knowing nothing to knowing the letters is one fall for all, and hides what differs.
                for end, loss in stretches[1:] or stretches:
                    if math.isfinite(loss):
                        found.setdefault(float(end * tokens), []).append(loss)
        lines.append(Line(recipe.name, spread(found), recipe.softmax))
    return lines


def _states(results: Results) -> list[Line]:
    lines = []
    for recipe in results.recipes:
        found = [perplexity(value) for value in scores(results, recipe.name).values()]
        found = [value for value in found if math.isfinite(value)]
        size = next(run["state_bytes"] for run in results.runs if run["recipe"] == recipe.name)
        points = [(float(size), median(found), min(found), max(found))] if found else []
        lines.append(Line(recipe.name, points, recipe.softmax))
    return lines
