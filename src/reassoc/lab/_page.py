"""Small pieces of an HTML page: everything that goes in is escaped, numbers are short."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from .._files import atomic_write
from ._series import tick


class Raw(str):
    """Text that is HTML already: every other string is escaped."""


class Column(NamedTuple):
    """A table column: its heading and whether it holds words (left) or numbers (right)."""

    title: str
    words: bool = False


def columns(text: str) -> list[Column]:
    """Headings separated by commas, those of words marked ``<``."""
    return [Column(part.removeprefix("<"), part.startswith("<")) for part in text.split(", ")]


def page(title: str, body: Sequence[object]) -> str:
    """A whole page that needs no other file."""
    style = resources.files(__package__).joinpath("_report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{tag('title', title)}\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(escape(part) for part in body)
        + "\n</main>\n</body>\n</html>\n"
    )


def write_page(text: str, folder: Path) -> Path:
    """Write ``report.html`` into a folder, made if missing; an earlier one is replaced whole or stays."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "report.html") as path:
        path.write_bytes(text.encode())
    return folder / "report.html"


def escape(text: object) -> Raw:
    """Anything as text of a page, quotes included; HTML from :class:`Raw` passes."""
    if isinstance(text, Raw):
        return text
    # Lone surrogates come out of JSON and cannot be written as UTF-8.
    safe = str(text).encode("utf-8", "replace").decode("utf-8").replace("\0", "�")
    return Raw(html.escape(safe, quote=True))


def tag(name: str, *content: object, **attributes: str) -> Raw:
    """An element; ``class_`` becomes ``class``."""
    inside = "".join(escape(part) for part in content)
    pairs = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items() if value)
    return Raw(f"<{name}{pairs}>{inside}</{name}>")


def table(heads: Sequence[Column], rows: Iterable[tuple[str, Sequence[object]]]) -> Raw:
    """A table in a box that scrolls by itself.

    Args:
        heads: headings. rows: (class of the row, cells); the first cell heads its row.
    """

    def cells(row: Sequence[object], head: str, rest: str) -> Iterable[Raw]:
        for index, (column, cell) in enumerate(zip(heads, row, strict=True)):
            scope = "" if rest == "td" and index else ("row" if rest == "td" else "col")
            name = head if index == 0 else rest
            yield tag(name, cell, class_="text" if column.words else "", scope=scope)

    top = tag("thead", tag("tr", *cells([c.title for c in heads], "th", "th")))
    body = tag("tbody", *(tag("tr", *cells(row, "th", "td"), class_=name) for name, row in rows))
    # tabindex: a box that scrolls must be reachable by keyboard.
    return tag("div", tag("table", top, body), class_="scroll", tabindex="0")


def details(summary: str, *content: object) -> Raw:
    """Content that opens on a click."""
    return tag("details", tag("summary", summary), *content)


def number(value: float | None, digits: int = 2) -> str:
    """A measured number: two digits, a power of ten where that is shorter, a dash where there is none."""
    if value is None or value != value:
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    rounded = float(f"{value:.{digits}g}")
    # Trailing zeros say how exact a number is and keep a column of them aligned.
    plain = f"{value:#.{digits}g}" if 1e-3 <= abs(rounded) < 10 ** (digits - 1) else tick(rounded)
    return plain.replace("-", "−").replace("×", " × ")


def count(value: float | None) -> str:
    """A whole number with thousands separated, a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{round(value):,}"


def error_in(value: float, target: float) -> str:
    """As :func:`number`, with more digits where two would put it on the wrong side of the target."""
    for digits in (2, 3, 4):
        if (float(f"{value:.{digits}g}") <= target) == (value <= target):
            break
    return number(value, digits)


def lengths(found: list[int]) -> str:
    """Lengths of sequences, in few words."""
    if len(set(found)) == 1 and len(found) > 1:
        return f"{len(found)} × {found[0]:,}"
    return ", ".join(f"{n:,}" for n in found[:6]) + (" …" if len(found) > 6 else "")


def many(n: int, what: str) -> str:
    """``1 head``, ``2 heads``."""
    return f"{n:,} {what}" + ("" if n == 1 else "s")
