"""Training towards softmax: gradients, progress, resumption, several processes."""

import copy
import importlib
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
from hf_models import HYBRID, converted, inputs, logits, make, tokens

from reassoc import hf
from reassoc._errors import InputError

# Modules: the package has functions of these names.
stages = importlib.import_module("reassoc.hf.transfer")
loop = importlib.import_module("reassoc.hf.training")
# peft asks a model of transformers by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}


def text(rows=12, length=40, seed=3):
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens(rows, length, seed=seed)
    ]


def student(name="llama", way="codebook"):
    """In single precision, as models are trained."""
    return converted(name, way).float()


def training(**options):
    return hf.Training(**({"steps": 12, "learning_rate": 1e-2, "adapter_rate": 1e-2} | options))


def weights(model):
    return {name: part.detach().clone() for name, part in model.state_dict().items()}


def changed(before, after):
    return {name for name, part in before.items() if not torch.equal(part, after[name])}


@pytest.mark.parametrize("way", ["codebook", "hybrid-decay", "delta"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_gradient_is_that_of_all_layers_at_once(name, way):
    if name == "bert" and way == "delta":
        pytest.skip("an encoder has no delta rule")
    model = converted(name, way)
    x = inputs(name, right=9)
    stage = stages.Transfer(model)
    stage(labels=x["input_ids"], **x)["loss"].backward()
    found = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    got = stage(**x)["loss"].item()
    seen = []
    with torch.no_grad(), hf.softmax_teacher(lambda *parts: seen.append(parts)):
        model.base_model(**x)
    stage.zero_grad()
    losses = []
    for layer, query, key, value, mask, target in seen:
        output = layer(query, key, value, mask)[0]
        heads = []
        for h in range(query.shape[1]):
            o, t = (torch.cat([side[b, h][mask[b]] for b in range(len(query))]) for side in (output, target))
            heads.append((o - t).square().sum() / t.square().sum())
        losses.append(torch.stack(heads).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    wanted = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    # The loss is taken in single precision.
    assert abs(got - loss.item()) < 1e-6 * loss.item()
    assert found.keys() == wanted.keys() and len(found) >= 2
    for n, gradient in wanted.items():
        tiny = 1e-6 * gradient.abs().max().item()
        torch.testing.assert_close(found[n], gradient, rtol=1e-4, atol=tiny, msg=n)


@pytest.mark.parametrize("name", ["llama", "bert", "bart", "gemma3"])
def test_transfer_comes_closer_and_touches_nothing_else(name):
    model = student(name)
    hf.calibrate(model, text())
    before = weights(model)
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    batch = hf.padded(text())
    first = stages.Transfer(model)(**batch)["loss"].item()
    log = hf.transfer(model, text(), training(steps=30))
    assert stages.Transfer(model)(**batch)["loss"].item() < 0.95 * first
    assert log[-1]["step"] == 30 and len(log) == 30 and log[-1]["loss"] < log[0]["loss"]
    assert all("reassoc" in n for n in changed(before, weights(model)))
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags


@pytest.mark.parametrize("stage", ["transfer", "tune", "teacher"])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(stage, tmp_path, monkeypatch):
    def run(folder):
        model = student()
        options = training(folder=folder, save_every=5)
        if stage == "transfer":
            log = hf.transfer(model, text(), options)
        else:
            kind = "teacher" if stage == "teacher" else "next-token"
            model, log = hf.tune(model, text(), options, objective=kind)
        return weights(model), log

    whole, log = run(tmp_path / "whole")
    assert changed(weights(student()), whole)
    collate, count = loop._collate, iter(range(1000))

    def interrupted(rows):
        if next(count) == 8:
            raise KeyboardInterrupt
        return collate(rows)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_collate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut")
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-5"]
    asked = []
    monkeypatch.setattr(loop, "_collate", lambda rows: asked.append(1) or collate(rows))
    again, its_log = run(tmp_path / "cut")
    assert len(asked) < 12  # it did go on, and did not start again
    assert not changed(whole, again) and its_log == log
    third, its_log = run(tmp_path / "cut")  # a finished run is not trained further
    assert not changed(whole, third) and its_log == log


def test_tune_learns_and_leaves_a_plain_model():
    model = student()
    before, flags = weights(model), {n: p.requires_grad for n, p in model.named_parameters()}
    tuned, log = hf.tune(model, text(2), training(steps=30))
    assert type(tuned) is type(model) and log[-1]["loss"] < 0.9 * log[0]["loss"]
    after = weights(tuned)
    assert before.keys() == after.keys()
    assert {n: p.requires_grad for n, p in tuned.named_parameters()} == flags
    touched = changed(before, after)
    assert all("self_attn" in n for n in touched)
    assert {n.split(".")[4] for n in touched} == {*PROJECTIONS, "reassoc"}
    assert tuned.config.use_cache and len(list(hf.kernel_layers(tuned))) == 2
    assert tuned.generate(tokens(1), max_new_tokens=3, pad_token_id=0).shape == (1, 43)


def test_tune_on_the_original_is_the_control():
    model = make("llama").float()
    before = weights(model)
    tuned, log = hf.tune(model, text(2), training(steps=20))
    assert log[-1]["loss"] < log[0]["loss"] and next(hf.kernel_layers(tuned), None) is None
    assert {n.split(".")[4] for n in changed(before, weights(tuned))} == PROJECTIONS
    assert tuned.config._attn_implementation == make("llama").config._attn_implementation


def test_gpt2_is_tuned_too():
    tuned, log = hf.tune(student("gpt2"), text(2), training(steps=20))
    assert log[-1]["loss"] < log[0]["loss"] and len(list(hf.kernel_layers(tuned))) == 2


def test_the_teacher_is_the_model_with_softmax():
    original = make("llama").float()
    model = hf.convert(copy.deepcopy(original), **HYBRID)
    row = text(1)[0]
    x = {name: part[None] for name, part in row.items()}
    wanted, got = (logits(m, x).log_softmax(-1) for m in (original, model))
    divergence = (wanted.exp() * (wanted - got)).sum(-1).mean().item()
    tuned, log = hf.tune(model, [row], training(steps=30), objective="teacher")
    assert log[0]["loss"] == pytest.approx(divergence, rel=1e-3)  # adapters start at nothing
    assert log[-1]["loss"] < 0.5 * log[0]["loss"]
    now = logits(tuned, x).log_softmax(-1)
    assert (wanted.exp() * (wanted - now)).sum(-1).mean().item() < 0.6 * divergence


def test_padding_counts_for_nothing():
    model = student()
    short = [{name: part[:25] for name, part in row.items()} for row in text(1)]
    padding = {"input_ids": torch.full((15,), 9), "attention_mask": torch.zeros(15, dtype=torch.int64)}
    long = [{name: torch.cat([part, padding[name]]) for name, part in row.items()} for row in short]
    for objective in ("next-token", "teacher"):
        one, two = (
            hf.tune(copy.deepcopy(model), rows, training(steps=1), objective=objective)[1]
            for rows in (short, long)
        )
        assert one[0]["loss"] == pytest.approx(two[0]["loss"], rel=1e-4)


def test_bfloat16_keeps_maps_in_single_precision():
    model = student()
    log = hf.transfer(model, text(), training(steps=3, bfloat16=True))
    tuned, more = hf.tune(model, text(), training(steps=3, bfloat16=True))
    assert all(torch.isfinite(torch.tensor([row["loss"] for row in log + more])))
    assert all(p.dtype == torch.float32 for p in tuned.parameters())


def test_a_trainer_moves_the_whole_model():
    model = student()
    stages.Transfer(model).to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_what_cannot_be_trained_is_refused():
    for model in (make("llama"), converted("llama", "pure")):
        with pytest.raises(InputError, match="maps can be trained"):
            hf.transfer(model, text(), training())
    with pytest.raises(InputError, match="at least one example"):
        hf.transfer(student(), [], training())
    for name in ("bert", "bart"):
        with pytest.raises(InputError, match="only decoders"):
            hf.tune(student(name), text(), training())
    for model, objective in ((student(), "nonsense"), (make("llama"), "teacher")):
        with pytest.raises(InputError, match="objective"):
            hf.tune(model, text(), training(), objective=objective)


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import torch
from pathlib import Path
import test_distill as t
from reassoc import hf
model = t.student()
start = t.weights(model)
hf.transfer(model, t.text(), t.training(steps=4, folder=Path(sys.argv[1]) / "a", save_every=2))
middle = t.weights(model)
model, _ = hf.tune(model, t.text(), t.training(steps=4, folder=Path(sys.argv[1]) / "b", save_every=2))
torch.save([start, middle, t.weights(model)], Path(sys.argv[1]) / f"rank{{os.environ['RANK']}}.pt")
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, str(program), str(tmp_path)], capture_output=True, text=True, timeout=540, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    for mine, its in zip(first, second, strict=True):
        assert not changed(mine, its)
    assert changed(first[0], first[1]) and changed(first[1], first[2])
