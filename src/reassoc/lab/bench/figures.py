"""Figures of a benchmark: ratios, times, and shares of the machine's ceiling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._plot import RULES, legend, log_axis, new_figure, styled
from .._series import amount, short, spaced, tick
from ..figures import Plot, write_plots
from .ratios import MEASURED
from .run import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for most kinds of colour blindness; markers say it again.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vP*Xph<>"
_WAYS = {
    "forward": ("forward", "tokens"),
    "backward": ("forward and backward", "tokens"),
    "step": ("one decode step", "keys seen before"),
}


class _Line(NamedTuple):
    label: str
    points: list[tuple[int, float, float, float]]  # length, middle, lower, upper
    color: str
    marker: str
    mine: bool


def way(direction: str) -> str:
    """A direction in words."""
    return _WAYS[direction][0]


def plots(results: Results) -> list[Plot]:
    """Every figure that there are numbers for."""
    found = []
    for direction in results.manifest["key"]["settings"]["directions"]:
        for name, title, caption, figure in (
            (
                "ratios",
                "How many times faster than others",
                "The other's time divided by ours, medians and quartiles of paired calls. Above the line "
                "ours is faster; where a line crosses it is the crossover length. Colors are ours. Solid: "
                "against softmax; dashed: against others that compute the same.",
                ratio_figure(results, direction),
            ),
            (
                "times",
                "Time of a call",
                "Medians and quartiles. Solid and filled: ours. Dashed and hollow: others.",
                time_figure(results, direction),
            ),
            (
                "share-of-peak",
                "Share of the multiply-add ceiling",
                "Counted arithmetic divided by time and by the machine's multiply-add rate. Softmax and "
                "linear attention do different amounts of arithmetic: a high share is good use of the "
                "machine, not speed.",
                share_figure(results, direction),
            ),
        ):
            if figure is not None:
                found.append(Plot(f"{name}.{direction}", way(direction), title, caption, figure))
    return found


def write_figures(results: Results, folder: Path) -> list[Plot]:
    """Write each figure as ``figures/NAME.png`` and ``.svg``; the figures, for the report."""
    return write_plots(plots(results), folder)


@styled
def ratio_figure(results: Results, direction: str) -> Figure | None:
    """Ratio against length, a line for each pair."""
    groups: dict[tuple[str, str], list[tuple[int, float, float, float]]] = {}
    for row in results.ratios:
        if row["direction"] == direction and row["ratio"] is not None:
            points = groups.setdefault((row["ours"], row["other"]), [])
            points.append((row["length"], row["ratio"], row["lower"], row["upper"]))
    ours = list(dict.fromkeys(mine for mine, _ in groups))
    others = list(dict.fromkeys(other for _, other in groups))
    lines = [
        _Line(
            f"{short(mine, 20)} / {short(other, 18)}", points, _COLORS[ours.index(mine) % len(_COLORS)],
            _MARKERS[others.index(other) % len(_MARKERS)], other.startswith("softmax"),
        )
        for (mine, other), points in groups.items()
    ]  # fmt: skip
    return _figure(lines, direction, "time of the other / time of ours", one=True)


@styled
def time_figure(results: Results, direction: str) -> Figure | None:
    """Milliseconds against length, a line for each contender."""
    lines = _contenders(
        results, direction, lambda r: tuple(1e3 * r[c] for c in ("seconds", "lower", "upper"))
    )
    return _figure(lines, direction, "milliseconds")


@styled
def share_figure(results: Results, direction: str) -> Figure | None:
    """Share of the multiply-add ceiling in percent, a line for each contender."""
    lines = _contenders(results, direction, lambda r: (100 * r["share"],) * 3)
    return _figure(lines, direction, "% of multiply-add ceiling")


def _contenders(results: Results, direction: str, values: Any) -> list[_Line]:
    lines = []
    for index, about in enumerate(results.manifest["contenders"]):
        points = [
            (row["length"], *values(row))
            for row in results.rows
            if row["contender"] == about["name"]
            and row["direction"] == direction
            and row["status"] == MEASURED
        ]
        if points:
            color, marker = _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]
            lines.append(_Line(short(about["name"], 30), points, color, marker, about["kind"] == "ours"))
    return lines


def _figure(lines: list[_Line], direction: str, label: str, one: bool = False) -> Figure | None:
    from matplotlib.lines import Line2D

    if not lines:
        return None
    figure = new_figure(3.9 + 0.2 * math.ceil(len(lines) / 2))
    axes = figure.subplots()
    handles: list[Any] = []
    for line in lines:
        _draw(axes, line)
        style: Any = "-" if line.mine else (0, (4, 2))
        handles.append(
            Line2D(
                [], [], color=line.color, marker=line.marker, linestyle=style, label=line.label,
                markerfacecolor=line.color if line.mine else "white",
            )
        )  # fmt: skip
    lengths = sorted({point[0] for line in lines for point in line.points})
    values = [v for line in lines for point in line.points for v in point[1:]]
    if one:
        axes.axhline(1.0, **RULES["target"])
        values.append(1.0)
    log_axis(axes, "x", lengths[0] / 1.3, lengths[-1] * 1.3, spaced(lengths), amount)
    log_axis(axes, "y", min(values) / 1.4, max(values) * 1.4, write=tick)
    axes.set(xlabel=_WAYS[direction][1], ylabel=label)
    axes.set_title(way(direction), loc="left")
    legend(figure, handles, 2 if max(len(line.label) for line in lines) < 28 else 1)
    return figure


def _draw(axes: Axes, line: _Line) -> None:
    lengths, middle, lower, upper = zip(*line.points, strict=True)
    style: Any = "-" if line.mine else (0, (4, 2))
    face = line.color if line.mine else "white"
    axes.plot(
        lengths, middle, color=line.color, marker=line.marker, markerfacecolor=face, linestyle=style, zorder=3
    )
    axes.vlines(lengths, lower, upper, color=line.color, linewidth=1.2, alpha=0.6)
