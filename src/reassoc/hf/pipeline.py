"""A whole conversion as one run that can be interrupted: convert, calibrate, transfer, tune, save."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from .._errors import InputError
from .._files import atomic_write
from .._memory import forget_peak, resident
from .._parts import Parts
from .calibrate import calibrate, spread
from .convert import convert, kernel_layers
from .evaluate import agreement, block_losses, check_length, decodes, embeddings
from .observe import softmax_teacher
from .plan import Plan
from .text import Example, by_name, examples
from .training import Training
from .transfer import transfer
from .tune import tune

FORMAT = "reassoc-conversion-1"
RECORD = "conversion.json"
Say = Callable[[str], None]


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Mapping[str, str],
    plan: Plan,
    out: Path,
    *,
    tests: Mapping[str, str] | None = None,
    about: Mapping[str, Any] | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Convert a model and write it to a folder, whole or not at all.

    After every stage the kernels, or the tuned model, are kept in a hidden folder beside ``out``, and inside
    a stage the trainer's checkpoints: the same call goes on from there. It is removed at the end.

    Args:
        model: as it was loaded; changed in place. tokenizer: of the model, saved with it.
        texts: to calibrate and train on, by name. plan: what to do.
        out: the folder to write; missing or empty. tests: other texts, by name, to judge every stage on:
            perplexity for a model that writes text, otherwise the cosine to the model's own embeddings.
        about: what else decides the result, as JSON holds it: hashes of the inputs, versions, the machine.
        say: called with a line about every finished stage.

    Returns:
        What ``conversion.json`` in the folder holds.

    Raises:
        InputError: a plan, a model or texts that do not fit, or ``out`` is there and not empty.
        OSError: ``out`` cannot be written.
    """
    plan.check()
    check_out(out)
    if model.config.is_encoder_decoder:
        raise InputError(
            f"{type(model).__name__} has an encoder and a decoder: convert it with reassoc.hf.convert, the "
            "stages of training take one stack"
        )
    if plan.tune_steps and not decodes(model):
        raise InputError(f"{type(model).__name__} predicts no next token; only decoders are tuned")
    if plan.tune_steps and importlib.util.find_spec("peft") is None:  # now, not after hours of stage 1
        raise InputError("stage 2 needs the package peft; pip install 'reassoc[hf]', or set no steps for it")
    check_length(model, plan.length)
    cut = functools.partial(examples, model)
    rows = [row for own in by_name(cut, tokenizer, texts, plan.length).values() for row in own]
    kept = by_name(cut, tokenizer, tests or {}, plan.length)
    judged = {name: spread(own, plan.eval_tokens) for name, own in kept.items()}
    _convert(model, plan)
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    key = {"format": FORMAT, "plan": json.loads(json.dumps(asdict(plan))), "tests": sorted(judged)}
    key |= dict(about or {})
    return _Run(model, tokenizer, rows, plan, judged, Parts(out.parent, key), say).finish(out, key)


