"""The benchmark report: one HTML file with what was fast, how it was judged, what was not measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._page import Raw, columns, count, details, escape, number, page, table, tag, write_page
from .._plot import inline_svg
from ..figures import Plot
from .figures import plots, way
from .ratios import MEASURED, WRONG, Row, crossover_text
from .run import Results
from .words import DEFINITIONS, LIMITS, ratio_text, unrest

_BESIDE = (
    "bench.csv (a row per contender), ratios.csv (per pair), bench.json (everything, every sample), and "
    "figures/ with every figure as PNG and SVG."
)


def write_report(results: Results, folder: Path, command: str, figures: list[Plot] | None = None) -> Path:
    """Write ``report.html``, which needs no other file; return its path.

    Raises:
        OSError: the folder cannot be made or written; an earlier report is then as it was.
    """
    return write_page(render(results, command, plots(results) if figures is None else figures), folder)


def render(results: Results, command: str, figures: list[Plot]) -> str:
    """The page as text; every string of the results is escaped."""
    key = results.manifest["key"]
    settings = key["settings"]
    machine = key["machine"]
    headline = "How fast is linear attention on this machine?"
    lead = (
        f"{machine['processor']}, {settings['threads']} of {machine['cores']} cores, {settings['dtype']}, "
        f"batch {settings['batch']}, {settings['heads']} heads of size {settings['head_dim']}, values "
        f"{settings['value_dim']}, {'causal' if settings['causal'] else 'not causal'}. Every result was "
        f"compared with float64 before it was timed; {settings['repeats']} rounds in turns, medians."
    )
    links = [("ratios", "Ratios"), ("figures", "Figures"), ("times", "Times"), ("memory", "Memory")]
    links += [
        ("missing", "Not measured"),
        ("words", "Definitions"),
        ("limits", "Limits"),
        ("repeat", "Repeat it"),
    ]
    body = [
        tag("h1", headline),
        tag("p", lead, class_="lead"),
        *([tag("p", tag("span", busy, class_="warn"))] if (busy := unrest(results.rows)) else []),
        tag("nav", *(tag("a", text, href=f"#{anchor}") for anchor, text in links)),
        tag("h2", "Ratios: how many times longer the others take", id="ratios"),
        tag(
            "p",
            "The other's time divided by ours; above 1 ours is faster. In brackets the quartiles.",
            class_="small",
        ),
        *(_ratios(results, direction) for direction in settings["directions"]),
        tag("h2", "Figures", id="figures"),
        tag("div", *_figures(figures), class_="figures") if figures else tag("p", "No numbers to draw."),
        tag("h2", "Times, and shares of what the machine can do", id="times"),
        tag("p", _ceilings(results)),
        *(_times(results, direction) for direction in settings["directions"]),
        tag("h2", "Memory", id="memory"),
        _memory(results),
        tag("h2", "Not measured", id="missing"),
        _missing(results),
        tag("h2", "What the words and columns mean", id="words"),
        tag("dl", *(part for term, text in DEFINITIONS for part in (tag("dt", term), tag("dd", text)))),
        tag("h2", "What this does not tell", id="limits"),
        tag("ul", *(tag("li", text) for text in LIMITS)),
        tag("h2", "How to repeat it", id="repeat"),
        *_repeat(results, command),
    ]
    return page(headline, body)


def _ratios(results: Results, direction: str) -> Raw:
    lengths = results.manifest["key"]["settings"]["lengths"]
    groups: dict[tuple[str, str], dict[int, Row]] = {}
    for row in results.ratios:
        if row["direction"] == direction:
            groups.setdefault((row["ours"], row["other"]), {})[row["length"]] = row
    crossing = {(r["ours"], r["other"]): r for r in results.crossovers if r["direction"] == direction}
    heads = columns("<ours, <other, " + ", ".join(map(str, lengths)) + ", <ours is never slower")
    lines: list[tuple[str, list[object]]] = []
    for pair, by_length in groups.items():
        cells: list[object] = [*pair]
        for length in lengths:
            found = by_length.get(length)
            text: object = "–" if found is None else ratio_text(found)
            wrong = found is not None and found["status"] == WRONG
            cells.append(tag("span", text, class_="warn") if wrong else text)
        cells.append(crossover_text(crossing[pair]) if pair in crossing else "–")
        lines.append(("", cells))
    if not lines:
        return Raw("")
    return Raw(tag("h3", way(direction)) + table(heads, lines))


def _figures(figures: list[Plot]) -> Iterator[Raw]:
    for index, plot in enumerate(figures):
        label = escape(f"{plot.title}: {plot.model}")
        svg = Raw(inline_svg(plot.svg.decode(), f"f{index}-", label))
        yield tag("figure", tag("h4", f"{plot.title}: {plot.model}"), svg, tag("figcaption", plot.caption))


def _ceilings(results: Results) -> str:
    found = results.manifest["ceilings"]
    return (
        f"Ceilings with these threads: {found['flops'] / 1e9:,.0f} GFLOP/s ({found['flops_from']}); "
        f"{found['bytes'] / 1e9:,.1f} GB/s copied, reads and writes counted. A call with fewer than "
        f"{found['flops'] / found['bytes']:.0f} operations per byte cannot reach the first."
    )


def _times(results: Results, direction: str) -> Raw:
    heads = columns(
        "<contender, length, milliseconds, quartiles, GFLOP, operations per byte, <limit, "
        "share of multiply-adds, share of limit, error, allowed"
    )
    lines: list[tuple[str, list[object]]] = []
    for row in results.rows:
        if row["direction"] != direction:
            continue
        cells: list[object] = [row["contender"], count(row["length"])]
        if row["status"] == MEASURED:
            spread = f"{number(1e3 * row['lower'], 3)} to {number(1e3 * row['upper'], 3)}"
            cells += [
                number(1e3 * row["seconds"], 3), spread, number(row["flops"] / 1e9), number(row["intensity"]),
                row["limit"], f"{100 * row['share']:.1f} %", f"{100 * row['share_of_limit']:.1f} %",
            ]  # fmt: skip
        else:
            what = "wrong" if row["status"] == WRONG else "not measured"
            cells += [tag("span", what, class_="warn"), *["–"] * 6]
        lines.append(("", [*cells, number(row["error"]), number(row["budget"])]))
    return details(f"Every time: {way(direction)}", table(heads, lines)) if lines else Raw("")


def _memory(results: Results) -> Raw:
    lines: list[tuple[str, list[object]]] = []
    for row in results.rows:
        what: Any = None
        if row["direction"] == "step" and row["held"]:
            what, size = "kept between steps", row["held"]
        elif row["memory"] is not None:
            what, size = f"peak beyond inputs and results, {way(row['direction'])}", row["memory"]
        if what is not None:
            lines.append(("", [row["contender"], what, count(row["length"]), f"{size / 1e6:,.2f}"]))
    heads = columns("<contender, <what, length, megabytes")
    why = results.manifest["memory"]
    note = tag("p", why, class_="small") if why else Raw("")
    return Raw(note + (table(heads, lines) if lines else tag("p", "Not measured.")))


def _missing(results: Results) -> Raw:
    peers = results.manifest["key"]["peers"]
    lines = [f"{name}: {about}" for name, about in peers.items() if not about[-1:].isdigit()]
    lines += [
        f"{row['contender']}, {way(row['direction'])}, {row['length']:,}: {row['reason']}"
        for row in results.rows
        if row["status"] != MEASURED
    ]
    return tag("ul", *(tag("li", line) for line in lines)) if lines else tag("p", "Nothing was left out.")


def _repeat(results: Results, command: str) -> list[Raw]:
    key = results.manifest["key"]
    versions = key["versions"] | {n: v for n, v in key["peers"].items() if v[-1:].isdigit()}
    facts = (
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Machine", ", ".join(f"{name} {value}" for name, value in key["machine"].items())),
        ("Files beside this one", _BESIDE),
    )
    return [
        tag("pre", tag("code", command), tabindex="0"),
        tag("dl", *(part for term, text in facts for part in (tag("dt", term), tag("dd", text)))),
    ]
