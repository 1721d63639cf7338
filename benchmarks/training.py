"""Training speed of whole language models that differ in their attention only.

    python benchmarks/training.py --threads 1 --out training.json    # minutes; nothing else should run

A step is that of `reassoc lm`: forward, backward, clipping and optimizer, at its default sizes and as many
tokens at every length. All models take turns in one process; a ratio is the median over rounds of two steps
moments apart. Wanted: delta at least 0.95 of sum; linear at least 1.5 of softmax at 2,048 tokens and 3 at
8,192.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median, quantiles

import torch

from reassoc.lab._machine import machine, processor, versions
from reassoc.lab.bench.clock import time_rounds
from reassoc.lab.lm import Ranks, Settings, read
from reassoc.lab.lm.trainer import Trainer
from reassoc.lab.recipes import recipe

TOKENS = 8192  # of a step
LENGTHS = (256, 2048, 8192)
MODELS = ("softmax", "elu+1", "elu+1:delta", "elu+1:gated-delta")
# The first divided by the second: tokens a second.
RATIOS = (
    ("elu+1:delta", "elu+1"), ("elu+1:gated-delta", "elu+1"), ("elu+1", "softmax"),
    ("elu+1:delta", "softmax"), ("elu+1:gated-delta", "softmax"),
)  # fmt: skip


def rows(length: int, rounds: int) -> list[dict[str, float | str]]:
    """Of one length: a row for each model and each ratio, with quartiles."""
    settings = Settings(segment=length, batch=TOKENS // length)
    text = read()
    trainers = {name: Trainer(recipe(name), settings, text, 0, Ranks()) for name in MODELS}
    timings = time_rounds({name: trainer.step for name, trainer in trainers.items()}, rounds)
    seconds = {name: timing.seconds for name, timing in timings.items()}
    found = [_row(length, name, [TOKENS / s for s in seconds[name]]) for name in MODELS]
    for first, second in RATIOS:
        pairs = zip(seconds[first], seconds[second], strict=True)
        found.append(_row(length, f"{first} / {second}", [theirs / ours for ours, theirs in pairs]))
    return found


def _row(length: int, name: str, values: list[float]) -> dict[str, float | str]:
    lower, _, upper = quantiles(values, n=4)
    return {"length": length, "what": name, "median": median(values), "lower": lower, "upper": upper}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures and the machine as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = [row for length in LENGTHS for row in rows(length, arguments.rounds)]
    print("| tokens a second of training | " + " | ".join(f"{length:,}" for length in LENGTHS) + " |")
    print("|---|" + "---|" * len(LENGTHS))
    for name in dict.fromkeys(row["what"] for row in found):
        cells = [row for row in found if row["what"] == name]
        shown = "{median:.2f} [{lower:.2f}-{upper:.2f}]" if " / " in str(name) else "{median:,.0f}"
        print(f"| {name} | " + " | ".join(shown.format(**row) for row in cells) + " |")
    if arguments.out is not None:
        about = {"versions": versions(), "machine": machine() | processor(), "settings": vars(Settings())}
        arguments.out.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
