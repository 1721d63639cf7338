"""`reassoc lm`: what it prints and writes; one line and exit code 2 for every mistake."""

import errno
import inspect
import json
import os

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from reassoc.cli._app import run
from reassoc.cli._lm import lm
from reassoc.lab.lm import Settings, container

QUICK = [
    "--width", "16", "--layers", "1", "--heads", "2", "--segment", "16", "--batch", "2", "--steps", "4",
    "--warmup", "1", "--checkpoint", "2", "--threads", "1",
]  # fmt: skip


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(ord("a") + i * i % 23 for i in range(2000)))
    return path


def refused(capsys, arguments, *words):
    assert run(["lm", *QUICK, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reassoc: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, (word, err)


def test_the_answer_comes_first_and_everything_is_written(text, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    arguments = ["--maps", "softmax,elu+1", "--rules", "sum,delta", "--context", "truncated,carried"]
    assert run(["lm", *QUICK, *arguments, "--text", str(text), "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    lines = printed.splitlines()
    assert lines[1].startswith("- Lowest test perplexity: ")
    for recipe in ("softmax", "elu+1", "elu+1:carried", "elu+1:delta", "elu+1:delta:carried"):
        assert f"\n {recipe} " in printed
    assert "left out: softmax:carried: softmax attention would carry a cache" in printed
    assert lines[-1] == f"Report: {out / 'report.html'}"
    assert {path.name for path in out.iterdir()} == {
        "report.html", "lm.csv", "lm.json", "curves.csv", "differences.csv", "samples.csv", "times.csv",
        "figures", "models",
    }  # fmt: skip
    whole = json.loads((out / "lm.json").read_text())
    assert whole["command"] == (
        "reassoc lm --text text.txt --maps softmax,elu+1 --rules sum,delta --context truncated,carried "
        "--steps 4 --batch 2 --segment 16 --width 16 --layers 1 --heads 2 --warmup 1 --checkpoint 2 "
        "--threads 1"
    )
    assert len(whole["rows"]) == 5 and str(tmp_path) not in (out / "report.html").read_text(encoding="utf-8")


def test_the_options_have_the_defaults_of_the_library():
    defaults = {name: p.default for name, p in inspect.signature(lm).parameters.items()}
    for name, value in vars(Settings()).items():
        assert defaults.get(name, value) == value, name


def test_named_models_and_a_grid_come_together(text, tmp_path, capsys):
    arguments = ["--models", "relu:none", "--maps", "elu+1", "--normalize", "none", "--seeds", "3,4"]
    assert run(["lm", *QUICK, *arguments, "--text", str(text), "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out" / "models").iterdir()} == {
        f"{name}_none-seed{seed}.safetensors" for name in ("relu", "elu+1") for seed in (3, 4)
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "elu"], ["unknown map 'elu'", "known: softmax"]),
        (["--models", "elu+1:deltas"], ["unknown part 'deltas'"]),
        (["--models", ","], ["--models"]),
        (["--rules", "delta"], ["--rules belongs to the grid of --maps"]),
        (["--maps", "elu+1", "--rules", "deltas"], ["--rules: unknown 'deltas'"]),
        (["--maps", "trig", "--normalize", "sum"], ["--models: give at least one recipe"]),
        (["--models", "hedgehog:rotary", "--width", "6"], ["does not fit"]),
        (["--segment", "901"], ["1,803 are needed for one segment of 901 in each of 2 streams"]),
        (["--text", "none.txt"], ["none.txt: no such file"]),
        (["--tokenizer", "text.txt"], ["text.txt: not a tokenizer.json"]),
        (["--seeds", "x"], ["--seeds: expected whole numbers"]),
        (["--checkpoint", "0"], ["--checkpoint"]),
        (["--out", "text.txt"], ["text.txt exists and is not a folder"]),
        (["--steps", "many"], ["--steps"]),
    ],
)
def test_mistakes(arguments, words, text, capsys):
    refused(capsys, ["--text", "text.txt", *arguments], *words)
    assert sorted(os.listdir()) == ["text.txt"]


def test_an_unfinished_run_goes_on_with_the_same_settings_only(text, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = ["--models", "elu+1", "--text", str(text), "--out", str(out)]
    write, calls = container.Path.write_bytes, []

    def full_at_the_second(self, data):
        if "checkpoints" not in str(self):
            return write(self, data)
        calls.append(self)
        if len(calls) == 2:
            write(self, data[:50])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(container.Path, "write_bytes", full_at_the_second)
    refused(capsys, arguments, "No space left on device", "the earlier one is as it was")
    monkeypatch.setattr(container.Path, "write_bytes", write)
    (checkpoint,) = (out / "checkpoints").iterdir()
    kept = checkpoint.read_bytes()
    refused(capsys, [*arguments, "--steps", "5"], "made with another settings (steps 4 instead of 5)")
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    refused(capsys, [*arguments, "--text", str(other)], "made with another text")
    checkpoint.write_bytes(kept[:-9])
    refused(capsys, arguments, "damaged")
    checkpoint.write_bytes(kept)
    assert run(["lm", *QUICK, *arguments]) == 0
    assert not checkpoint.exists() and (out / "models" / checkpoint.name).exists()


def test_a_tokenizer_that_does_not_fit_the_checkpoint(text, tmp_path, monkeypatch, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    paths = []
    for size in (30, 31):
        words = {chr(ord("a") + i): i for i in range(size)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
        paths.append(tmp_path / f"{size}.json")
        made.save(str(paths[-1]))
    out = tmp_path / "out"
    arguments = ["--models", "elu+1", "--text", str(text), "--out", str(out)]
    monkeypatch.setattr("reassoc.lab.lm.run.save_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(["lm", *QUICK, *arguments, "--tokenizer", str(paths[0])]) == 2
    capsys.readouterr()
    monkeypatch.undo()
    (checkpoint,) = (out / "checkpoints").iterdir()
    kept = checkpoint.read_bytes()
    for given in (["--tokenizer", str(paths[1])], []):
        refused(capsys, [*arguments, *given], "made with another tokenizer")
    text.write_bytes(b"\xff" * 2000)
    refused(capsys, [*arguments, "--tokenizer", str(paths[0])], "not UTF-8 text", "leave --tokenizer out")
    assert checkpoint.read_bytes() == kept
