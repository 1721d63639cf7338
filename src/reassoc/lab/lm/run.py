"""Train and judge every recipe with every seed; what is finished is kept, what is not goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._errors import InputError
from ..._parts import Parts
from ..._threads import use_threads
from .._machine import machine, versions
from .._progress import Progress
from ..fidelity import Row
from ..recipes import Recipe
from .checkpoint import file_name, resume, save
from .evaluate import nats, sample, state_bytes
from .models import save_model
from .ranks import Ranks
from .settings import Settings
from .text import Text
from .trainer import Trainer

JUDGED = ("validation", "test")
WAYS = ("truncated", "carried")


@dataclass(frozen=True)
class Results:
    """Everything a comparison found.

    Attributes:
        recipes: in the order asked for. text: what was trained on.
        runs: one of each recipe and seed: ``recipe``, ``seed``, ``parameters``, ``state_bytes``,
            ``diverged`` (a step, or ``None``), ``losses``, ``norms`` and ``seconds`` of each step, ``nats``
            per token by part of the text and way of judging, ``sample`` (prompt and continuation).
        manifest: what was trained, with what.
    """

    recipes: list[Recipe]
    text: Text
    runs: list[Row]
    manifest: dict[str, Any]


def compare(
    recipes: Sequence[Recipe],
    text: Text,
    settings: Settings,
    seeds: Sequence[int] = (0,),
    *,
    folder: Path,
    every: int = 100,
    threads: int | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Results:
    """Train language models that differ in their attention and in nothing else.

    Args:
        recipes, text, settings: what to train. seeds: each gives other weights and random features, and the
            same tokens in the same order.
        folder: ``checkpoints/`` and ``models/`` are written into it; a comparison with the same settings
            goes on from there. Call :func:`forget_parts` once results are written.
        every: steps between checkpoints. threads: of torch; default what it has.
        ranks: processes that share the work.
        progress: called with (done, total, what is next).

    Raises:
        InputError: a text that is too short, recipes that do not fit, a checkpoint of another run, a folder
            that cannot be written.
    """
    if not seeds or any(not 0 <= seed < 1 << 31 for seed in seeds):
        raise InputError("--seeds: give at least one seed, each 0 or more and below 2^31")
    for option, number in (("--checkpoint", every), ("--threads", 1 if threads is None else threads)):
        if not 1 <= number < 1 << 31:
            raise InputError(f"{option}: expected a whole number of at least 1, got {number}")
    settings.check_text(text)
    for recipe in recipes:  # before any work
        settings.check_recipe(recipe)
    count = torch.get_num_threads() if threads is None else threads
    with use_threads(count), torch.random.fork_rng(devices=[]):
        seeds = list(dict.fromkeys(seeds))
        return _compare(recipes, text, settings, seeds, folder, every, ranks or Ranks(), progress)


def _compare(
    recipes: Sequence[Recipe],
    text: Text,
    settings: Settings,
    seeds: list[int],
    folder: Path,
    every: int,
    ranks: Ranks,
    progress: Progress | None,
) -> Results:
    manifest = _manifest(text, settings, ranks)
    parts = Parts(folder, manifest)
    todo = [(recipe, seed) for seed in seeds for recipe in recipes]
    found = {}
    for number, (recipe, seed) in enumerate(todo):
        part = file_name(recipe.name, seed).removesuffix(".safetensors")
        run = parts.get(part)
        if run is None:
            report = _Report(progress, number * settings.steps, len(todo) * settings.steps, recipe.name, seed)
            run = _run(recipe, text, settings, seed, folder, every, ranks, report)
            if ranks.first:
                parts.put(part, run)
                (folder / "checkpoints" / file_name(recipe.name, seed)).unlink(missing_ok=True)
        ranks.wait()
        found[recipe.name, seed] = run
    if progress is not None:
        progress(len(todo) * settings.steps, len(todo) * settings.steps, "")
    runs = [found[recipe.name, seed] for recipe in recipes for seed in seeds]
    whole = manifest | {"recipes": [recipe.name for recipe in recipes], "seeds": seeds}
    return Results(list(recipes), text, runs, whole)


def forget_parts(folder: Path, results: Results) -> None:
    """Remove the finished parts of a comparison whose results have been written."""
    key = {k: v for k, v in results.manifest.items() if k not in ("recipes", "seeds")}
    Parts(folder, key).forget()
    checkpoints = folder / "checkpoints"
    if checkpoints.is_dir() and not any(checkpoints.iterdir()):
        checkpoints.rmdir()


@dataclass(frozen=True)
class _Report:
    progress: Progress | None
    start: int
    total: int
    name: str
    seed: int

    def __call__(self, done: int, what: str) -> None:
        if self.progress is not None:
            self.progress(self.start + done, self.total, f"{self.name} seed {self.seed}  {what}")


def _run(
    recipe: Recipe,
    text: Text,
    settings: Settings,
    seed: int,
    folder: Path,
    every: int,
    ranks: Ranks,
    report: _Report,
) -> Row:
    """Train one model, from its checkpoint if there is one; judge it and keep it (on the first process)."""
    trainer = Trainer(recipe, settings, text, seed, ranks)
    key = {
        "text": {"name": text.name, "sha256": text.sha256}, "tokenizer": text.tokenizer,
        "settings": settings.to_json(), "recipe": recipe.name, "seed": seed,
        "model": trainer.model.config.to_dict(), "number of processes": ranks.count,
    }  # fmt: skip
    path = folder / "checkpoints" / file_name(recipe.name, seed)
    resume(path, trainer, key)
    trainer.model.train()
    while not trainer.finished:
        trainer.step()
        done = trainer.step_number
        report(done, f"loss {trainer.curve.losses[-1]:.3f}")
        if done % every == 0 or trainer.finished:
            save(path, trainer, key)
    if not ranks.first:
        return {}
    curve, model = trainer.curve, trainer.model
    report(trainer.step_number, "judging")
    run: Row = {
        "recipe": recipe.name, "seed": seed, "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": state_bytes(model, settings.segment), **vars(curve),
        "nats": {name: {} for name in JUDGED}, "sample": None,
    }  # fmt: skip
    for name in JUDGED:
        for way in WAYS:
            possible = way == "truncated" or not (recipe.softmax or recipe.learned)
            known = possible and curve.diverged is None
            split, before = getattr(text, name), text.before(name)
            value = nats(model, split, settings.segment, way == "carried", before) if known else math.nan
            run["nats"][name][way] = value if possible else None
    if curve.diverged is None:
        run["sample"] = sample(model, text, settings.segment, seed)
    about: dict[str, Any] = {k: v for k, v in key.items() if k != "model"}
    about |= {"diverged": curve.diverged, "losses": curve.losses}
    save_model(folder / "models" / file_name(recipe.name, seed), model, about)
    return run


def _manifest(text: Text, settings: Settings, ranks: Ranks) -> dict[str, Any]:
    splits = {name: getattr(text, name) for name in ("training", *JUDGED)}
    return {
        "format": "reassoc-lm-1",
        "versions": versions(),
        "machine": machine() | {"processes": ranks.count},
        "settings": settings.to_json(),
        "text": {
            "name": text.name, "sha256": text.sha256, "vocabulary": text.vocabulary,
            "tokens": {name: len(split.tokens) for name, split in splits.items()},
        },
        "tokenizer": text.tokenizer,
    }  # fmt: skip
