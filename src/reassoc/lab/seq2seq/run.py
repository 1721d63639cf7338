"""The experiment: train every recipe on the same pairs in the same order, judge on pairs it never saw."""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..._errors import InputError
from ..._parts import Parts
from ...nn import EncoderDecoder, EncoderDecoderConfig, RedrawSchedule
from .._machine import machine, versions
from .._progress import Progress
from .._training import optimizer, schedule, update
from ..fidelity import Row
from ..recipes import Recipe, recipe
from .pairs import PADDING, START, STOP, VOCABULARY, Pair, Splits, check_pairs, decode, divide, encode
from .score import Bleu, exact_match
from .settings import Settings

CLIP = 1.0
WARMUP = 0.05  # of the steps
TOGETHER = 64  # pairs judged at a time
DIVIDED_BY = 0  # seed of the division: the same for every seed of a model, so that they can be compared
SHOWN = 5  # right and wrong translations kept of each model
IGNORED = -100


@dataclass(frozen=True)
class Results:
    """Everything a translation experiment found.

    Attributes:
        rows: one per recipe and seed. curves: validation loss along each training. examples: some
            translations of each model, right and wrong. times: seconds of each.
        manifest: what was trained, on what, with what.
    """

    rows: list[Row]
    curves: list[Row]
    examples: list[Row]
    times: list[Row]
    manifest: dict[str, Any]


def seq2seq(
    pairs: list[Pair],
    name: str,
    settings: Settings,
    *,
    resume: Path | None = None,
    progress: Progress | None = None,
) -> Results:
    """Run an experiment.

    Args:
        pairs: of source and target. name: what to call them. settings: what to train.
        resume: folder for finished runs; an experiment with the same pairs and settings on the same machine
            continues from there. Call :func:`forget_parts` once the results are written.
        progress: called with (done, total, what is next).

    Raises:
        InputError: pairs that are too few or too long, a recipe that does not fit, sacrebleu missing.
    """
    check_pairs(pairs, settings.limit)
    bleu = Bleu(settings.tokenize)
    splits = divide(pairs, settings.held_out, DIVIDED_BY)
    longest = max(len(text.encode()) for pair in pairs for text in pair)
    manifest: dict[str, Any] = {
        "format": "reassoc-seq2seq-1", "versions": versions(), "machine": machine(),
        "settings": settings.to_json(),
        "pairs": {
            "name": name, "sha256": hashlib.sha256(json.dumps(pairs).encode()).hexdigest(),
            "train": len(splits.train), "validation": len(splits.validation), "test": len(splits.test),
            "longest": longest,
        },
    }  # fmt: skip
    runs = [(recipe(text), seed) for text in settings.recipes for seed in settings.seeds]
    for chosen, _ in runs:  # before any work, and before anything is written
        build(settings, chosen, longest, 0)
    parts = Parts(resume, manifest)
    rows, curves, examples, times = [], [], [], []
    for done, (chosen, seed) in enumerate(runs):
        if progress is not None:
            progress(done, len(runs), f"{chosen.name}, seed {seed}")
        part = parts.get(f"{done:05}")
        if part is None:
            part = train(settings, chosen, longest, seed, splits, bleu)
            parts.put(f"{done:05}", part)
        about: Row = {"recipe": chosen.name, "seed": seed}
        rows.append(about | part["row"])
        curves += [about | point for point in part["curve"]]
        examples += [about | example for example in part["examples"]]
        times.append(about | {"seconds": part["seconds"]})
        manifest["bleu"] = part["bleu"]
    if progress is not None:
        progress(len(runs), len(runs), "")
    return Results(rows, curves, examples, times, manifest)


def forget_parts(folder: Path, results: Results) -> None:
    """Remove the finished runs of an experiment whose results have been written."""
    Parts(folder, {k: v for k, v in results.manifest.items() if k != "bleu"}).forget()


def build(settings: Settings, chosen: Recipe, longest: int, seed: int) -> EncoderDecoder:
    """A fresh model for texts of at most ``longest`` bytes.

    Raises:
        InputError: the recipe does not fit the sizes.
    """
    try:
        config = EncoderDecoderConfig(
            source_vocabulary=VOCABULARY, target_vocabulary=VOCABULARY, width=settings.width,
            layers=settings.layers, learned_positions=longest + 1 if chosen.learned else 0,
            attention=chosen.sized(heads=settings.heads, seed=seed),
        )  # fmt: skip
        torch.manual_seed(seed)
        return EncoderDecoder(config)
    except ValueError as error:
        raise InputError(f"recipe {chosen.name!r} with width {settings.width}: {error}") from None


