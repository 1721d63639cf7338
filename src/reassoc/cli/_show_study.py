"""A study on a terminal: the answer, then its tables."""

from __future__ import annotations

import html
import re

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..lab._page import Raw
from ..lab._study import Section, Study


def show_study(study: Study) -> None:
    """Print the sentences of the answer and every table."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(study.title, style="bold", markup=False)
    for sentence in study.answer:
        console.print(f"- {sentence}", markup=False)
    for section in study.sections:
        if section.lines:
            console.print()
            console.print(section.title, style="bold", markup=False)
            _print(console, section)


def _print(console: Console, section: Section) -> None:
    heads = [column.title for column in section.heads]
    rows = [[_plain(cell) for cell in cells] for _, cells in section.lines]

    if _width(heads, rows) > console.width:
        heads = [title.replace(" ", "\n") for title in heads]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column, title in zip(section.heads, heads, strict=True):
        table.add_column(Text(title), justify="left" if column.words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    # No cell is cut: where a table is wider than the terminal, its lines go on in the next one.
    Console(width=max(_width(heads, rows), console.width), soft_wrap=True).print(table)


def _width(heads: list[str], rows: list[list[str]]) -> int:
    """Of the table: cells, a space after each, a border before each and at the end."""
    columns = zip(*([part.split("\n") for part in heads], *([[c] for c in row] for row in rows)), strict=True)
    return sum(max(cell_len(text) for cell in column for text in cell) + 2 for column in columns) + 1


def _plain(cell: object) -> str:
    """A cell of a page as text on one line."""
    text = html.unescape(re.sub(r"<[^>]*>", "", cell)) if isinstance(cell, Raw) else str(cell)
    return "".join(c if c.isprintable() else "?" for c in text)
