"""The fidelity report: one HTML file that explains itself to someone who did not run it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ._page import (
    Raw,
    columns,
    count,
    details,
    error_in,
    escape,
    lengths,
    many,
    number,
    page,
    table,
    tag,
    write_page,
)  # fmt: skip
from ._plot import inline_svg
from ._report_text import BESIDE, DEFINITIONS, LIMITS
from ._series import grouped, quartiles
from .answer import WORTHLESS, Answer, Line, answers, title
from .candidates import MEAN
from .fidelity import Results, Row
from .figures import Plot, plots, softmax_cost

_ANSWER_COLUMNS = columns(
    "<map, features, median error, best head, worst head, heads within target, operations per token, "
    "break-even tokens, state bytes, predicted variance"
)
# Column of results.csv, heading, whether the smallest over heads and seeds says more than the median.
_MORE = (
    ("query_gradient_error", "query gradient error", False),
    ("key_gradient_error", "key gradient error", False),
    ("value_gradient_error", "value gradient error", False), ("kl_divergence", "KL divergence", False),
    ("kl_undefined_row_share", "rows without KL", False),
    ("total_variation", "total variation", False), ("negative_weight_share", "negative weights", False),
    ("undefined_row_share", "undefined rows", False), ("smallest_denominator", "smallest denominator", True),
    ("smallest_mass_ratio", "smallest mass ratio", True), ("effective_features", "effective features", False),
)  # fmt: skip


def write_report(results: Results, folder: Path, command: str, figures: list[Plot] | None = None) -> Path:
    """Write ``report.html``: self-contained, and the same bytes for the same results.

    Args:
        results: of :func:`reassoc.lab.fidelity`. folder: to write into, made if missing.
        command: how to repeat it. figures: of :func:`.figures.write_figures`, else drawn anew.

    Returns:
        The path of the report.

    Raises:
        OSError: the folder cannot be made or written; an earlier report is then as it was.
    """
    return write_page(render(results, command, plots(results) if figures is None else figures), folder)


def render(results: Results, command: str, figures: list[Plot]) -> str:
    """The page as text; every string of the results is escaped."""
    found = answers(results)
    name = results.manifest["input"]["name"]
    headline = f"How close do these kernels come to softmax on “{name}”?"
    body = [
        tag("h1", headline),
        *_lead(results),
        _contents(found),
        tag("h2", "The answer", id="answer"),
        *(_answer(answer) for answer in found),
    ]
    for index, answer in enumerate(found):
        body += _model(results, answer, index, [plot for plot in figures if plot.model == answer.model])
    body += [
        tag("h2", "What the words and columns mean", id="words"),
        tag("dl", *(part for term, text in DEFINITIONS for part in (tag("dt", term), tag("dd", text)))),
        tag("h2", "What this does not tell", id="limits"),
        tag("ul", *(tag("li", text) for text in LIMITS)),
        tag("h2", "How to repeat it", id="repeat"),
        *_repeat(results, command),
    ]
    return page(headline, body)


def _lead(results: Results) -> list[Raw]:
    manifest = results.manifest
    models = list(dict.fromkeys(row["model"] for row in results.heads))
    heads = len({(row["site"], row["head"]) for row in results.heads})
    maps = len({row["map"] for row in results.heads} - {MEAN})
    target = manifest["target_error"]
    return [
        tag(
            "p",
            f"Kernel (linear) attention with {many(maps, 'feature map')} was compared with softmax "
            f"attention on the same queries, keys and values: {many(heads, 'head')} of "
            f"{' and '.join(models)}. An error of 0 means the same outputs as softmax, 1 means as far off as "
            f"outputs of zero; at most {target:g} is the target asked for.",
            class_="lead",
        )
    ]


def _contents(found: list[Answer]) -> Raw:
    links = [("answer", "Answer")] + [(f"model{i}", answer.model) for i, answer in enumerate(found)]
    links += [("words", "Definitions"), ("limits", "Limits"), ("repeat", "Repeat it")]
    return tag("nav", *(tag("a", text, href=f"#{anchor}") for anchor, text in links))


def _answer(answer: Answer) -> Raw:
    verdict = "None of these will do" if answer.choice is None else f"Choose {title(answer.choice)} features"
    # The heading names the model, so its sentences need not.
    sentences = [sentence.removeprefix(f"{answer.model}: ") for sentence in answer.sentences]
    return tag(
        "section",
        tag("h3", answer.model),
        tag("p", verdict, class_="verdict"),
        tag("ul", *(tag("li", s[:1].upper() + s[1:] if n == 0 else s) for n, s in enumerate(sentences))),
        class_="answer" if answer.choice is None else "answer yes",
    )


def _model(results: Results, answer: Answer, index: int, figures: list[Plot]) -> list[Raw]:
    softmax = softmax_cost(results, answer.model)
    target = results.manifest["target_error"]
    lines = [_line(line, answer, target, softmax) for line in answer.lines]
    seeds = [row for row in results.seeds if row["model"] == answer.model]
    heads = [row for row in results.heads if row["model"] == answer.model]
    parts = [
        tag("h2", answer.model, id=f"model{index}"),
        tag("h3", f"Every map over {many(len(answer.per_head), 'head')}, cheapest first"),
        table(_ANSWER_COLUMNS, lines),
        details("Every head: the cheapest map within the target", _per_head(answer, heads, target)),
        details("More measures: gradients, weights, denominators", _more(seeds)),
    ]
    drawn = []
    for number_, plot in enumerate(figures):
        prefix = f"m{index}f{number_}-"
        svg = Raw(inline_svg(plot.svg.decode(), prefix, escape(f"{plot.title}: {answer.model}")))
        drawn.append(tag("figure", tag("h4", plot.title), svg, tag("figcaption", plot.caption)))
    parts.append(tag("h3", "Figures"))
    parts.append(tag("div", *drawn, class_="figures") if drawn else tag("p", "No numbers to draw."))
    if not any(plot.name.startswith("bias-") for plot in figures):
        parts.append(tag("p", "Bias and variance need random maps and at least two seeds.", class_="small"))
    return parts


def _line(
    line: Line, answer: Answer, target: float, softmax: tuple[int, float, float] | None
) -> tuple[str, list[object]]:
    variance: object = number(line.predicted_variance)
    if line.predicted_variance is not None and line.predicted_variance > WORTHLESS:
        variance = Raw(f"{escape(variance)} {tag('span', 'worthless', class_='warn')}")
    tokens = "–" if softmax is None else count(line.operations / softmax[1] * softmax[0])
    name: object = "mean of the values" if line.map == MEAN else line.map
    row = "chosen" if line == answer.choice else "reference" if line.map == MEAN else ""
    return row, [
        name, count(line.features), *(error_in(e, target) for e in (line.median, line.best, line.worst)),
        f"{line.within} of {line.heads}", count(line.operations), tokens, count(line.state_bytes), variance,
    ]  # fmt: skip


def _per_head(answer: Answer, rows: list[Row], target: float) -> Raw:
    best: dict[tuple[str, int], Row] = {}
    mean: dict[tuple[str, int], float] = {}
    for row in rows:
        key, error = (row["site"], row["head"]), row["output_error"]
        if row["map"] == MEAN:
            mean[key] = error
        elif error == error and (key not in best or error < best[key]["output_error"]):
            best[key] = row
    lines: list[tuple[str, list[object]]] = []
    for key, found in answer.per_head.items():
        least = best.get(key)
        chosen: object = tag("span", "none: train or keep softmax", class_="warn")
        if found is not None:
            chosen = tag("span", f"{found[0]} at {found[1]:,}", class_="ok")
        with_map = "–" if least is None else f"{least['map']} at {least['features']:,}"
        error = error_in(math.nan if least is None else least["output_error"], target)
        lines.append(("", [key[0], str(key[1]), chosen, error, with_map, number(mean.get(key))]))
    heads = "<site, head, <cheapest map within the target, least error, <of map, mean of the values"
    return table(columns(heads), lines)


def _more(rows: list[Row]) -> Raw:
    heads = columns(", ".join(["<map", "features", *(heading for _, heading, _ in _MORE)]))
    values = {name: grouped(rows, name) for name, _, _ in _MORE}
    lines: list[tuple[str, list[object]]] = []
    for name, widths in values[_MORE[0][0]].items():
        for features in widths:
            cells: list[object] = [name, count(features)]
            for column, _, smallest in _MORE:
                found = [v for v in values[column][name][features] if v == v]
                middle = quartiles(found)
                cells.append(number(None if middle is None else min(found) if smallest else middle[1]))
            lines.append(("reference" if name == MEAN else "", cells))
    note = "Medians over heads and seeds; of denominators and mass ratios the smallest."
    return Raw(tag("p", note, class_="small") + table(heads, lines))


def _repeat(results: Results, command: str) -> list[Raw]:
    manifest = results.manifest
    source: dict[str, Any] = manifest["input"]
    versions = ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())
    facts = (
        ("Versions", versions),
        ("Seeds of random maps", ", ".join(map(str, manifest.get("seeds", [])))),
        ("Input", f"{source['name']}, sha256 {source['sha256']}"),
        ("Target", f"relative output error at most {manifest['target_error']:g}"),
        ("Files beside this one", BESIDE),
    )
    about = json.dumps(source.get("provenance"), indent=2, sort_keys=True, default=str, ensure_ascii=False)
    sites = [
        (
            "",
            [
                name,
                s["model"],
                "–" if s["layer"] is None else str(s["layer"]),
                "yes" if s["causal"] else "no",
                ", ".join(map(str, s["query_heads"])),
                lengths(s["sequence_lengths"]),
                str(s["head_size"]),
            ],
        )
        for name, s in manifest.get("sites", {}).items()
    ]
    heads = columns("<site, <model, layer, <causal, <query heads, <tokens, head size")
    return [
        tag("pre", tag("code", command), tabindex="0"),
        tag("dl", *(part for term, text in facts for part in (tag("dt", term), tag("dd", text)))),
        details("What was measured: sites and heads", table(heads, sites)),
        details("Where the input comes from", tag("pre", tag("code", about), tabindex="0")),
    ]
