"""Results as CSV and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..._files import atomic_write
from ..tables import write_csv
from .run import Results


def write_tables(results: Results, folder: Path, command: str) -> None:
    """Write ``bench.csv`` (contenders), ``ratios.csv`` (pairs) and ``bench.json`` (everything, every sample).

    Raises:
        OSError: the folder cannot be made or written; each file is whole or as it was before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "bench.csv", [{k: v for k, v in r.items() if k != "samples"} for r in results.rows])
    write_csv(folder / "ratios.csv", results.ratios)
    whole: dict[str, Any] = {"command": command, **results.manifest["key"]}
    whole |= {k: v for k, v in results.manifest.items() if k != "key"}
    whole |= {"ratios": results.ratios, "crossovers": results.crossovers, "rows": results.rows}
    with atomic_write(folder / "bench.json") as path:
        path.write_text(json.dumps(_plain(whole), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return str(value)
    return value
