"""Decoding speed and memory of a pretrained model with its softmax cache, and converted.

    python benchmarks/generation.py --model ORIGINAL --converted CONVERTED --out generation.json

Both models read the same text up to each context length; then all of them decode a few tokens in turn, round
after round, so that a ratio is of moments that lie together. Nothing else should run. Wanted of the converted
model: at 8,192 tokens of context the same bytes as at 128, and speed within 10 %.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from reassoc.hf import cache_bytes
from reassoc.lab._machine import machine, processor, versions
from reassoc.lab.bench.clock import time_rounds

CONTEXTS = (128, 1024, 4096, 8192)
PIECE = 512  # tokens of a prefill at once
TOKENS = 4  # of a round


class Stream:
    """One model after one context, decoding greedily."""

    def __init__(self, model: Any, context: torch.Tensor) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        start = time.perf_counter()
        with torch.inference_mode():
            for piece in context.split(PIECE, dim=1):
                logits = model(piece, cache=self.cache, use_cache=True, logits_to_keep=1).logits
        self.prefill = context.shape[1] / (time.perf_counter() - start)
        self.token = logits[:, -1:].argmax(-1)
        self.bytes = cache_bytes(self.cache)

    def decode(self) -> None:
        """A few tokens more."""
        with torch.inference_mode():
            for _ in range(TOKENS):
                logits = self.model(self.token, cache=self.cache, use_cache=True).logits
                self.token = logits[:, -1:].argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the original")
    parser.add_argument("--converted", type=Path, required=True, help="folder that `reassoc convert` wrote")
    parser.add_argument("--out", type=Path, help="write the figures and the machine as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folders = {"softmax": arguments.model, "converted": arguments.converted}
    models = {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        for name, folder in folders.items()
    }
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(100, models["softmax"].config.vocab_size, (1, max(CONTEXTS)), generator=generator)
    streams = {
        (name, context): Stream(model, text[:, :context])
        for context in CONTEXTS
        for name, model in models.items()
    }
    turns: dict[str, Callable[[], None]] = {f"{n} {c}": stream.decode for (n, c), stream in streams.items()}
    timings = time_rounds(turns, arguments.rounds)
    rows = []
    for (name, context), stream in streams.items():
        seconds = timings[f"{name} {context}"].seconds
        speeds = [TOKENS / s for s in seconds]
        lower, _, upper = quantiles(speeds, n=4)
        first = timings[f"{name} {CONTEXTS[0]}"].seconds
        softmax = timings[f"softmax {context}"].seconds
        rows.append(
            {
                "model": name, "context": context, "tokens_per_second": median(speeds), "lower": lower,
                "upper": upper, "state_bytes": stream.bytes, "prefill_tokens_per_second": stream.prefill,
                "of_its_speed_at_128": median(a / b for a, b in zip(first, seconds, strict=True)),
                "of_softmax": median(a / b for a, b in zip(softmax, seconds, strict=True)),
            }
        )  # fmt: skip
    print("| model | context | tokens/s | of its speed at 128 | of softmax | state, MB | prefill tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        line = (
            "| {model} | {context:,} | {tokens_per_second:.1f} [{lower:.1f}-{upper:.1f}] | "
            "{of_its_speed_at_128:.2f} | {of_softmax:.2f} | {megabytes:.1f} | "
            "{prefill_tokens_per_second:.0f} |"
        )
        print(line.format(megabytes=row["state_bytes"] / 1e6, **row))
    if arguments.out is not None:
        about = {"versions": versions(), "machine": machine() | processor(), "rounds": arguments.rounds}
        arguments.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
