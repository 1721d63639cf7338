"""The measurements: one model in memory at a time, each finished one kept."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._errors import InputError
from ..._parts import Parts
from .._machine import machine, versions
from .._pretrained import Pretrained, import_transformers, quiet_log
from .._progress import Progress
from ..fidelity import Row
from .settings import Settings


@dataclass(frozen=True)
class Results:
    """Everything that an evaluation found.

    Attributes:
        rows: one per model, text and length. recall: one per model and distance. times: seconds of each
            measurement. manifest: what was measured, with what. encoder: whether rows hold cosines.
    """

    rows: list[Row]
    recall: list[Row]
    times: list[Row]
    manifest: dict[str, Any]
    encoder: bool


def evaluate(
    models: Sequence[Pretrained],
    texts: Mapping[str, str],
    settings: Settings,
    *,
    resume: Path | None = None,
    progress: Progress | None = None,
) -> Results:
    """Measure every model on the same tokens.

    Args:
        models: the first is what the others are compared with. texts: by name.
        settings: what to measure. resume: folder for finished models; an evaluation of the same models,
            texts and settings continues from there.
        progress: called with (done, total, what is next).

    Raises:
        InputError: models that cannot be compared, or texts that are too short.
    """
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise InputError(f"models are named {', '.join(names)}: give folders of different names")
    manifest = {
        "format": "reassoc-evaluate-1",
        "versions": versions() | {"transformers": import_transformers().__version__},
        "machine": machine(), "settings": settings.to_json(),
        "models": [{"name": model.name, "sha256": model.sha256()} for model in models],
        "texts": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
    }  # fmt: skip
    parts = Parts(resume, manifest)
    try:
        return _results(names, _parts(models, texts, settings, parts, progress), manifest)
    except InputError:
        parts.forget()  # the same command can never end well
        if resume is not None:
            with contextlib.suppress(OSError):
                resume.rmdir()  # only an empty one
        raise


def _parts(
    models: Sequence[Pretrained], texts: Mapping[str, str], settings: Settings, parts: Parts,
    progress: Progress | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each model gives, measured or found."""
    found: list[dict[str, Any]] = []
    first: dict[str, torch.Tensor] | None = None
    kept = [parts.get(f"{index:03}") for index in range(len(models))]
    for index, model in enumerate(models):
        part = kept[index]
        if part is None or (index == 0 and part["encoder"] and None in kept):
            with quiet_log():
                part, vectors = _measure(
                    model, texts, settings, first, _within(progress, index, len(models), model)
                )
            first = vectors if index == 0 else first
            parts.put(f"{index:03}", part)
            gc.collect()
        if found and part["tokens"] != found[0]["tokens"]:
            raise InputError(
                f"{model.name} and {models[0].name} differ in kind, or read the texts as different tokens: "
                "their figures cannot be compared"
            )
        found.append(part)
    return found


def forget_parts(folder: Path, results: Results) -> None:
    """Remove the finished models of an evaluation whose results have been written."""
    Parts(folder, results.manifest).forget()


Step = Callable[[float, str], None]  # the share of a model that is done, and what is next


def _within(progress: Progress | None, index: int, count: int, model: Pretrained) -> Step:
    def step(share: float, what: str) -> None:
        if progress is not None:
            progress(round(1000 * (index + share)), 1000 * count, f"{model.name}  {what}")

    return step


def _measure(
    source: Pretrained, texts: Mapping[str, str], settings: Settings,
    first: dict[str, torch.Tensor] | None, step: Step,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:  # fmt: skip
    """What one model gives, as JSON holds it, and the embeddings of an encoder."""
    from ...hf.evaluate import decodes

    step(0.0, "loading")
    tokenizer, model = source.load_tokenizer(), source.load_model(head=True)
    if model.config.is_encoder_decoder:
        raise InputError(f"{source.name} has an encoder and a decoder, which is not supported here")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    about = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "converted": getattr(model.config, "reassoc", None) is not None,
        "encoder": not decodes(model), "tokens": {}, "rows": [], "recall": [], "times": [],
    }  # fmt: skip
    if decodes(model):
        _decoder(model, tokenizer, texts, settings, about, step)
        return about, {}
    if settings.distances:
        raise InputError(f"{source.name} writes no text: it cannot be asked for a key; leave out --recall")
    return about, _encoder(source.name, model, tokenizer, texts, settings, about, first, step)