def train(
    settings: Settings, chosen: Recipe, longest: int, seed: int, splits: Splits, bleu: Bleu
) -> dict[str, Any]:
    """Train one model and judge it; what it gives fits into JSON."""
    start = time.perf_counter()
    model = build(settings, chosen, longest, seed)
    adam = optimizer(model, settings.rate, settings.weight_decay)
    redraw = RedrawSchedule(model, chosen.redraw) if chosen.redraw else None
    chance = torch.Generator().manual_seed(seed)
    order: list[int] = []
    ended, curve, step = "trained", [], 0
    for step in range(1, settings.steps + 1):
        while len(order) < settings.batch:
            order += torch.randperm(len(splits.train), generator=chance).tolist()
        batch, order = [splits.train[i] for i in order[: settings.batch]], order[settings.batch :]
        if redraw is not None:
            redraw.step()
        loss = batch_loss(model, batch)
        lr = settings.rate * schedule(step - 1, settings.steps, round(WARMUP * settings.steps))
        if not math.isfinite(update(model, adam, loss, lr=lr, clip=CLIP)):
            ended = "diverged"
            break
        if step % settings.every == 0 or step == settings.steps:
            curve.append(
                {
                    "step": step,
                    "loss": loss.item(),
                    "validation_loss": _mean_loss(model, splits.validation),
                }
            )
    limit = 1 + max(len(target.encode()) for part in splits for _, target in part)
    found = translate(model, [source for source, _ in splits.test], limit)
    wanted = [target for _, target in splits.test]
    return {
        "row": {
            "exact_match": exact_match(found, wanted), "bleu": bleu(found, wanted),
            "test_loss": _mean_loss(model, splits.test),
            "parameters": sum(p.numel() for p in model.parameters()), "steps": step, "ended": ended,
        },
        "curve": curve, "examples": _examples(splits.test, found), "bleu": bleu.signature,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def batch_loss(model: EncoderDecoder, batch: list[Pair]) -> Tensor:
    """Mean cross entropy of the targets' bytes and their stops, in nats."""
    source, target = (encode([pair[side] for pair in batch]) for side in (0, 1))
    begin, pad = target.new_full((len(batch), 1), START), target.new_full((len(batch), 1), PADDING)
    labels = torch.cat([target, pad], dim=1)
    ends = (target != PADDING).sum(1, keepdim=True)
    labels = labels.scatter(1, ends, STOP)
    labels = labels.masked_fill(labels == PADDING, IGNORED)
    logits = model(source, torch.cat([begin, target], dim=1), source_mask=source != PADDING)
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def _mean_loss(model: EncoderDecoder, pairs: list[Pair]) -> float:
    """Nats for each byte of the targets, stops included."""
    model.eval()
    total = count = 0.0
    for at in range(0, len(pairs), TOGETHER):
        batch = pairs[at : at + TOGETHER]
        size = sum(len(target.encode()) + 1 for _, target in batch)
        total, count = total + size * batch_loss(model, batch).item(), count + size
    model.train()
    return total / count


@torch.no_grad()
def translate(model: EncoderDecoder, sources: list[str], limit: int) -> list[str]:
    """What the model writes, greedily.

    Args:
        model: trained. sources: texts. limit: tokens of the longest answer, its end included.
    """
    model.eval()
    found: list[str] = []
    for at in range(0, len(sources), TOGETHER):
        source = encode(sources[at : at + TOGETHER])
        answer = model.generate(source, start=START, stop=STOP, limit=limit, source_mask=source != PADDING)
        found += decode(answer)
    model.train()
    return found


def _examples(pairs: list[Pair], found: list[str]) -> list[Row]:
    """The first few right and wrong ones."""
    rows: list[Row] = [
        {"source": source, "target": target, "answer": answer, "right": int(answer == target)}
        for (source, target), answer in zip(pairs, found, strict=True)
    ]
    return [row for right in (1, 0) for row in [r for r in rows if r["right"] == right][:SHOWN]]
