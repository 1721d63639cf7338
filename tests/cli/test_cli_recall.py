"""`reassoc recall`: what it prints and writes; one line and exit code 2 for every mistake."""

import csv
import json

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from reassoc.cli._app import run

QUICK = [
    "--models", "softmax:conv=2,elu+1:delta:conv=2", "--head-dims", "4", "--train", "8:2",
    "--test", "8:2,12:3", "--vocabulary", "16", "--width", "16", "--layers", "1", "--heads", "1",
    "--seeds", "3", "--steps", "2", "--batch", "8", "--every", "1", "--count", "10",
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


def refused(capsys, arguments, *words):
    assert run(["recall", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reassoc: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, (word, err)


def test_the_answer_comes_first_and_everything_is_written(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert run(["recall", *QUICK, "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    assert printed.index("Of linear attention") < printed.index("Accuracy of every recipe")
    assert printed.splitlines()[-1] == f"Report: {out / 'report.html'}"
    assert {path.name for path in out.iterdir()} == {
        "recall.csv", "curves.csv", "times.csv", "recall.json", "report.html", "figures"
    }  # fmt: skip
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"{name}.{kind}" for name in ("state", "pairs", "training") for kind in ("png", "svg")
    }
    with (out / "recall.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["recipe"], row["tokens"], row["seed"]) for row in rows] == [
        (recipe, tokens, "3") for recipe in ("softmax:conv=2", "elu+1:delta:conv=2") for tokens in ("8", "12")
    ]
    whole = json.loads((out / "recall.json").read_text())
    assert whole["settings"]["train"] == ["8:2"] and whole["settings"]["output_norm"] is True
    assert whole["command"] == f"reassoc recall {' '.join(QUICK)}"
    assert str(tmp_path) not in (out / "report.html").read_text(encoding="utf-8")


def test_the_same_command_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        assert run(["recall", *QUICK, "--out", str(tmp_path / name)]) == 0
    for path in (tmp_path / "a").rglob("*.*"):
        if path.name != "times.csv":
            other = tmp_path / "b" / path.relative_to(tmp_path / "a")
            assert path.read_bytes() == other.read_bytes(), path.name


def test_options_reach_the_experiment(tmp_path):
    options = [
        "--rates",
        "0.01,0.02",
        "--no-output-norm",
        "--stop",
        "0.5",
        "--weight-decay",
        "0",
        "--models",
        "relu",
    ]
    assert run(["recall", *QUICK, *options, "--out", str(tmp_path / "o")]) == 0
    whole = json.loads((tmp_path / "o" / "recall.json").read_text())
    got = {
        name: whole["settings"][name] for name in ("rates", "output_norm", "stop", "weight_decay", "recipes")
    }
    assert got == {
        "rates": [0.01, 0.02], "output_norm": False, "stop": 0.5, "weight_decay": 0.0, "recipes": ["relu"]
    }  # fmt: skip
    assert "--no-output-norm" in whole["command"]


def test_mistakes_are_one_line(tmp_path, capsys):
    refused(capsys, ["--models", "elu+2"], "elu+2", "known")
    refused(capsys, ["--models", "softmax:carried"], "carried")
    refused(capsys, ["--models", "elu+1:rotary", "--head-dims", "3"], "elu+1:rotary", "even")
    refused(capsys, ["--train", "64"], "--train", "TOKENS:PAIRS")
    refused(capsys, ["--test", "16:8"], "--test", "16:8")
    refused(capsys, ["--head-dims", "x"], "--head-dims", "whole numbers")
    refused(capsys, ["--steps", "0"], "--steps")
    (tmp_path / "file").write_text("")
    refused(capsys, ["--out", str(tmp_path / "file")], "--out", "not a folder")
    assert not (tmp_path / "reassoc-recall").exists()