def _decoder(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str],
    settings: Settings,
    about: dict[str, Any],
    step: Step,
) -> None:
    from ...hf.calibrate import spread
    from ...hf.evaluate import block_losses, check_length, recall
    from ...hf.text import blocks, by_name

    lengths = settings.contexts(encoder=False)
    longest = max(lengths)
    check_length(model, longest)
    jobs = [(name, length) for name in texts for length in lengths]
    total = len(jobs) + len(settings.distances)
    sizes = {length: _state_bytes(model, length) for length in lengths}
    chosen = {
        n: spread(rows, settings.tokens) for n, rows in by_name(blocks, tokenizer, texts, longest).items()
    }
    about["tokens"] = {name: _digest(rows) for name, rows in chosen.items()}
    for done, (name, length) in enumerate(jobs):
        what = f"perplexity, {name}, {length:,} tokens"
        rows = [
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for row in chosen[name]
            for ids in row["input_ids"].split(length)
            if len(ids) == length
        ]
        step(done / total, what)
        start = time.perf_counter()
        losses = block_losses(model, rows, _share(step, done, total, len(rows), what))
        about["rows"].append({"text": name, "length": length, "losses": losses, "state_bytes": sizes[length]})
        about["times"].append({"what": what, "seconds": time.perf_counter() - start})
    for done, distance in enumerate(settings.distances, len(jobs)):
        what = f"recall, {distance:,} tokens"
        step(done / total, what)
        start = time.perf_counter()
        inner = _share(step, done, total, settings.trials, what)
        got = recall(model, tokenizer, list(texts.values()), distance, trials=settings.trials, progress=inner)
        about["recall"].append(got._asdict())
        about["times"].append({"what": what, "seconds": time.perf_counter() - start})


def _encoder(
    source: str, model: Any, tokenizer: Any, texts: Mapping[str, str], settings: Settings,
    about: dict[str, Any], first: dict[str, torch.Tensor] | None, step: Step,
) -> dict[str, torch.Tensor]:  # fmt: skip
    from ...hf.calibrate import spread
    from ...hf.evaluate import agreement, embeddings
    from ...hf.text import by_name, lines

    found: dict[str, torch.Tensor] = {}
    contexts = settings.contexts(encoder=True)
    cut = {length: by_name(lines, tokenizer, texts, length) for length in contexts}
    jobs = [(name, length) for name in texts for length in contexts]
    for done, (name, length) in enumerate(jobs):
        what = f"embeddings, {name}, {length:,} tokens"
        step(done / len(jobs), what)
        rows, key = spread(cut[length][name], settings.tokens), f"{name}:{length}"
        about["tokens"][key] = _digest(rows)
        start = time.perf_counter()
        found[key] = embeddings(model, rows)
        about["times"].append({"what": what, "seconds": time.perf_counter() - start})
        original = found[key] if first is None else first.get(key)
        if original is None or original.shape != found[key].shape:
            raise InputError(
                f"{source} and the first model differ in kind, or in the size of their embeddings"
            )
        got = agreement(original, found[key])
        about["rows"].append(
            {"text": name, "length": length, "lines": got.lines, "cosine": got.mean, "cosine_5": got.low}
        )
    return found


def _share(step: Step, done: int, total: int, count: int, what: str) -> Callable[[int], None]:
    return lambda inner: step((done + inner / count) / total, what)


def _digest(rows: Sequence[Mapping[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row["input_ids"].numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def _state_bytes(model: Any, length: int) -> int:
    """Bytes that a model keeps of one sequence in order to write its next token."""
    from ...hf import cache_bytes

    outputs = model(torch.ones(1, length, dtype=torch.int64, device=model.device), use_cache=True)
    return cache_bytes(outputs["cache" if "cache" in outputs else "past_key_values"])


def _results(names: list[str], found: list[dict[str, Any]], manifest: dict[str, Any]) -> Results:
    rows, recall, times = [], [], []
    for index, (name, part) in enumerate(zip(names, found, strict=True)):
        about = {"model": name, "converted": int(part["converted"])}
        for row, original in zip(part["rows"], found[0]["rows"], strict=True):
            measured = row if part["encoder"] else _perplexity(row, original["losses"], index == 0)
            rows.append(about | measured)
        recall += [about | row for row in part["recall"]]
        times += [about | row for row in part["times"]]
    return Results(rows, recall, times, manifest, found[0]["encoder"])


def _perplexity(row: dict[str, Any], original: list[float], own: bool) -> dict[str, Any]:
    """Perplexity, and its ratio to the first model's with a 95 % interval from differences block by block."""
    losses = row["losses"]
    count, mean = len(losses), sum(losses) / len(losses)
    differences = [a - b for a, b in zip(losses, original, strict=True)]
    shift = sum(differences) / count
    spread = sum((d - shift) ** 2 for d in differences) / (count - 1) if count > 1 else math.nan
    half = 0.0 if own else 1.96 * math.sqrt(spread / count)
    return {
        "text": row["text"], "length": row["length"], "blocks": count, "perplexity": math.exp(mean),
        "ratio": math.exp(shift), "ratio_low": math.exp(shift - half), "ratio_high": math.exp(shift + half),
        "state_bytes": row["state_bytes"],
    }  # fmt: skip
