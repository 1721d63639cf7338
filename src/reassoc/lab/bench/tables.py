"""Results as CSV and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..tables import write_csv, write_json
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
    write_json(folder / "bench.json", whole)
