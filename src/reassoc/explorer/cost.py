"""Panel "Cost": steps, multiply-adds and numbers kept, counted; and times that were measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from .._errors import InputError
from .controls import Control, numbers, settle

_LENGTHS = tuple(2**power for power in range(4, 21))
_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
CONTROLS: tuple[Control, ...] = (
    numbers("n", "Tokens n", _LENGTHS, 1024, _LENGTHS[::2]),
    numbers("r", "Features r", _SIZES, 64, (16, 64, 256)),
    numbers("e", "Value size e", _SIZES, 64, (16, 64, 256)),
)
LINES = ("pairs", "passes", "quadratic", "linear")
DIRECTION = "forward"


def cost(given: Mapping[str, str]) -> dict[str, Any]:
    """Counts for n queries and n keys with r features and values of size e, and along n.

    Returns:
        ``counts`` at n, ``ratios`` of rescan to state; ``lines``: for each length ``n`` its counts;
        ``crossover``, the n above which the state takes fewer multiply-adds.

    Raises:
        InputError: see :func:`.controls.settle`.
    """
    n, r, e = (int(value) for value in settle(CONTROLS, given).values())
    here = counts(n, r, e)
    return {
        "counts": here,
        "ratios": {
            "steps": here["pairs"] / here["passes"],
            "arithmetic": here["quadratic"] / here["linear"],
            "memory": here["scores"] / here["state"],
        },
        "lines": [{"n": length} | counts(length, r, e) for length in _LENGTHS],
        # n^2 (r + e) = 2 n r (e + 1)
        "crossover": 2 * r * (e + 1) / (r + e),
    }


def counts(n: int, r: int, e: int) -> dict[str, int]:
    """What the two ways take, not causal.

    ``pairs``: scores when every query rescans every key. ``passes``: steps when keys are written once and
    each query reads once. ``quadratic`` and ``linear``: multiply-adds of these, ``n^2 (r + e)`` and
    ``2 n r (e + 1)``: z is one more column of S. ``scores`` and ``state``: numbers kept.
    """
    return {
        "pairs": n * n,
        "passes": 2 * n,
        "quadratic": n * n * (r + e),
        "linear": 2 * n * r * (e + 1),
        "scores": n * n,
        "state": r * e + r,
    }


def measured(folder: Path | None) -> dict[str, Any]:
    """Times of a stored `reassoc bench`: that of a folder, or the one that comes with the package.

    Returns:
        ``about`` (command, machine, settings in words), ``here`` (whether from the given folder), and
        ``rows``: ``name``, ``length``, ``seconds``, ``lower``, ``upper`` (quartiles).

    Raises:
        InputError: the folder holds no results of `reassoc bench`, or none of a forward pass.
    """
    if folder is None:
        text = resources.files(__package__).joinpath("bench.json").read_text(encoding="utf-8")
    else:
        try:
            text = (folder / "bench.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise InputError(
                f"--bench: {folder} holds no bench.json; run: reassoc bench --out {folder}"
            ) from None
    try:
        return _summary(json.loads(text)) | {"here": folder is not None}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise InputError(f"--bench: {folder} holds no readable results of reassoc bench") from None


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    settings, machine = found["settings"], found["machine"]
    kinds = {each["name"]: each["kind"] for each in found["contenders"]}
    rows: list[dict[str, Any]] = [
        {"name": str(row["contender"]), "length": int(row["length"])}
        | {part: float(row[part]) for part in ("seconds", "lower", "upper")}
        for row in found["rows"]
        if row["direction"] == DIRECTION and row["seconds"] and kinds[row["contender"]] in ("ours", "softmax")
    ]
    if not rows:
        raise ValueError("no forward pass was measured")
    # The page draws them on logarithmic axes, and NaN is no JSON that a browser reads.
    if not all(0 < row[part] < math.inf for row in rows for part in ("length", "seconds", "lower", "upper")):
        raise ValueError("a time or a length is not a positive number")
    about = (
        f"{machine['processor']}, {machine['threads']} threads, torch {found['versions']['torch']}; "
        f"batch {settings['batch']}, {settings['heads']} heads, queries of size {settings['head_dim']}, "
        f"values {settings['value_dim']}, {settings['dtype']}, {'' if settings['causal'] else 'not '}causal"
    )
    return {"about": about, "command": str(found["command"]), "rows": rows}
