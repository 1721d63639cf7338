"""A run that is killed goes on to the very same losses: kill -9 of a real process, twice."""

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from reassoc.lab.lm.container import read
from reassoc.lab.lm.models import FORMAT

# Carried state, redraws, dropout and a convolution: everything that a checkpoint has to bring back.
RECIPE = "favor+:features=8:redraw=7:conv=3:carried"
OPTIONS = [
    "lm", "--models", RECIPE, "--width", "16", "--layers", "1", "--heads", "2", "--segment", "16",
    "--batch", "2", "--steps", "24", "--warmup", "3", "--dropout", "0.1", "--checkpoint", "5",
    "--threads", "1",
]  # fmt: skip
PLAIN = "from reassoc.cli import main; main()"
# Dies after step 17: the checkpoint of step 15 is there, two steps are lost.
BETWEEN = """
import os, signal
from reassoc.lab.lm.trainer import Trainer
step = Trainer.step
def stepped(self):
    step(self)
    if self.step_number == 17:
        os.kill(os.getpid(), signal.SIGKILL)
Trainer.step = stepped
"""
# Goes on from step 15 and dies when the checkpoint of step 20 is written but has not taken its place.
WRITING = """
import os, signal
replace = os.replace
def replaced(source, target):
    if "checkpoints" in str(target):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = replaced
"""


def run(script, out, text):
    return subprocess.run(
        [sys.executable, "-c", script, *OPTIONS, "--text", str(text), "--out", str(out)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip


def test_killed_twice_and_resumed_gives_identical_results(tmp_path):
    text, whole, out = tmp_path / "text.txt", tmp_path / "whole", tmp_path / "out"
    text.write_bytes(bytes(ord("a") + i * i % 23 for i in range(2000)))
    name = RECIPE.replace(":", "_") + "-seed0.safetensors"
    for script in (BETWEEN, WRITING):
        killed = run(script + PLAIN, out, text)
        assert killed.returncode == -signal.SIGKILL and killed.stdout == "", killed.stderr
        assert (out / "checkpoints" / name).exists() and not (out / "models").exists()
    for folder in (out, whole):
        done = run(PLAIN, folder, text)
        assert done.returncode == 0, done.stderr
    models = [folder / "models" / name for folder in (whole, out)]
    losses = [read(path, FORMAT, "model")[1]["losses"] for path in models]
    assert len(losses[0]) == 24 and losses[0] == losses[1]  # every loss, with all its digits
    assert models[0].read_bytes() == models[1].read_bytes()  # and every weight
    for file in ("lm.csv", "curves.csv", "samples.csv"):
        assert (out / file).read_bytes() == (whole / file).read_bytes(), file
    assert not list(out.glob(".unfinished*")) and not (out / "checkpoints" / name).exists()
