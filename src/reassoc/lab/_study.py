"""What every study writes: tables, a manifest, figures and a page that explains itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ._page import Column, Raw, escape, page, table, tag, write_page
from ._plot import inline_svg
from .fidelity import Row
from .figures import Plot, write_plots
from .tables import write_csv, write_json


class Section(NamedTuple):
    """A part of the page: a heading, a paragraph and a table; text and table may be empty.

    ``heads`` and ``lines`` are as :func:`._page.table` takes them: a line is the class of its row
    (``"chosen"``, ``"reference"`` or ``""``) and its cells.
    """

    title: str
    text: str
    heads: Sequence[Column] = ()
    lines: Sequence[tuple[str, Sequence[object]]] = ()


@dataclass(frozen=True)
class Study:
    """Everything that an experiment found and what there is to say about it.

    Attributes:
        name: one lower-case word, of the command and of the files. title: the headline, a question or a
            sentence. lead: what was done, one paragraph. answer: sentences, the result first.
        rows: the numbers, every row with the same columns. manifest: settings, versions, machine.
        sections, figures: in the order of the page. definitions: terms and what they mean.
        limits: what the numbers do not tell. more: further tables, by the name of their file: times, which
            never repeat, belong there, so that the other files and the page do.
    """

    name: str
    title: str
    lead: str
    answer: list[str]
    rows: list[Row]
    manifest: dict[str, Any]
    sections: list[Section]
    figures: list[Plot]
    definitions: Sequence[tuple[str, str]]
    limits: Sequence[str]
    more: dict[str, list[Row]] = field(default_factory=dict)


def write_study(study: Study, folder: Path, command: str) -> Path:
    """Write ``NAME.csv``, further tables, ``NAME.json``, ``figures/`` and ``report.html``.

    Everything is rendered before the first file is touched, and each file is replaced whole: a failure
    leaves the earlier results. The same study gives the same bytes.

    Args:
        study: what to write. folder: made if missing. command: how to repeat it.

    Returns:
        The path of the report.

    Raises:
        OSError: the folder cannot be made or written.
    """
    text = render(study, command)
    folder.mkdir(parents=True, exist_ok=True)
    write_plots(study.figures, folder)
    for name, rows in {study.name: study.rows, **study.more}.items():
        write_csv(folder / f"{name}.csv", rows)
    whole = {"command": command, **study.manifest, "answer": study.answer, "rows": study.rows}
    write_json(folder / f"{study.name}.json", whole)
    return write_page(text, folder)


def render(study: Study, command: str) -> str:
    """The page as text; every string of the study is escaped."""
    links = [("answer", "Answer"), *([("figures", "Figures")] if study.figures else [])]
    links += [(f"part{index}", section.title) for index, section in enumerate(study.sections)]
    links += [("words", "Definitions"), ("limits", "Limits"), ("repeat", "Repeat it")]
    body = [
        tag("h1", study.title),
        tag("p", study.lead, class_="lead"),
        tag("nav", *(tag("a", text, href=f"#{anchor}") for anchor, text in links)),
        tag("h2", "The answer", id="answer"),
        tag(
            "section",
            tag("p", study.answer[0], class_="verdict"),
            tag("ul", *(tag("li", sentence) for sentence in study.answer[1:])),
            class_="answer yes",
        ),
    ]
    if study.figures:
        body += [tag("h2", "Figures", id="figures"), tag("div", *_figures(study.figures), class_="figures")]
    for index, section in enumerate(study.sections):
        body.append(tag("h2", section.title, id=f"part{index}"))
        body += [tag("p", section.text)] if section.text else []
        body += [table(section.heads, section.lines)] if section.lines else []
    body += [
        tag("h2", "What the words and columns mean", id="words"),
        tag("dl", *_pairs(study.definitions)),
        tag("h2", "What this does not tell", id="limits"),
        tag("ul", *(tag("li", text) for text in study.limits)),
        tag("h2", "How to repeat it", id="repeat"),
        tag("pre", tag("code", command), tabindex="0"),
        tag("dl", *_pairs(_facts(study))),
    ]
    return page(study.title, body)


def _figures(figures: list[Plot]) -> Iterator[Raw]:
    for index, plot in enumerate(figures):
        title = f"{plot.title}: {plot.model}" if plot.model else plot.title
        svg = Raw(inline_svg(plot.svg.decode(), f"f{index}-", escape(title)))
        yield tag("figure", tag("h4", title), svg, tag("figcaption", plot.caption))


def _pairs(facts: Sequence[tuple[str, str]]) -> Iterator[Raw]:
    for term, text in facts:
        yield tag("dt", term)
        yield tag("dd", text)


def _facts(study: Study) -> list[tuple[str, str]]:
    found = []
    for key in ("versions", "machine"):
        if about := study.manifest.get(key):
            found.append((key.capitalize(), ", ".join(f"{name} {value}" for name, value in about.items())))
    tables = ", ".join(f"{name}.csv" for name in (study.name, *study.more))
    files = f"{tables}, {study.name}.json (how, answer and numbers), figures/ (every figure as PNG and SVG)."
    return [*found, ("Files beside this one", files)]
