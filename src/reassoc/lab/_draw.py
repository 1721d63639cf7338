"""Figures of the output error: against features, cost, and the norm and length of synthetic input."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ._plot import (
    RULES,
    ErrorAxis,
    legend,
    log_axis,
    look,
    map_handle,
    new_figure,
    rule_handle,
    styled,
)
from ._series import amount, at_width, common_widths, grouped, is_random, quartiles, spaced
from .candidates import MEAN
from .fidelity import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ERROR_LABEL = "relative output error"


@styled
def error_by_features(rows: list[Row], target: float) -> Figure | None:
    """Output error against the number of features: median over heads, band of the quartiles.

    Args:
        rows: of one model, with ``measure.HEAD_COLUMNS``. target: relative error that is good enough.

    Returns:
        The figure, or ``None`` if there is no number to show.
    """
    from matplotlib.patches import Patch

    groups = grouped(rows, "output_error")
    baseline = _median(rows, MEAN)
    medians = {n: {r: quartiles(v) for r, v in g.items()} for n, g in groups.items() if n != MEAN}
    middle = [q[1] for g in medians.values() for q in g.values() if q is not None]
    if not middle:
        return None
    figure = new_figure(5.4)
    axes = figure.subplots()
    limits = ErrorAxis.around(middle, target=target, baseline=baseline)
    for name, widths in medians.items():
        _line(axes, limits, name, widths, band=True)
    sizes = sorted({r for g in medians.values() for r in g})
    ticks = spaced([r for n, g in medians.items() if is_random(n) for r in g] or sizes)
    log_axis(axes, "x", sizes[0] / 1.4, sizes[-1] * 1.4, ticks if 1 < len(ticks) <= 7 else ())
    log_axis(axes, "y", limits.low, limits.high)
    handles = [map_handle(name) for name in medians]
    handles += _rules(axes, target, baseline)
    handles.append(Patch(color="#cccccc", label="band, bar: middle half of heads"))
    axes.set(xlabel="number of features", ylabel=ERROR_LABEL)
    axes.set_title(limits.note(), loc="left")
    legend(figure, handles)
    return figure


@styled
def error_by_cost(
    rows: list[Row], target: float, softmax: tuple[int, float, float] | None = None
) -> Figure | None:
    """Output error against operations per token and against the bytes of the state.

    Args:
        rows: of one model. target: relative error that is good enough.
        softmax: (tokens, operations per token, bytes of keys and values) of softmax over a whole sequence.
    """
    costs = ("operations_per_token", "state_bytes")
    points = []
    for name, widths in grouped(rows, "output_error").items():
        for features, values in widths.items():
            found = quartiles(values)
            cost = [quartiles(grouped(rows, c)[name][features]) for c in costs]
            if found is not None and name != MEAN:
                points.append((name, found[1], [c[1] if c else math.nan for c in cost]))
    if not points:
        return None
    figure = new_figure(7.2)
    panels = figure.subplots(2, 1)
    names = list(dict.fromkeys(name for name, _, _ in points))
    baseline = _median(rows, MEAN)
    handles: list[Any] = [map_handle(name) for name in names]
    for index, axes in enumerate(panels):
        limits = ErrorAxis.around([p[1] for p in points], target=target, baseline=baseline)
        for name in names:
            mine = sorted((cost[index], error) for n, error, cost in points if n == name)
            _line(axes, limits, name, {x: (y, y, y) for x, y in mine})
        xs = [cost[index] for _, _, cost in points]
        least = math.inf
        steps = [(x, least := min(least, y)) for x, y in sorted((p[2][index], p[1]) for p in points)]
        axes.step(*zip(*steps, strict=True), where="post", color="#bbbbbb", linewidth=5, alpha=0.6, zorder=1)
        rules = _rules(axes, target, baseline)
        if softmax is not None:
            xs.append(softmax[index + 1])
            axes.axvline(softmax[index + 1], **RULES["other"])
        log_axis(axes, "x", min(xs) / 1.5, max(xs) * 1.5, write=amount)
        log_axis(axes, "y", limits.low, limits.high)
        axes.set_ylabel(ERROR_LABEL)
        if index == 0:
            axes.set_title(limits.note(), loc="left")
            handles += rules
    panels[0].set_xlabel("operations per token and head")
    panels[1].set_xlabel("bytes of the state of a head (float32)")
    handles.append(_grey("least error up to this cost"))
    if softmax is not None:
        handles.append(rule_handle("other", f"softmax attention, {softmax[0]:,} tokens"))
    legend(figure, handles)
    return figure


@styled
def error_by_axis(
    rows: list[Row], axes_of: dict[str, dict[str, float]], which: str, target: float
) -> Figure | None:
    """Synthetic input: output error against ``"norm"`` or ``"length"``, one line per map.

    Args:
        rows: of the synthetic model. axes_of: site -> its norm and length. which: the axis to follow.
        target: relative error that is good enough.

    Returns:
        The figure at the longest length (or the norm nearest 1) and the largest common width.
    """
    rows = [row for row in rows if row["site"] in axes_of]
    other = "length" if which == "norm" else "norm"
    if not rows:
        return None
    choices = sorted({axes_of[row["site"]][other] for row in rows})
    fixed = max(choices) if other == "length" else min(choices, key=lambda norm: abs(math.log(norm)))
    width = (common_widths(rows) or [0])[-1]
    chosen = [
        row | {"features": axes_of[row["site"]][which]}
        for row in at_width(rows, width)
        if axes_of[row["site"]][other] == fixed
    ]
    medians = {n: {x: quartiles(v) for x, v in g.items()} for n, g in grouped(chosen, "output_error").items()}
    middle = [q[1] for g in medians.values() for q in g.values() if q is not None]
    if not middle:
        return None
    figure = new_figure(4.6)
    axes = figure.subplots()
    limits = ErrorAxis.around(middle, target=target)
    for name, places in medians.items():
        if name == MEAN:
            xy = [(x, q[1]) for x, q in places.items() if q]
            axes.plot(*zip(*xy, strict=True), **RULES[MEAN])
        else:
            _line(axes, limits, name, places, joined=True)
    xs = sorted({row["features"] for row in chosen})
    log_axis(axes, "x", xs[0] / 1.2, xs[-1] * 1.2, xs if len(xs) <= 8 else ())
    log_axis(axes, "y", limits.low, limits.high)
    axes.axhline(target, **RULES["target"])
    axes.set(xlabel="norm of scaled queries and keys" if which == "norm" else "tokens", ylabel=ERROR_LABEL)
    where = f"{other} {fixed:g}" + (f", random maps with {width:,} features" if width else "")
    axes.set_title("\n".join(filter(None, (where, limits.note()))), loc="left")
    handles = [rule_handle(MEAN, "mean of the values") if n == MEAN else map_handle(n) for n in medians]
    legend(figure, [*handles, rule_handle("target", f"target {target:g}")])
    return figure


def _line(
    axes: Axes,
    limits: ErrorAxis,
    name: str,
    points: dict[Any, tuple[float, float, float] | None],
    *,
    band: bool = False,
    joined: bool | None = None,
) -> None:
    """One map: x -> quartiles. What the axis does not reach becomes a triangle at its edge."""
    color, marker, dash, face = look(name)
    joined = is_random(name) if joined is None else joined
    found = {x: (limits.inside(math.nan if q is None else q[1], name), q) for x, q in points.items()}
    true = [q[1] if q is not None and math.isfinite(q[1]) else math.nan for _, q in found.values()]
    shown = [math.nan if y is None else y for y, _ in found.values()]
    if joined:
        axes.plot(list(found), true, color=color, linestyle=dash, linewidth=1.8, zorder=3)
    axes.plot(
        list(found), shown, color=color, marker=marker, markerfacecolor=face, linestyle="none", zorder=4
    )
    edge = [x for x, (y, q) in found.items() if y is None and q is not None]
    if edge:  # an empty unclipped line would still take part in the layout, at the corner of the figure
        high = [limits.high] * len(edge)
        axes.plot(edge, high, color=color, marker="^", linestyle="none", clip_on=False, zorder=5)
    if not band:
        return
    spread = [(x, q[0], min(q[2], 10 * limits.high)) for x, q in points.items() if q and q[0] <= limits.high]
    if spread and len(spread) > 1 and joined:
        places, low, top = zip(*spread, strict=True)
        axes.fill_between(places, low, top, color=color, alpha=0.13, linewidth=0)
    elif spread:
        places, low, top = zip(*spread, strict=True)
        axes.vlines(places, low, top, color=color, linewidth=1.2, alpha=0.6)


def _rules(axes: Axes, target: float, baseline: float) -> list[Any]:
    """Horizontal lines for the target and the mean of the values, and their legend entries."""
    axes.axhline(target, **RULES["target"])
    handles = [rule_handle("target", f"target {target:g}")]
    if math.isfinite(baseline):
        axes.axhline(baseline, **RULES[MEAN])
        handles.append(rule_handle(MEAN, "mean of the values"))
    return handles


def _median(rows: list[Row], name: str) -> float:
    found = quartiles(row["output_error"] for row in rows if row["map"] == name)
    return math.nan if found is None else found[1]


def _grey(label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color="#bbbbbb", linewidth=5, alpha=0.6, label=label)