def check_out(out: Path) -> None:
    """Raise `InputError` if a folder cannot become a result, before any work: there, or not to be made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not an empty folder; choose another, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):
        raise InputError(f"{out.parent}: cannot be written; choose another folder for the result")


def _convert(model: PreTrainedModel, plan: Plan) -> None:
    if plan.layers == ():
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attention dropout")  # evaluation mode and the record say it
        convert(
            model, plan.feature_map, map_options=plan.map_options, window=plan.window, sinks=plan.sinks,
            layers=plan.layers, rule=plan.rule,
        )  # fmt: skip
    if plan.window is not None and not any(layer.hybrid for layer in kernel_layers(model)):
        raise InputError("window is for layers that see earlier tokens only, and this model has none")


class _Run:
    """The stages of one run, each done once: what is kept is taken from there."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, rows: list[Example], plan: Plan,
        judged: dict[str, list[Example]], parts: Parts, say: Say | None,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.rows, self.plan = model, tokenizer, rows, plan
        self.judged, self.parts, self.say = judged, parts, say
        self.originals: dict[str, torch.Tensor] = {}
        self.stages: list[dict[str, Any]] = []

    def finish(self, out: Path, key: dict[str, Any]) -> dict[str, Any]:
        """Do what is left, and write the result."""
        plan, layers = self.plan, _kernels(self.model)
        tuned = self.parts.folder / "tuned"
        if self.judged and decodes(self.model):
            self._judge("softmax")
        if len(layers):
            self._stage("calibrate", self._calibrate)
            self._judge("calibrate")
        if len(layers) and plan.transfer_steps and any(True for _ in layers.parameters()):
            self._stage("transfer", self._transfer)
            self._judge("transfer")
        if plan.tune_steps:
            if not self._stage("tune", lambda: self._tune(tuned)):
                self.model = type(self.model).from_pretrained(tuned).to(self.model.device)
            self._judge("tune")
        else:
            self._save(tuned)
        with contextlib.suppress(FileNotFoundError):
            out.rmdir()  # only an empty one
        record = {**key, "stages": self.stages}
        self.tokenizer.save_pretrained(tuned)
        with atomic_write(tuned / RECORD) as path:
            path.write_text(json.dumps(record, indent=1) + "\n")
        os.rename(tuned, out)
        self.parts.forget()
        return record

    def _stage(self, name: str, work: Callable[[], list[dict[str, float]]]) -> bool:
        """Do a stage, or find it done; whether it was done now."""
        kept = self.parts.folder / f"{name}.safetensors"
        record = self.parts.get(name)
        fresh = record is None
        if record is None:
            # What an interrupted run had done by its last checkpoint is not in this one's seconds.
            begun = any((self.parts.folder / f"{name}-steps").glob("checkpoint-*"))
            with _measured() as cost:
                log = work()
            self.model.eval()
            if name != "tune":
                save_file(_kernels(self.model).state_dict(), kept)
            record = {"stage": name, **cost, "continued": begun, "log": log}
            self.parts.put(name, record)
        elif name != "tune":
            _kernels(self.model).load_state_dict(load_file(kept))
        self.stages.append(record)
        return fresh

    def _calibrate(self) -> list[dict[str, float]]:
        calibrate(
            self.model, self.rows, tokens=self.plan.calibration_tokens, batch=self.plan.batch,
            bfloat16=self.plan.bfloat16,
        )  # fmt: skip
        return []

    def _transfer(self) -> list[dict[str, float]]:
        plan = self.plan
        return transfer(
            self.model, self.rows, self._training("transfer", plan.transfer_steps, plan.transfer_rate)
        )

    def _tune(self, folder: Path) -> list[dict[str, float]]:
        training = self._training("tune", self.plan.tune_steps, self.plan.kernel_rate)
        self.model, log = tune(self.model, self.rows, training, objective=self.plan.objective)
        self._save(folder)
        return log

    def _training(self, stage: str, steps: int, rate: float) -> Training:
        plan = self.plan
        return Training(
            steps=steps, batch=plan.batch, learning_rate=rate, adapter_rate=plan.tune_rate,
            folder=self.parts.folder / f"{stage}-steps", save_every=plan.save_every, bfloat16=plan.bfloat16,
            seed=plan.seed,
        )  # fmt: skip

    def _save(self, folder: Path) -> None:
        self.model.eval()
        self.model.save_pretrained(folder)

    def _judge(self, name: str) -> None:
        """The test figures after a stage, with the stage's record."""
        if name == "softmax":
            self.stages.append({"stage": name})
        if self.judged:
            found = self.parts.get(f"{name}-test")
            if found is None:
                softmax = softmax_teacher() if name == "softmax" else contextlib.nullcontext()
                with softmax, _measured() as cost:
                    found = {"tests": {text: self._figure(text) for text in self.judged}}
                found |= {"test_seconds": cost["seconds"]}
                self.parts.put(f"{name}-test", found)
            self.stages[-1] |= found
        self._tell(name, self.stages[-1])

    def _figure(self, text: str) -> dict[str, float]:
        rows = self.judged[text]
        if decodes(self.model):
            losses = block_losses(self.model, rows)
            return {
                "perplexity": math.exp(sum(losses) / len(losses)), "blocks": len(losses),
                "length": self.plan.length,
            }  # fmt: skip
        if text not in self.originals:  # only maps change, so the model stays its own original
            with softmax_teacher():
                self.originals[text] = embeddings(self.model, rows)
        return agreement(self.originals[text], embeddings(self.model, rows))._asdict()

    def _tell(self, name: str, record: Mapping[str, Any]) -> None:
        if self.say is None:
            return
        words = [name]
        if "seconds" in record:
            words.append(f"{record['seconds']:,.0f} s")
        if record.get("peak_bytes"):
            words.append(f"{record['peak_bytes'] / 1e9:.2f} GB")
        if record.get("log"):
            words.append(f"loss {record['log'][0]['loss']:.4g} to {record['log'][-1]['loss']:.4g}")
        for text, figure in record.get("tests", {}).items():
            kind = "perplexity" if "perplexity" in figure else "mean"
            words.append(f"{text} {'perplexity' if kind == 'perplexity' else 'cosine'} {figure[kind]:.4f}")
        self.say(", ".join(words))


def _kernels(model: PreTrainedModel) -> nn.ModuleList:
    return nn.ModuleList(kernel_layers(model))


@contextlib.contextmanager
def _measured() -> Iterator[dict[str, Any]]:
    """Seconds and peak resident bytes of the block, ``None`` where the system does not tell."""
    cost: dict[str, Any] = {"seconds": None, "peak_bytes": None}
    start = time.perf_counter()
    with contextlib.suppress(OSError):
        forget_peak()
    yield cost
    cost["seconds"] = time.perf_counter() - start
    with contextlib.suppress(OSError):
        cost["peak_bytes"] = resident("VmHWM")
