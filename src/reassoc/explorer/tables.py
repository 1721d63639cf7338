"""Queries, keys and values that a visitor typed: rows apart by ";", numbers by ","."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .._errors import InputError
from .controls import number, shown
from .presets import Preset, Rows

TABLES = ("q", "k", "v")
MOST = {"q": 8, "k": 16, "v": 16}
WIDEST = {"q": 4, "k": 4, "v": 3}
LARGEST = 1000.0


def tables(given: Mapping[str, str], preset: Preset) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers in the parameters, else those of the preset.

    Returns:
        Queries ``(1, 1, Q, d)``, keys ``(1, 1, n, d)`` and values ``(1, 1, n, e)``, float64.

    Raises:
        InputError: parameters that cannot be read, are too many, or do not fit together.
    """
    missing = [name for name in TABLES if not given.get(name)]
    if missing and len(missing) < len(TABLES):
        raise InputError(f"q, k and v go together; missing: {', '.join(missing)}")
    if missing:
        rows = [preset.query, preset.key, preset.value]
    else:
        rows = [_rows(name, given[name]) for name in TABLES]
    if len(rows[1]) != len(rows[2]):
        raise InputError(f"k and v must have as many rows: got {len(rows[1])} keys, {len(rows[2])} values")
    if len(rows[0][0]) != len(rows[1][0]):
        raise InputError(f"q and k must have rows of one size, got {len(rows[0][0])} and {len(rows[1][0])}")
    query, key, value = (torch.tensor(some, dtype=torch.float64)[None, None] for some in rows)
    return query, key, value


def _rows(name: str, text: str) -> Rows:
    lines = text.split(";") if text.count(";") < MOST[name] else ()
    if not lines:
        raise InputError(f"{name}: at most {MOST[name]} rows, got {text.count(';') + 1:,}")
    found = []
    for line in lines:
        if line.count(",") >= WIDEST[name]:
            raise InputError(f"{name}: rows of at most {WIDEST[name]} numbers, got {line.count(',') + 1:,}")
        found.append(tuple(number(name, part.strip()) for part in line.split(",")))
    if len({len(row) for row in found}) > 1:
        raise InputError(f"{name}: all rows must have the same size, got {shown(text)}")
    if largest := max((abs(x) for row in found for x in row if abs(x) > LARGEST), default=None):
        raise InputError(f"{name}: numbers must lie between -{LARGEST:g} and {LARGEST:g}, got {largest:g}")
    return tuple(found)
