"""`reassoc seq2seq`: what it prints and writes; one line and exit code 2 for every mistake."""

import csv
import json

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sacrebleu")
pytest.importorskip("typer")

from reassoc.cli._app import run

QUICK = [
    "--models", "softmax:learned,elu+1:learned", "--seeds", "3", "--width", "16", "--layers", "1",
    "--heads", "2", "--steps", "2", "--batch", "8", "--every", "1", "--held-out", "4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@pytest.fixture()
def pairs(tmp_path):
    path = tmp_path / "private" / "pairs.tsv"
    path.parent.mkdir()
    path.write_text("".join(f"{n} and {n + 1}\t{n}\n" for n in range(40)))
    return path


def refused(capsys, arguments, *words):
    assert run(["seq2seq", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reassoc: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, (word, err)


def test_the_answer_comes_first_and_everything_is_written(tmp_path, pairs, capsys):
    out = tmp_path / "new" / "folder"
    assert run(["seq2seq", "--pairs", str(pairs), *QUICK, "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    assert printed.index("Of kernel attention") < printed.index("Scores") < printed.index("Some translations")
    assert printed.splitlines()[-1] == f"Report: {out / 'report.html'}"
    assert {path.name for path in out.iterdir()} == {
        "seq2seq.csv", "curves.csv", "examples.csv", "times.csv", "seq2seq.json", "report.html", "figures"
    }  # fmt: skip
    with (out / "seq2seq.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["recipe"], row["seed"], row["steps"]) for row in rows] == [
        (recipe, "3", "2") for recipe in ("softmax:learned", "elu+1:learned")
    ]
    whole = json.loads((out / "seq2seq.json").read_text())
    assert whole["pairs"]["name"] == "pairs.tsv" and whole["pairs"]["test"] == 4
    assert whole["settings"]["tokenize"] == "13a" and "tok:13a" in whole["bleu"]
    assert whole["command"] == f"reassoc seq2seq --pairs pairs.tsv {' '.join(QUICK)}"
    assert str(tmp_path) not in (out / "report.html").read_text(encoding="utf-8")


def test_the_same_command_gives_the_same_bytes(tmp_path, pairs):
    for name in ("a", "b"):
        assert run(["seq2seq", "--pairs", str(pairs), *QUICK, "--out", str(tmp_path / name)]) == 0
    for path in (tmp_path / "a").rglob("*.*"):
        if path.name != "times.csv":
            other = tmp_path / "b" / path.relative_to(tmp_path / "a")
            assert path.read_bytes() == other.read_bytes(), path.name


def test_two_files_and_the_default_task(tmp_path, pairs):
    for index, name in enumerate(("de", "en")):
        lines = [line.split("\t")[index] for line in pairs.read_text().splitlines()]
        (tmp_path / name).write_text("\n".join(lines))
    both = ["--source", str(tmp_path / "de"), "--target", str(tmp_path / "en")]
    assert run(["seq2seq", *both, *QUICK, "--out", str(tmp_path / "o")]) == 0
    assert json.loads((tmp_path / "o" / "seq2seq.json").read_text())["pairs"]["name"] == "de to en"
    assert run(["seq2seq", *QUICK, "--out", str(tmp_path / "n")]) == 0
    whole = json.loads((tmp_path / "n" / "seq2seq.json").read_text())
    assert whole["pairs"]["name"] == "number words to digits" and whole["settings"]["tokenize"] == "char"


def test_mistakes_are_one_line(tmp_path, pairs, capsys):
    given = ["--pairs", str(pairs)]
    refused(capsys, ["--pairs", str(tmp_path / "none.tsv")], "none.tsv", "No such file")
    refused(capsys, ["--pairs", str(tmp_path)], "directory")
    refused(capsys, [*given, "--source", str(pairs)], "--pairs excludes")
    refused(capsys, ["--source", str(pairs)], "give --target too")
    refused(capsys, [*given, "--models", "elu+1:carried"], "carried")
    refused(capsys, [*given, "--limit", "8"], "30 of 40 pairs", "line 11", "--limit 9")
    refused(
        capsys, [*given, "--width", "18", "--models", "elu+1:rotary", "--heads", "6"], "elu+1:rotary", "even"
    )
    refused(capsys, [*given, "--tokenize", "words"], "--tokenize", "13a")
    refused(capsys, [*given, "--seeds", "x"], "--seeds", "whole numbers")
    pairs.write_bytes(b"a\tb\nc d\n")
    refused(capsys, given, "pairs.tsv line 2", "no tab")
    pairs.write_bytes(b"a\tb\n\xe9\tc\n")
    refused(capsys, given, "pairs.tsv line 2", "UTF-8")
    (tmp_path / "file").write_text("")
    refused(capsys, ["--out", str(tmp_path / "file")], "--out", "not a folder")
    assert not (tmp_path / "reassoc-seq2seq").exists()
