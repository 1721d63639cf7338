"""Figures of single heads, of bias and variance, and of gradients."""

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
from ._series import at_width, common_widths, grouped, is_random, quartiles, short
from .candidates import MEAN
from .fidelity import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELLED = 40  # more heads than this are drawn without names
_GREYS = ("#b8b8b8", "#6f6f6f", "#000000")
PLAIN = "favor+"


@styled
def heads(rows: list[Row], target: float) -> Figure | None:
    """Output error of each head: the best map of at most r features for a few r, beside plain FAVOR+.

    Args:
        rows: of one model, with ``measure.HEAD_COLUMNS``. target: relative error that is good enough.
    """
    real = [row for row in rows if row["map"] != MEAN and row["output_error"] == row["output_error"]]
    if not real:
        return None
    every = common_widths(real) or [max(row["features"] for row in real)]
    widths = sorted({every[0], every[(len(every) - 1) // 2], every[-1]})
    best: dict[tuple[str, int], list[float]] = {}
    for row in real:
        errors = best.setdefault((row["site"], row["head"]), [math.inf] * len(widths))
        for index, width in enumerate(widths):
            if row["features"] <= width:
                errors[index] = min(errors[index], row["output_error"])
    order = sorted(best, key=lambda key: (best[key][::-1], key))
    largest = max((row["features"] for row in real if row["map"] == PLAIN), default=None)
    plain = {
        (r["site"], r["head"]): r["output_error"]
        for r in real
        if (r["map"], r["features"]) == (PLAIN, largest)
    }
    everything = [e for errors in best.values() for e in errors] + list(plain.values())
    limits = ErrorAxis.around(everything, target=target)
    named = len(order) <= _LABELLED
    figure = new_figure(2.0 + 0.2 * min(len(order), 26))
    axes = figure.subplots()
    places = range(len(order))
    greys, shown = _GREYS[-len(widths) :], []
    for index, (width, grey) in enumerate(zip(widths, greys, strict=True)):
        xs = [limits.inside(best[key][index], f"best of {width:,}") for key in order]
        shown.append([math.nan if x is None else x for x in xs])
        label = f"best map, up to {width:,} features"
        axes.plot(shown[-1], places, color=grey, marker="o", linestyle="none", label=label, zorder=3)
    axes.hlines(places, shown[-1], shown[0], color="#c8c8c8", linewidth=2.5, zorder=2)
    if largest is not None:
        xs = [limits.inside(plain.get(key, math.nan), PLAIN) for key in order]
        points = [math.nan if x is None else x for x in xs]
        color = look(PLAIN).color
        axes.plot(
            points, places, color=color, marker="s", markerfacecolor="none", linestyle="none", zorder=4,
            label=f"plain favor+, {largest:,} features",
        )  # fmt: skip
    axes.axvline(target, **RULES["target"])
    log_axis(axes, "x", limits.low, limits.high)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_yticks(list(places) if named else [], [f"{short(s)} h{h}" for s, h in order] if named else [])
    if named:
        axes.tick_params(axis="y", labelsize=8)
    axes.set(xlabel="relative output error", ylabel="" if named else f"{len(order):,} heads, best on top")
    axes.set_title(limits.note().replace("▲", "►"), loc="left")
    legend(figure, [*axes.get_legend_handles_labels()[0], rule_handle("target", f"target {target:g}")], 1)
    return figure


@styled
def bias_and_variance(rows: list[Row]) -> Figure | None:
    """Squared bias and variance of the normalized output against features, a panel per random map.

    Args:
        rows: of one model; ``None`` comes back where a single seed leaves nothing to compare.
    """
    columns = {
        "output_squared_bias": ("squared bias", "-", "o"),
        "output_variance": ("variance", (0, (4, 2)), "s"),
    }
    found = {c: {n: _medians(g) for n, g in grouped(rows, c).items() if is_random(n)} for c in columns}
    names = [n for n, g in found["output_variance"].items() if any(y == y for y in g.values())]
    if not names:
        return None
    across = min(2, len(names))
    down = -(-len(names) // across)
    figure = new_figure(1.0 + 2.0 * down)
    panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
    low, high = 1e-3, 10.0
    sizes = sorted({r for name in names for r in found["output_variance"][name]})
    handles: dict[str, Any] = {}
    for axes, name in zip(panels, names, strict=False):
        color, _, _, _ = look(name)
        for column, (label, dash, marker) in columns.items():
            widths = found[column][name]
            clipped = [min(max(y, low), high) if y == y else y for y in widths.values()]
            face = color if marker == "o" else "white"
            axes.plot(
                list(widths),
                clipped,
                color=color,
                linestyle=dash,
                marker=marker,
                markerfacecolor=face,
                clip_on=False,
            )
            (handles[label],) = axes.plot(
                [], [], color="#333333", linestyle=dash, marker=marker, label=label,
                markerfacecolor="#333333" if marker == "o" else "white",
            )  # fmt: skip
        axes.set_title(name, color=color, loc="left", fontsize=10)
        log_axis(axes, "x", sizes[0] / 1.4, sizes[-1] * 1.4, common_widths(rows)[:4])
        log_axis(axes, "y", low, high)
        axes.set_yticks([1e-3, 1e-2, 0.1, 1, 10], ["≤ 0.001", "0.01", "0.1", "1", "≥ 10"])
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(names) - across) : len(names)]:
        axes.set_xlabel("number of features")
    figure.supylabel("share of the true output's square", fontsize=10)
    legend(figure, list(handles.values()))
    return figure


@styled
def predicted_and_observed(rows: list[Row], worthless: float) -> Figure | None:
    """Relative variance of the kernel estimate: closed form against what the seeds show, a point per head.

    Args:
        rows: of one model. worthless: variance above which one draw says next to nothing.
    """
    from matplotlib.patches import Patch

    names = ("predicted_relative_variance", "observed_relative_variance")
    points = [(r["map"], r[names[0]], r[names[1]]) for r in rows]
    points = [(n, x, y) for n, x, y in points if x > 0 and y > 0]
    if not points:
        return None
    finite = [v for _, *xy in points for v in xy if math.isfinite(v)] or [1.0]
    # Powers of ten up to the largest float would leave everything else in one corner.
    low, high = max(min(*finite, worthless) / 3, 1e-12), min(max(*finite, worthless) * 10, 1e40)
    figure = new_figure(5.2)
    axes = figure.subplots()
    maps = list(dict.fromkeys(n for n, _, _ in points))
    for name in maps:
        color, marker, _, face = look(name)
        mine = [(min(max(x, low), high), min(max(y, low), high)) for n, x, y in points if n == name]
        axes.plot(
            *zip(*mine, strict=True), color=color, marker=marker, markersize=4.5, markerfacecolor=face,
            linestyle="none", alpha=0.75, clip_on=False,
        )  # fmt: skip
    axes.axvspan(worthless, high, color="#D55E00", alpha=0.08, linewidth=0)
    axes.axvline(worthless, color="#D55E00", linewidth=1.4)
    axes.plot([low, high], [low, high], **RULES["other"])
    log_axis(axes, "x", low, high)
    log_axis(axes, "y", low, max(min(max(y for _, _, y in points) * 10, high), low * 10))
    axes.set(xlabel="predicted relative variance", ylabel="observed over the seeds")
    handles = [map_handle(name) for name in maps]
    for handle, name in zip(handles, maps, strict=True):
        handle.set(linestyle="none", marker=look(name).marker)
    handles.append(rule_handle("other", "observed = predicted"))
    handles.append(Patch(color="#D55E00", alpha=0.2, label=f"above {worthless:g}: estimate worthless"))
    legend(figure, handles)
    return figure


@styled
def gradients(rows: list[Row], target: float) -> tuple[Figure, int | None] | None:
    """Errors of the gradients by query, key and value of each map at the largest common width.

    Args:
        rows: of one model, a row per seed, with ``measure.SEED_COLUMNS``. target: as for outputs.

    Returns:
        The figure and the width of its random maps (``None`` without any).
    """
    widths = common_widths(rows)
    width = widths[-1] if widths else None
    chosen = at_width(rows, width or 0)
    looks = {"query": ("#000000", "o"), "key": ("#0072B2", "s"), "value": ("#E69F00", "^")}
    found: dict[str, dict[str, tuple[float, float, float] | None]] = {}
    for part in looks:
        seeds: dict[tuple[str, str, int], list[float]] = {}
        for row in chosen:
            seeds.setdefault((row["map"], row["site"], row["head"]), []).append(row[f"{part}_gradient_error"])
        by_map: dict[str, list[float]] = {}
        for (name, _, _), values in seeds.items():
            middle = quartiles(values)
            by_map.setdefault(name, []).append(math.nan if middle is None else middle[1])
        for name, values in by_map.items():
            found.setdefault(name, {})[part] = quartiles(values)
    medians = [q[1] for parts in found.values() for q in parts.values() if q is not None]
    if not medians:
        return None
    limits = ErrorAxis.around(medians, target=target)
    order = sorted(found, key=lambda n: sum(q[1] if q else math.inf for q in found[n].values()))
    figure = new_figure(1.6 + 0.42 * len(order))
    axes = figure.subplots()
    for row_index, name in enumerate(order):
        for shift, (part, (color, marker)) in zip((-0.22, 0.0, 0.22), looks.items(), strict=True):
            quarter, place = found[name][part], row_index + shift
            x = limits.inside(math.nan if quarter is None else quarter[1], name)
            if quarter is not None and quarter[0] <= limits.high:
                axes.hlines(
                    place, quarter[0], min(quarter[2], 10 * limits.high), color=color, linewidth=1, alpha=0.5
                )
            if x is not None:
                axes.plot([x], [place], color=color, marker=marker, linestyle="none", markersize=5, zorder=3)
            elif quarter is not None:
                axes.plot([limits.high], [place], color=color, marker=">", linestyle="none", clip_on=False)
    axes.axvline(target, **RULES["target"])
    axes.axvline(1.0, **RULES["other"])
    log_axis(axes, "x", limits.low, limits.high)
    axes.set_yticks(range(len(order)), [MEAN_LABEL if n == MEAN else n for n in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlabel("relative error of the gradient")
    axes.set_title(limits.note().replace("▲", "►"), loc="left")
    from matplotlib.lines import Line2D

    handles: list[Any] = [
        Line2D([], [], color=c, marker=m, linestyle="none", label=f"by the {part}")
        for part, (c, m) in looks.items()
    ]
    handles += [rule_handle("target", f"target {target:g}"), rule_handle("other", "as far off as zeros")]
    legend(figure, handles)
    return figure, width


MEAN_LABEL = "mean of the values"


def _medians(widths: dict[int, list[float]]) -> dict[int, float]:
    found = {width: quartiles(values) for width, values in widths.items()}
    return {width: math.nan if q is None else q[1] for width, q in found.items()}
