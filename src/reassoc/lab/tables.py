"""Results as CSV: the same numbers, the same bytes."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

from .._files import atomic_write
from .fidelity import Results, Row


def write_tables(results: Results, folder: Path) -> None:
    """Write ``results.csv`` (a row per seed), ``heads.csv`` (over seeds) and ``manifest.json``."""
    write_csv(folder / "results.csv", results.seeds)
    write_csv(folder / "heads.csv", results.heads)
    with atomic_write(folder / "manifest.json") as path:
        path.write_text(json.dumps(results.manifest, indent=2, sort_keys=True) + "\n")


def write_csv(path: Path, rows: list[Row]) -> None:
    """Six digits each: more would be noise of the last bits, which threads may order differently."""
    with atomic_write(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0] if rows else [])
        writer.writerows([[_cell(value) for value in row.values()] for row in rows])


def write_json(path: Path, value: Any) -> None:
    """As strict JSON: NaN and infinities, which it does not have, become text."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(_plain(value), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return "" if value is None else value
