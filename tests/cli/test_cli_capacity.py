"""`reassoc capacity`: what it prints and writes; one line and exit code 2 for every mistake."""

import json

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from reassoc.cli._app import run

TINY = ["--models", "elu+1,elu+1:delta", "--pairs", "3,5", "--dim", "6", "--max-steps", "20"]


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """80 columns; no stray default folder."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


def test_everything_is_written_and_the_answer_comes_first(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert run(["capacity", *TINY, "--seeds", "0,1", "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    lines = printed.splitlines()
    assert lines[0] == "How many pairs can a linear attention memory keep apart?"
    assert lines[1] == "- No memory held more pairs than it has features."
    assert lines[2].startswith("- Pairs held: elu+1 (6 features) held none and lost 3; elu+1:delta (6 ")
    assert "16 trainings hit the limit of 20 steps" in printed
    places = [printed.index(f"\n{title}\n") for title in ("Setting 1", "Setting 2", "Closed form")]
    assert places == sorted(places)
    assert lines[-1] == f"Report: {out / 'report.html'}"
    assert {p.name for p in out.iterdir()} == {
        "capacity.csv", "capacity.json", "closed.csv", "curves.csv", "times.csv", "report.html", "figures",
    }  # fmt: skip
    whole = json.loads((out / "capacity.json").read_text())
    assert whole["command"] == (
        "reassoc capacity --models elu+1,elu+1:delta --pairs 3,5 --seeds 0,1 --dim 6 --max-steps 20"
    )
    assert len(whole["rows"]) == 2 * 2 * 2 * 2 and whole["settings"]["parts"] == ["closed", "1", "2"]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page and page.count("<svg ") == 2 + 3 and "step limit" in page


def test_keys_of_a_file_are_judged_and_nothing_is_trained(tmp_path, capsys):
    path = tmp_path / "my keys.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_file({"key": torch.randn(2, 9, 4, generator=generator)}, path)
    assert run(["capacity", "--keys", str(path), "--models", "elu+1,dpfp-1:delta", "--out", "o"]) == 0
    printed, err = capsys.readouterr()
    assert err == "" and "Closed form" in printed and "Setting" not in printed
    whole = json.loads((tmp_path / "o" / "capacity.json").read_text())
    assert (
        whole["command"] == ("reassoc capacity --models elu+1,dpfp-1:delta --keys 'my keys.safetensors'")
        and whole["rows"] == []
    )
    assert whole["keys"]["name"] == "my keys.safetensors"
    closed = (tmp_path / "o" / "closed.csv").read_text().splitlines()
    assert len(closed) == 1 + 2 * 2 and closed[1].startswith("my keys,0,9,elu+1,")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--setting", "3"], ["--setting: expected a list of closed, 1, 2; got '3'"]),
        (["--setting", ","], ["--setting"]),
        (["--models", "elu"], ["unknown map 'elu'"]),
        (["--models", "elu+1:gated-delta"], ["--models", "rules sum and delta"]),
        (["--pairs", "many"], ["--pairs: expected whole numbers"]),
        (["--pairs", "1"], ["--pairs: expected numbers from 2"]),
        (["--seeds", "-1"], ["--seeds"]),
        (["--dim", "0"], ["--dim"]),
        (["--setting", "closed", "--models", "softmax"], ["--models: softmax has no memory of features"]),
        (["--max-steps", "0"], ["--max-steps: expected at least 1, got 0"]),
        (["--keys", "missing.safetensors"], ["--keys: missing.safetensors is not a readable"]),
        (["--keys", "x", "--setting", "1"], ["--keys: the file is for the closed form"]),
        (["--speed"], ["--speed"]),
    ],
)
def test_a_mistake_is_one_line(arguments, words, capsys, tmp_path):
    assert run(["capacity", *arguments, "--out", str(tmp_path / "o")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reassoc: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, (word, err)
    assert not (tmp_path / "o").exists()


def test_a_file_is_no_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert run(["capacity", *TINY, "--out", "file"]) == 2
    assert "--out: file exists and is not a folder" in capsys.readouterr()[1]


def test_help_is_enough_to_work_from(capsys):
    assert run(["capacity", "--help"]) == 0
    text = capsys.readouterr()[0]
    for word in (
        "--setting",
        "closed",
        "--models",
        "softmax",
        "--keys",
        "--full",
        "--max-steps",
        "report.html",
    ):
        assert word in text
