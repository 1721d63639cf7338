"""Two processes under torchrun train what one trains with the same batch."""

import contextlib
import csv
import os
import subprocess
import sys

import pytest
import torch
from torch import distributed

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from reassoc.cli._app import run as cli
from reassoc.lab.lm.ranks import Ranks

RECIPES = "elu+1:gated-delta:carried,favor+:features=8:redraw=5"
OPTIONS = [
    "lm", "--models", RECIPES, "--width", "16", "--layers", "1", "--heads", "2", "--segment", "16",
    "--batch", "4", "--steps", "20", "--warmup", "3", "--checkpoint", "7", "--threads", "1",
]  # fmt: skip
MAIN = "from reassoc.cli import main; main()"


def run(count, out, text, script=MAIN, options=()):
    words = [sys.executable, "-c", script]
    if count > 1:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(count),
        ]
        words = [*torchrun, "--no-python", *words]
    return subprocess.run(
        [*words, *OPTIONS, *options, "--text", str(text), "--out", str(out)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(ord("a") + i * i % 23 for i in range(2000)))
    return path


def losses(out):
    with (out / "curves.csv").open() as file:
        return [(row["recipe"], int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def test_two_processes_reach_the_losses_of_one(text, tmp_path):
    # The two die after the checkpoint of step 14 and go on, so carried states come back to each of them.
    dying = """
import os, signal
from reassoc.lab.lm.trainer import Trainer
step = Trainer.step
def stepped(self):
    step(self)
    if self.step_number == 16:
        os.kill(os.getpid(), signal.SIGKILL)
Trainer.step = stepped
"""
    assert run(2, tmp_path / "two", text, dying + MAIN).returncode != 0
    two = run(2, tmp_path / "two", text)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("Report: ") == 1  # one of them speaks
    one = run(1, tmp_path / "one", text)
    assert one.returncode == 0, one.stderr
    first, second = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [row[:2] for row in first] == [row[:2] for row in second] and len(first) == 40
    # Gradients differ by the rounding of float32 sums, 1e-7 of their size. AdamW divides each by its own
    # size, so an update differs by about as much of the rate, except where a gradient is itself nearly zero:
    # there by up to a whole update, in a weight that does not matter to first order. 20 updates of 2e-3 in
    # weights of size 0.1 and more, to second order: 1e-5. Unaveraged gradients, states mixed up or other
    # draws change a loss by 1e-3 and more.
    for (_, _, a), (_, _, b) in zip(first, second, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_processes_that_drift_apart_are_stopped(monkeypatch):
    model = torch.nn.Linear(2, 2)
    answers = iter((0, 1))  # what the other process says: the same, then something else

    def all_gather(found, own):
        for part in found:
            part.copy_(own)
        found[1] += next(answers)

    monkeypatch.setattr(distributed, "all_gather", all_gather)
    Ranks(0, 2).check_same(model)
    with pytest.raises(RuntimeError, match="the processes hold different models"):
        Ranks(0, 2).check_same(model)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_that_cannot_be_divided_is_said_once(rank, text, tmp_path, monkeypatch, capsys):
    joined = contextlib.nullcontext(Ranks(rank, 2))
    monkeypatch.setattr("reassoc.lab.lm.ranks", lambda: joined)
    options = [*OPTIONS, "--batch", "3", "--text", str(text), "--out", str(tmp_path)]
    assert cli(options) == 2
    out, err = capsys.readouterr()
    said = "reassoc: --batch: 3 streams cannot be divided among 2 processes\n"
    assert out == "" and err == ("" if rank else said)


def test_torchrun_without_its_environment_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert cli([*OPTIONS, "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reassoc: WORLD_SIZE is 2") and err.count("\n") == 1
