"""Figures with a line for each thing compared: means with the spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ._plot import RULES, legend, log_axis, new_figure, styled
from ._series import amount, short, tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for most kinds of colour blindness; markers say it again.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*Xph<>"


class Line(NamedTuple):
    """One thing compared.

    ``points`` are (x, middle, lowest, highest). ``dashed`` ones are hollow: a reference, such as softmax.
    """

    label: str
    points: Sequence[tuple[float, float, float, float]]
    dashed: bool = False


def spread(groups: dict[float, list[float]]) -> list[tuple[float, float, float, float]]:
    """Points of a line: for each x the mean, least and largest of what its seeds gave."""
    return [(x, sum(ys) / len(ys), min(ys), max(ys)) for x, ys in sorted(groups.items())]


@styled
def line_figure(
    lines: Iterable[Line],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    at: Sequence[float] = (),
    share: bool = False,
    level: tuple[str, float] | None = None,
) -> Figure | None:
    """A figure of lines.

    Args:
        lines: in the order of the legend. x, y: labels of the axes. log_x, log_y: whether logarithmic.
        at: where to label a logarithmic x axis. share: y goes from 0 to 1.
        level: name and y of a horizontal line to compare with.

    Returns:
        The figure, or ``None`` if there is no point.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    from matplotlib.lines import Line2D

    figure = new_figure(3.7 + 0.2 * math.ceil((len(lines) + (level is not None)) / 2))
    axes = figure.subplots()
    handles: list[Any] = [_draw(axes, index, line) for index, line in enumerate(lines)]
    if level is not None:
        axes.axhline(level[1], **RULES["other"])
        handles.append(Line2D([], [], label=level[0], **RULES["other"]))
    xs = [point[0] for line in lines for point in line.points]
    ys = [value for line in lines for point in line.points for value in point[1:] if math.isfinite(value)]
    if log_x:
        log_axis(axes, "x", min(xs) / 1.3, max(xs) * 1.3, at, amount)
    if share:
        axes.set_ylim(-0.03, 1.03)
    elif log_y and ys and min(ys) > 0:
        log_axis(axes, "y", min(ys) / 1.3, max(ys) * 1.3, write=tick)
    axes.set(xlabel=x, ylabel=y)
    legend(figure, handles, 2 if max(len(line.label) for line in lines) < 28 else 1)
    return figure


def _draw(axes: Axes, index: int, line: Line) -> Any:
    """Draw one line and give its entry in the legend."""
    from matplotlib.lines import Line2D

    look: Any = {
        "color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)],
        "linestyle": (0, (4, 2)) if line.dashed else "-",
    }  # fmt: skip
    look["markerfacecolor"] = "white" if line.dashed else look["color"]
    xs, middle, lowest, highest = zip(*line.points, strict=True)
    many = len(xs) > 12  # a curve of training, where markers would hide each other
    axes.plot(xs, middle, markevery=max(1, len(xs) // 6) if many else 1, zorder=3, **look)
    if many:
        axes.fill_between(xs, lowest, highest, color=look["color"], alpha=0.13, linewidth=0)
    else:
        axes.vlines(xs, lowest, highest, color=look["color"], linewidth=1.2, alpha=0.6)
    return Line2D([], [], label=short(line.label, 36), **look)
