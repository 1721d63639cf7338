"""The capacity report: what a memory of r features holds, beside what was published."""

from __future__ import annotations

from .._page import columns, count, number, tag
from .._study import Section, Study
from .answer import answer, loss_of, points, solved
from .figures import plots
from .run import Results
from .train import STOPS
from .words import DEFINITIONS, LIMITS

_MOST_LINES = 200  # of the closed form; a file may have many heads


def study(results: Results) -> Study:
    """Everything there is to write and to show."""
    dim = results.manifest["dim"]
    parts = []
    if results.closed:
        source = results.manifest.get("keys", {}).get("name", "made keys: orthogonal, Gaussian, clustered")
        parts.append(f"Signal and crosstalk in closed form ({source}).")
    if results.runs:
        parts.append(
            f"Synthetic retrieval of Schlag et al. 2021, keys of size {dim}: one layer of attention is "
            "trained to store pairs of a key and a value and to give back the value of one key."
        )
    sections = [part for part in (_setting(results, 1), _setting(results, 2), _closed(results)) if part]
    return Study(
        name="capacity", title="How many pairs can a linear attention memory keep apart?",
        lead=" ".join(parts), answer=answer(results), rows=results.runs,
        manifest=results.manifest, sections=sections, figures=plots(results), definitions=DEFINITIONS,
        limits=LIMITS, more={"closed": results.closed, "curves": results.curves, "times": results.times},
    )  # fmt: skip


def _setting(results: Results, setting: int) -> Section | None:
    found = points(results, setting)
    if not found:
        return None
    last = "floor" if setting == 1 else "loss on 2N"
    lines: list[tuple[str, list[object]]] = []
    for case, by_pairs in found.items():
        for pairs, rows in by_pairs.items():
            losses = [row["loss"] for row in rows]
            loss = number(loss_of(rows), 3)
            if len(rows) > 1:
                loss += f" ({number(min(losses), 3)} to {number(max(losses), 3)})"
            extra = rows[0]["floor"] if setting == 1 else sum(r["long_loss"] for r in rows) / len(rows)
            ended = list(dict.fromkeys(row["ended"] for row in rows))
            bad = {STOPS["limit"], STOPS["diverged"]} & set(ended)
            how: object = ", ".join(ended)
            lines.append(
                (
                    "chosen" if solved(rows) else "",
                    [
                        case, count(rows[0]["features"]), count(pairs), loss, number(rows[0]["published"], 3),
                        number(extra, 3), " / ".join(f"{row['steps']:,}" for row in rows),
                        tag("span", how, class_="warn") if bad else how,
                    ],
                )
            )  # fmt: skip
    heads = columns(f"<model, features, pairs, loss, published, {last}, steps, <ended")
    text = {
        1: "Every key once, sequences of N pairs. Marked: solved, loss at most 0.001.",
        2: "Sequences of 2N pairs drawn with replacement. Marked: solved, loss at most 0.001.",
    }[setting]
    return Section(f"Setting {setting}", text, heads, lines)


def _closed(results: Results) -> Section | None:
    rows = results.closed
    if not rows:
        return None
    text = "Each key reads its own value after all were written once, in order."
    made = "keys" not in results.manifest
    if made:
        shown = max((n for n in {r["pairs"] for r in rows} if n <= results.manifest["dim"]), default=None)
        rows = [row for row in rows if row["pairs"] == (rows[0]["pairs"] if shown is None else shown)]
        text += f" {rows[0]['pairs']:,} keys; closed.csv has all numbers."
    if len(rows) > _MOST_LINES:
        text += f" The first {_MOST_LINES} of {len(rows):,} lines; closed.csv has all."
    known = any(row["value_error"] is not None for row in rows)
    heads = columns(
        ("<keys" if made else "<keys, head, keys N")
        + ", <model, rank, bound, signal, crosstalk, ratio, error, least error, after 64 passes, "
        "exact writes, exact after 64" + (", error of the file's values" if known else "")
    )
    names = ["bound", "signal", "crosstalk", "ratio", "error", "least_error", "error_passes", "exact_error"]
    names += ["exact_error_passes", *(["value_error"] if known else [])]
    lines: list[tuple[str, list[object]]] = []
    for row in rows[:_MOST_LINES]:
        cells: list[object] = [row["keys"], *([] if made else [str(row["head"]), count(row["pairs"])])]
        cells += [row["case"], count(row["rank"]), *(number(row[name]) for name in names)]
        lines.append(("", cells))
    return Section("Closed form", text, heads, lines)
