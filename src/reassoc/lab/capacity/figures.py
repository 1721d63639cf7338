"""Figures of a capacity experiment: loss against pairs beside the published ones, and the closed form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .._lines import COLORS, MARKERS
from .._plot import legend, log_axis, new_figure, styled
from .._series import amount, short
from ..fidelity import Row
from ..figures import Plot
from .answer import loss_of, points
from .published import PUBLISHED_DIM, published
from .run import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FINE: dict[str, Any] = {"linewidth": 1.0, "zorder": 1}
_DOTS: Any = (0, (1, 1.5))
_DASHES: Any = (0, (4, 2))
CLIP = 1.6  # of errors in the closed form: beyond, a read is worse than useless however far


def plots(results: Results) -> list[Plot]:
    """Every figure that there are numbers for."""
    found = []
    for setting, title in ((1, "every key once"), (2, "keys come again with new values")):
        figure = retrieval_figure(results, setting)
        caption = (
            "Solid, filled: here, the mean over seeds, bars from the least to the largest. Dashed, hollow: "
            "published, the same color. "
        )
        if setting == 1:
            caption += (
                "Vertical lines: numbers of features. Dotted curves: ½ (1 − r/N), which no memory of r "
                "features can pass."
            )
        if figure is not None:
            found.append(Plot(f"setting-{setting}", f"setting {setting}, {title}", "Loss", caption, figure))
    made = [] if "keys" in results.manifest else results.closed
    for kind in dict.fromkeys(row["keys"] for row in made):
        figure = closed_figure([row for row in made if row["keys"] == kind])
        if figure is not None:
            caption = (
                "Solid: sum rule, each read scaled as well as can be, so that only crosstalk is left. "
                "Dashed: delta rule, exact writes, after 64 passes. Dotted: 1 − rank/N, which no rule can "
                "pass. 1 is as bad as reading zero."
            )
            found.append(
                Plot(f"closed.{kind}", f"{kind} keys", "Closed form: expected error", caption, figure)
            )
    return found


@styled
def retrieval_figure(results: Results, setting: int) -> Figure | None:
    """Loss against the number of pairs."""
    from matplotlib.lines import Line2D

    found = points(results, setting)
    if not found:
        return None
    figure = new_figure(4.1 + 0.2 * math.ceil(len(found) / 2))
    axes = figure.subplots()
    last = max(count for by_pairs in found.values() for count in by_pairs)
    handles = []
    for index, (case, by_pairs) in enumerate(found.items()):
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        _draw(axes, by_pairs, color, marker)
        row = next(iter(by_pairs.values()))[0]
        if results.manifest["dim"] == PUBLISHED_DIM:
            theirs = [(n, published(setting, case, n)) for n in range(20, last + 1, 20)]
            theirs = [(n, loss) for n, loss in theirs if loss == loss]
            if theirs:
                axes.plot(
                    *zip(*theirs, strict=True), color=color, marker=marker, markerfacecolor="white",
                    linestyle=_DASHES, markersize=4, linewidth=1.0, zorder=2,
                )  # fmt: skip
        if setting == 1 and row["features"] is not None:
            axes.axvline(row["features"], color=color, **_FINE)
            counts = [row["features"] + (last - row["features"]) * i / 60 for i in range(61)]
            if counts[-1] > counts[0]:
                floor = [0.5 * (1 - row["features"] / n) for n in counts]
                axes.plot(counts, floor, color=color, linestyle=_DOTS, **_FINE)
        handles.append(Line2D([], [], color=color, marker=marker, label=short(case, 36)))
    grey: Any = {"color": "#555555", "linewidth": 1.0}
    if results.manifest["dim"] == PUBLISHED_DIM:
        handles.append(
            Line2D([], [], marker="o", markerfacecolor="white", linestyle=_DASHES, label="published", **grey)
        )
    if setting == 1:
        handles.append(Line2D([], [], linestyle=_DOTS, label="½ (1 − r/N)", **grey))
    axes.set(xlabel="pairs N", ylabel="loss", xlim=(0, last * 1.04), ylim=(-0.015, 0.56))
    legend(figure, handles)
    return figure


def _draw(axes: Axes, by_pairs: dict[int, list[Row]], color: str, marker: str) -> None:
    kept = {count: rows for count, rows in by_pairs.items() if math.isfinite(loss_of(rows))}
    axes.plot(list(kept), [loss_of(rows) for rows in kept.values()], color=color, marker=marker, zorder=3)
    for count, rows in kept.items():
        losses = [row["loss"] for row in rows]
        axes.vlines(count, min(losses), max(losses), color=color, linewidth=1.2, alpha=0.6)


@styled
def closed_figure(rows: list[Row]) -> Figure | None:
    """Expected error against the number of keys, a color for each map."""
    from matplotlib.lines import Line2D

    counts = sorted({row["pairs"] for row in rows})
    maps = list(dict.fromkeys(row["map"] for row in rows))
    if len(counts) < 2:
        return None
    figure = new_figure(3.9 + 0.2 * math.ceil(len(maps) / 2))
    axes = figure.subplots()
    handles = []
    for index, name in enumerate(maps):
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        for rule, column, dash in (
            ("sum", "least_error", "-"),
            ("delta", "exact_error_passes", _DASHES),
        ):
            mine = [row for row in rows if row["map"] == name and row["rule"] == rule]
            drawn = [(row["pairs"], min(row[column], CLIP)) for row in mine if row[column] is not None]
            if drawn:
                face = color if rule == "sum" else "white"
                axes.plot(
                    *zip(*drawn, strict=True),
                    color=color,
                    marker=marker,
                    linestyle=dash,
                    markerfacecolor=face,
                )
        bounds = {row["pairs"]: row["bound"] for row in rows if row["map"] == name}
        axes.plot(list(bounds), list(bounds.values()), color=color, linestyle=_DOTS, **_FINE)
        handles.append(Line2D([], [], color=color, marker=marker, label=short(name, 36)))
    log_axis(axes, "x", counts[0] / 1.2, counts[-1] * 1.2, counts, amount)
    axes.set(xlabel="keys N", ylabel="squared error of a read", ylim=(-0.04, CLIP + 0.04))
    legend(figure, handles)
    return figure
