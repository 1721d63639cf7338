"""Old models, the original libraries and ours: forward time and peak memory with the same random weights.

    python benchmarks/compat.py --out compat.json    # in an environment that has both originals; minutes

scBERT's size (performer-pytorch: 16,907 tokens, width 200, 6 layers, 10 heads) and MoLFormer's
(pytorch-fast-transformers: 202 tokens, width 768, 12 layers, 12 heads). All contenders take turns in one
process, round after round, and a ratio is of moments that lie together; memory is the most that a process
of its own holds during a forward pass, beyond model and input. Nothing else should run. Wanted: at least
three times the original's speed at scBERT's length, in both modes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch

from reassoc._memory import forget_peak, resident
from reassoc.lab._machine import machine, processor, versions
from reassoc.lab.bench.clock import time_rounds

MODES = ("original", "exact", "clean")
LEGACY = {"exact": "exact", "clean": None}


def scbert(mode: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The encoder of scBERT (its published settings), and one cell of 16,906 genes and a token."""
    module = importlib.import_module(
        "performer_pytorch" if mode == "original" else "reassoc.compat.performer_pytorch"
    )
    more = {} if mode == "original" else {"legacy": LEGACY[mode]}
    torch.manual_seed(0)
    model = module.Performer(dim=200, depth=6, heads=10, dim_head=64, **more)
    return model, torch.randn(1, 16_907, 200)


def molformer(mode: str, batch: int = 1) -> tuple[torch.nn.Module, torch.Tensor]:
    """An encoder of MoLFormer's size, with its random ReLU features, and a molecule of 202 tokens."""
    root = "fast_transformers" if mode == "original" else "reassoc.compat.fast_transformers"
    builders = importlib.import_module(f"{root}.builders")
    maps = importlib.import_module(f"{root}.feature_maps")
    more = {} if mode == "original" else {"legacy": LEGACY[mode]}
    torch.manual_seed(0)
    model = builders.TransformerEncoderBuilder.from_kwargs(
        n_layers=12, n_heads=12, query_dimensions=64, value_dimensions=64, feed_forward_dimensions=768,
        attention_type="linear", activation="gelu", dropout=0.0,
        feature_map=maps.GeneralizedRandomFeatures.factory(n_dims=32, deterministic_eval=True), **more,
    ).get()  # fmt: skip
    return model, torch.randn(batch, 202, 768)


CASES = {
    "scBERT, 16,907 tokens": scbert,
    "MoLFormer, 202 tokens": molformer,
    "MoLFormer, 16 x 202 tokens": lambda mode: molformer(mode, 16),
}


def forward_of(model: torch.nn.Module, given: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A forward pass without gradients."""
    model.eval()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(given)

    return forward


def peak(case: str, mode: str) -> int:
    """Bytes beyond model and input, in a process of its own."""
    command = [sys.executable, __file__, "--memory", case, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures and the machine as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--memory", nargs=2, metavar=("CASE", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the originals use what torch and Python have given up
    torch.set_num_threads(options.threads)
    if options.memory:
        case, mode = options.memory
        forward = forward_of(*CASES[case](mode))
        before = resident("VmRSS")
        forget_peak()
        forward()
        print(resident("VmHWM") - before)
        return
    found = []
    for case in options.cases:
        models = {mode: CASES[case](mode) for mode in MODES}
        first, given = models["original"]
        with torch.no_grad():
            first.train()(given[:, :8])  # some maps are drawn by the first call in training
        for model, _ in models.values():
            model.load_state_dict(first.state_dict())
        forwards = {mode: forward_of(models[mode][0], given) for mode in MODES}
        truth = forwards["original"]()
        samples = {name: timing.seconds for name, timing in time_rounds(forwards, options.rounds).items()}
        for mode in MODES:
            ratios = [a / b for a, b in zip(samples["original"], samples[mode], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            row = {
                "case": case, "mode": mode, "seconds": median(samples[mode]), "faster": median(ratios),
                "lower": low, "upper": high, "bytes": peak(case, mode),
                "difference": float((forwards[mode]() - truth).abs().max() / truth.abs().max()),
            }  # fmt: skip
            found.append(row)
            times = f"{row['seconds']:8.3f} s  {row['faster']:5.2f} x ({low:.2f} to {high:.2f})"
            held = f"{row['bytes'] / 1e6:8,.0f} MB"
            print(f"{case:28} {mode:9} {times}  {held}  differs by {row['difference']:.0e}")
    if options.out:
        about = {"machine": machine() | processor(), "threads": options.threads, "versions": versions()}
        options.out.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
