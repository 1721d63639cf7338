"""Numbers of a comparison as lines of its tables."""

from __future__ import annotations

import math

from ..fidelity import Row
from .contrasts import Contrast
from .evaluate import bits_per_byte, perplexity
from .figures import binned
from .run import JUDGED, WAYS, Results

LAST = 20  # steps whose mean is called the final training loss


def written(results: Results) -> list[Row]:
    """Prompt and continuation of each recipe, of the first seed."""
    return [
        {"recipe": run["recipe"], "prompt": run["sample"][0], "continuation": run["sample"][1]}
        for run in results.runs
        if run["sample"] is not None and run["seed"] == results.manifest["seeds"][0]
    ]


def run_row(results: Results, run: Row) -> Row:
    """A line of ``lm.csv``: what repeats, so no times."""
    settings = results.manifest["settings"]
    way = "carried" if next(r for r in results.recipes if r.name == run["recipe"]).carried else "truncated"
    losses = [v for v in run["losses"] if math.isfinite(v)]
    norms = [v for v in run["norms"] if math.isfinite(v)]
    nats = run["nats"]
    row: Row = {
        "recipe": run["recipe"], "seed": run["seed"], "parameters": run["parameters"],
        "state_bytes": run["state_bytes"], "steps": len(run["losses"]),
        "diverged_at_step": None if run["diverged"] is None else run["diverged"] + 1,
        "training_loss": sum(losses[-LAST:]) / len(losses[-LAST:]) if losses else math.nan,
        "largest_rise": _rise(losses[settings["warmup"] :]),
        "largest_gradient": max(norms, default=math.nan),
        "clipped_share": sum(v > settings["clip"] for v in norms) / max(1, len(norms)),
        "judged_as_trained": way,
    }  # fmt: skip
    for part in JUDGED:
        for each in WAYS:
            value = nats[part][each]
            row[f"{part}_perplexity_{each}"] = math.nan if value is None else perplexity(value)
    row["test_bits_per_byte"] = bits_per_byte(nats["test"][way], results.text.test)
    return row


def _rise(losses: list[float]) -> float:
    lowest, rise = math.inf, 0.0
    for loss in losses:
        lowest = min(lowest, loss)
        rise = max(rise, loss - lowest)
    return rise


def curves(results: Results) -> list[Row]:
    """A line of ``curves.csv`` for each stretch of steps of each run."""
    return [
        {"recipe": run["recipe"], "seed": run["seed"], "step": end, "loss": loss}
        for run in results.runs
        for end, loss in binned(run["losses"])
    ]


def difference(pair: Contrast) -> Row:
    """A line of ``differences.csv``."""
    return {
        "choice": pair.choice, "recipe": pair.other, "against": pair.base, "now": pair.now, "was": pair.was,
        "change": pair.change, "least": min(pair.changes, default=math.nan),
        "largest": max(pair.changes, default=math.nan), "seeds": len(pair.changes), "told_apart": pair.apart,
    }  # fmt: skip
