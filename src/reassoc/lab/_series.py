"""Numbers of a sweep for figures and tables: grouped, summarized without NaN, written short."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .candidates import Candidate
from .fidelity import Row


def quartiles(values: Iterable[float]) -> tuple[float, float, float] | None:
    """Lower quartile, median and upper quartile without NaN; ``None`` if nothing is left."""
    ordered = sorted(v for v in values if v == v)
    if not ordered:
        return None

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
        # Between a number and infinity lies infinity: infinity minus infinity would be NaN.
        return high if low == high or math.isinf(high) else low + (high - low) * (position % 1)

    return at(0.25), at(0.5), at(0.75)


def grouped(rows: list[Row], column: str) -> dict[str, dict[int, list[float]]]:
    """Map -> features -> the column's value of each row, in the order of the rows; features ascending."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        found.setdefault(row["map"], {}).setdefault(row["features"], []).append(float(row[column]))
    return {name: dict(sorted(widths.items())) for name, widths in found.items()}


def is_random(name: str) -> bool:
    """Whether a map has widths and seeds."""
    return Candidate(name, None).random


def common_widths(rows: list[Row]) -> list[int]:
    """The numbers of features that most random maps have, ascending: where they can be compared."""
    having: dict[int, set[str]] = {}
    for row in rows:
        if is_random(row["map"]):
            having.setdefault(row["features"], set()).add(row["map"])
    most = max((len(maps) for maps in having.values()), default=0)
    return sorted(width for width, maps in having.items() if len(maps) == most)


def at_width(rows: list[Row], width: int) -> list[Row]:
    """Maps of one size as they are, and of each other map its largest size up to ``width``."""
    largest: dict[str, int] = {}
    for row in rows:
        if row["features"] <= width:
            largest[row["map"]] = max(largest.get(row["map"], 0), row["features"])
    return [r for r in rows if not is_random(r["map"]) or r["features"] == largest.get(r["map"])]


def spaced(values: list[int]) -> list[int]:
    """Values at least a third apart, the larger ones kept: as many labels as an axis can hold."""
    kept: list[int] = []
    for value in sorted(values, reverse=True):
        if not kept or value * 1.33 <= kept[-1]:
            kept.append(value)
    return kept[::-1]


def tick(value: float) -> str:
    """A number on an axis: plain where it is short, a power of ten where it is not."""
    if value and not 1e-3 <= abs(value) < 1e4:
        exponent = math.floor(math.log10(abs(value)) + 1e-9)
        digits = f"{value / 10.0**exponent:.2g}"
        power = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return power if digits == "1" else f"{digits}×{power}"
    return f"{value:,g}"


def amount(value: float) -> str:
    """A large count on an axis: 20k, 1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.4g}{unit}"
    return f"{value:g}"


def short(text: str, limit: int = 26) -> str:
    """A name for a label: on one line, without control characters, cut in the middle."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit - limit // 2 - 1) :]}"
