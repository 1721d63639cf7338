"""One run: train on fresh sequences until the task is solved, nothing is gained any more, or the limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...feature_maps import RandomFeatures
from .cases import Case
from .model import Retrieval
from .task import draw, pairs

RATE = 1e-3
BATCH = 32
EVERY = 100  # steps between evaluations
SEQUENCES = 20  # of an evaluation
SOLVED = 1e-3
PATIENCE = 11  # evaluations without gain
STOPS = {"solved": "solved", "stalled": "no gain", "limit": "step limit", "diverged": "no number"}


class Run(NamedTuple):
    """One model to train: in which setting (1 or 2), what, with how many pairs, from which seed."""

    setting: int
    case: Case
    pairs: int
    seed: int


class Outcome(NamedTuple):
    """What became of a run.

    Attributes:
        steps: taken. stopped: a key of :data:`STOPS`. loss: at the last evaluation, as published.
            best: the least of all evaluations. long_loss: at the end, on sequences as long as in training.
        curve: step and loss of every evaluation.
        seconds, processor: it took, by the clock and of the processor (all threads together).
    """

    steps: int
    stopped: str
    loss: float
    best: float
    long_loss: float
    curve: list[tuple[int, float]]
    seconds: float
    processor: float


def train(run: Run, *, dim: int, limit: int, report: Callable[[str], None]) -> Outcome:
    """Train one model as Schlag et al. 2021 did.

    Setting 1: sequences of N pairs, every key and value once. Setting 2: 2N pairs drawn with replacement;
    it is judged on sequences of N, as published, and at the end once more on 2N.

    Args:
        run: what. dim: d of keys and queries. limit: steps at most. report: told step and loss.
    """
    began, busy = time.perf_counter(), time.process_time()
    generator = torch.Generator().manual_seed(run.seed)
    repeats, count = run.setting == 2, run.pairs
    length = 2 * count if repeats else count
    model = Retrieval(run.case, count, dim, int(2.2 * count), run.seed, generator)
    adam = torch.optim.Adam(model.parameters(), lr=RATE)
    curve: list[tuple[int, float]] = []
    best, idle, step, stopped = float("inf"), 0, 0, "limit"
    while step < limit:
        batch = draw(count, length, BATCH, repeats, generator)
        _redraw(model)
        loss = model.loss(batch)
        adam.zero_grad()
        loss.backward()
        adam.step()
        step += 1
        if step % EVERY and step != limit:
            continue
        found = _evaluate(model, *pairs(count, count, SEQUENCES, repeats, generator))
        curve.append((step, found))
        report(f"step {step:,}, loss {found:.2g}")
        idle = 0 if found < best else idle + 1
        best = min(best, found) if found == found else best
        if found <= SOLVED:
            stopped = "solved"
            break
        if idle >= PATIENCE:
            stopped = "stalled" if found == found else "diverged"
            break
    long_loss = _evaluate(model, *pairs(count, length, SEQUENCES, repeats, generator))
    times = time.perf_counter() - began, time.process_time() - busy
    return Outcome(step, stopped, curve[-1][1], best, long_loss, curve, *times)


def _redraw(model: Retrieval) -> bool:
    """Draw random features anew, as published for every batch; whether there are any."""
    if isinstance(model.phi, RandomFeatures):
        model.phi.redraw_()
        return True
    return False


def _evaluate(model: Retrieval, keys: Tensor, values: Tensor) -> float:
    """The loss over sequences ``(B, T)``, each with random features of its own."""
    if not _redraw(model):
        return model.evaluate(keys, values)
    losses = []
    for one in zip(keys.split(1), values.split(1), strict=True):
        losses.append(model.evaluate(*one))
        _redraw(model)
    return sum(losses) / len(losses)
