"""The experiment: train every recipe at every size, stop when it can do it, judge on other sequences."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from ..._parts import Parts
from ...nn import LanguageModel, RedrawSchedule
from .._machine import machine, versions
from .._progress import Progress
from .._training import optimizer, schedule, update
from ..fidelity import Row
from ..recipes import recipe
from .data import IGNORED, Size, draw
from .model import build, state_bytes
from .settings import Settings

CLIP = 1.0
WARMUP = 0.05  # of the steps
TOGETHER = 64  # sequences judged at a time
STOPPED, USED_UP, DIVERGED = "stopped", "used up", "diverged"


class Run(NamedTuple):
    """One model to train: a recipe, the size of a head, a learning rate, a seed."""

    recipe: str
    head_dim: int
    rate: float
    seed: int


@dataclass(frozen=True)
class Results:
    """Everything a recall experiment found.

    Attributes:
        rows: one per recipe, head size, learning rate, seed and size of test. curves: validation accuracy
            along each training. times: seconds of each training. manifest: what was trained, with what.
    """

    rows: list[Row]
    curves: list[Row]
    times: list[Row]
    manifest: dict[str, Any]


def recall(settings: Settings, *, resume: Path | None = None, progress: Progress | None = None) -> Results:
    """Run an experiment.

    Args:
        settings: what to train and test. resume: folder for finished runs; an experiment with the same
            settings on the same machine continues from there. Call :func:`forget_parts` once the results
            are written.
        progress: called with (done, total, what is next).

    Raises:
        InputError: a recipe that does not fit the sizes.
    """
    manifest = {
        "format": "reassoc-recall-1", "versions": versions(), "machine": machine(),
        "settings": settings.to_json(),
    }  # fmt: skip
    runs = [
        Run(text, head_dim, rate, seed)
        for text in settings.recipes
        for head_dim in settings.head_dims
        for rate in settings.rates
        for seed in settings.seeds
    ]
    for text in settings.recipes:  # before any work, and before anything is written
        for head_dim in settings.head_dims:
            build(settings, text, head_dim, 0)
    parts = Parts(resume, manifest)
    found = []
    for done, run in enumerate(runs):
        if progress is not None:
            what = f"{run.recipe}  head size {run.head_dim}, rate {run.rate:g}, seed {run.seed}"
            progress(done, len(runs), what)
        part = parts.get(f"{done:05}")
        if part is None:
            part = train(settings, run)
            parts.put(f"{done:05}", part)
        found.append((run, part))
    if progress is not None:
        progress(len(runs), len(runs), "")
    best = _best_rates(found)
    rows, curves, times = [], [], []
    for run, part in found:
        about = run._asdict()
        chosen = best[run.recipe, run.head_dim] == run.rate
        for test in part["tests"]:
            rows.append(
                about
                | {"chosen": int(chosen)}
                | test
                | {k: part[k] for k in ("validation", "features", "parameters", "steps", "ended")}
            )
        curves += [about | point for point in part["curve"]]
        times.append(about | {"seconds": part["seconds"]})
    return Results(rows, curves, times, manifest)


def forget_parts(folder: Path, results: Results) -> None:
    """Remove the finished runs of an experiment whose results have been written."""
    Parts(folder, results.manifest).forget()


def _best_rates(found: list[tuple[Run, dict[str, Any]]]) -> dict[tuple[str, int], float]:
    """Of each recipe and head size the learning rate with the best validation accuracy, mean over seeds."""
    sums: dict[tuple[str, int], dict[float, float]] = {}
    for run, part in found:
        rates = sums.setdefault((run.recipe, run.head_dim), {})
        rates[run.rate] = rates.get(run.rate, 0.0) + part["validation"]
    return {key: max(rates, key=lambda rate: rates[rate]) for key, rates in sums.items()}


def train(settings: Settings, run: Run) -> dict[str, Any]:
    """Train one model and judge it; what it gives fits into JSON."""
    start = time.perf_counter()
    model, features = build(settings, run.recipe, run.head_dim, run.seed)
    adam = optimizer(model, run.rate, settings.weight_decay)
    every = recipe(run.recipe).redraw
    redraw = RedrawSchedule(model, every) if every else None
    chance = torch.Generator().manual_seed(run.seed)
    ended, curve, step = USED_UP, [], 0
    for step in range(1, settings.steps + 1):
        size = settings.train[step % len(settings.train)]
        tokens, labels = draw(size, settings.batch, settings.vocabulary, chance)
        if redraw is not None:
            redraw.step()
        loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        lr = run.rate * schedule(step - 1, settings.steps, round(WARMUP * settings.steps))
        if not math.isfinite(update(model, adam, loss, lr=lr, clip=CLIP)):
            ended = DIVERGED
            break
        if step % settings.every == 0 or step == settings.steps:
            reached = _validation(model, settings)
            curve.append({"step": step, "loss": loss.item(), "accuracy": reached})
            if reached >= settings.stop:
                ended = STOPPED
                break
    tests = [
        {
            "tokens": size.tokens, "pairs": size.pairs, "accuracy": accuracy(model, settings, size, "test"),
            "state_bytes": state_bytes(model, size.tokens),
        }
        for size in settings.test
    ]  # fmt: skip
    return {
        "tests": tests, "curve": curve, "ended": ended, "steps": step, "features": features,
        "validation": _validation(model, settings),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def _validation(model: LanguageModel, settings: Settings) -> float:
    """Mean accuracy over the sizes trained on."""
    found = [accuracy(model, settings, size, "validation") for size in settings.train]
    return sum(found) / len(found)


@torch.no_grad()
def accuracy(model: LanguageModel, settings: Settings, size: Size, split: str) -> float:
    """The share of questions answered right, the same sequences for every model.

    Args:
        model: what answers. settings: vocabulary and number of sequences. size: of the sequences.
        split: ``"validation"`` or ``"test"``: two streams that share nothing with each other or training.
    """
    # Training streams are seeded below 2^31.
    chance = torch.Generator().manual_seed((1 << 31) + (split == "test"))
    tokens, labels = draw(size, settings.count, settings.vocabulary, chance)
    right = asked = 0
    model.eval()
    for some, wanted in zip(tokens.split(TOGETHER), labels.split(TOGETHER), strict=True):
        where = wanted != IGNORED
        right += int((model(some).argmax(-1) == wanted)[where].sum())
        asked += int(where.sum())
    model.train()
    return right / asked
