"""Figures of a fidelity sweep, each as PNG and SVG, the same results giving the same bytes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import atomic_write
from ._draw import error_by_axis, error_by_cost, error_by_features
from ._draw_heads import bias_and_variance, gradients, heads, predicted_and_observed
from ._plot import save
from .answer import WORTHLESS
from .fidelity import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Plot",
    "bias_and_variance",
    "error_by_axis",
    "error_by_cost",
    "error_by_features",
    "gradients",
    "heads",
    "plots",
    "predicted_and_observed",
    "softmax_cost",
    "write_figures",
]


@dataclass(frozen=True)
class Plot:
    """One figure and what to say about it.

    Attributes:
        name: of its files, without suffix. model: whose heads it shows.
        title: a few words. caption: what to see in it, plain text. figure: matplotlib's.
    """

    name: str
    model: str
    title: str
    caption: str
    figure: Figure

    @functools.cached_property
    def svg(self) -> bytes:
        """The figure as an SVG file, text as paths."""
        return save(self.figure, "svg")

    @functools.cached_property
    def png(self) -> bytes:
        """The figure as a PNG file, 720 pixels wide."""
        return save(self.figure, "png")


def plots(results: Results) -> list[Plot]:
    """Every figure that the results have numbers for, model by model in the order of the input."""
    found = []
    models = list(dict.fromkeys(row["model"] for row in results.heads))
    for index, model in enumerate(models):
        # Names of models come from files: only letters, digits and dashes reach the file system.
        slug = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-")[:60] or "model"
        if slug.lower() in {re.sub(r"[^A-Za-z0-9]+", "-", m).strip("-")[:60].lower() for m in models[:index]}:
            slug = f"{slug}-{index + 1}"
        for name, title, caption, figure in _of_model(results, model):
            if figure is not None:
                found.append(Plot(f"{name}.{slug}", model, title, caption, figure))
    return found


def write_figures(results: Results, folder: Path) -> list[Plot]:
    """Write each figure as ``figures/NAME.png`` and ``figures/NAME.svg`` under the folder.

    Returns:
        The figures, for :func:`reassoc.lab.write_report`.

    Raises:
        OSError: the folder cannot be made or written; each file is whole or as it was before.
    """
    return write_plots(plots(results), folder)


def write_plots(found: list[Plot], folder: Path) -> list[Plot]:
    """As :func:`write_figures`, for any figures."""
    files = {f"{p.name}.{kind}": data for p in found for kind, data in (("png", p.png), ("svg", p.svg))}
    target = folder / "figures"
    target.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        with atomic_write(target / name) as path:
            path.write_bytes(data)
    return found


def softmax_cost(results: Results, model: str) -> tuple[int, float, float] | None:
    """What softmax attention itself would take over the model's longest sequence, counted like the maps.

    Returns:
        (tokens n, operations per token and head when all n keys are seen: 2 n d for the scores, 2 n e for
        the values, 11 n for exponentials and their sum; bytes of n keys and values in float32).
    """
    sites = [s for s in results.manifest.get("sites", {}).values() if s["model"] == model]
    lengths = [(max(s["sequence_lengths"], default=0), s["head_size"], s["value_size"]) for s in sites]
    if not lengths or not max(lengths)[0]:
        return None
    tokens, dim, columns = max(lengths)
    return tokens, tokens * (2.0 * dim + 2.0 * columns + 11.0), 4.0 * tokens * (dim + columns)


def _of_model(results: Results, model: str) -> Iterator[tuple[str, str, str, Figure | None]]:
    rows = [row for row in results.heads if row["model"] == model]
    target = results.manifest["target_error"]
    yield (
        "error-by-features",
        "Output error against the number of features",
        "Lower is better; below the solid line is good enough. A map above the dotted line does worse than "
        "giving every value the same weight. A line that falls gains from more features; a flat one never "
        "will.",
        error_by_features(rows, target),
    )
    yield (
        "heads",
        "How the heads differ",
        "One row per head (h3 is head 3), the easiest on top. Each dot is the best of all maps that have at"
        " most so many features; the square is the plain random map at the largest width tried. Dots left "
        "of the solid line are heads that some map can replace.",
        heads(rows, target),
    )
    yield (
        "error-by-cost",
        "Output error against cost",
        "The thick grey step is the least error that so much arithmetic, or so much memory, buys. Right of "
        "the dashed line a map costs more than softmax attention over the longest sequence measured here.",
        error_by_cost(rows, target, softmax_cost(results, model)),
    )
    yield (
        "bias-and-variance",
        "Squared bias and variance of the output",
        "Medians over heads. Variance (hollow, dashed) goes away with more features or averaging over draws; "
        "squared bias (filled) stays however many draws are averaged. Their sum is the squared error. The "
        "estimate of the bias subtracts the variance's share, so it can come out at or below zero.",
        bias_and_variance(rows),
    )
    yield (
        "predicted-variance",
        "Relative variance of the kernel estimate: predicted and observed",
        "One point per head and width. Points far below the dashed line have a variance that the few draws "
        "here did not show, because it sits in rare projections that none of them met: trust the "
        "prediction. In the shaded part a single draw says next to nothing about most weights.",
        predicted_and_observed(rows, WORTHLESS),
    )
    seeds = [row for row in results.seeds if row["model"] == model]
    found = gradients(seeds, target)
    at = f" Random maps have {found[1]:,} features." if found and found[1] else ""
    yield (
        "gradients",
        "Error of the gradients",
        "Medians over heads, bars from quartile to quartile, for a random loss on the judged rows. Right of "
        "the dashed line the gradient is further off than a gradient of zeros: training through this map is "
        "not "
        f"training softmax.{at}",
        found[0] if found else None,
    )
    provenance: Any = results.manifest.get("input", {}).get("provenance", {})
    axes_of = provenance.get("axes", {}) if isinstance(provenance, dict) else {}
    if isinstance(axes_of, dict) and provenance.get("kind") == "synthetic":
        for which, about in (
            (
                "norm",
                "Larger norms make softmax sharper: every map gets worse as they grow, random ones fastest.",
            ),
            (
                "length",
                "Longer sequences have more keys to confuse; a flat line means that length does not matter.",
            ),
        ):
            yield (
                f"error-by-{which}",
                f"Output error against the {'input norm' if which == 'norm' else 'sequence length'}",
                f"{about} One line per map, medians over heads.",
                error_by_axis(rows, axes_of, which, target),
            )
