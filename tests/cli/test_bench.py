"""`reassoc bench`: what it prints and writes; one line and exit code 2 for every mistake."""

import json

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from reassoc.cli._app import run
from reassoc.lab.bench import run as run_module

QUICK = [
    "--lengths",
    "16,40",
    "--repeats",
    "2",
    "--heads",
    "2",
    "--head-dim",
    "8",
    "--peers",
    "none",
    "--threads",
    "1",
]


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """No ceilings (seconds) and no memory (a process); 80 columns; no stray default folder."""
    ceilings = {"flops": 1e11, "flops_from": "a test", "bytes": 1e10}
    monkeypatch.setattr(run_module, "measure_ceilings", lambda settings: ceilings)
    monkeypatch.setattr(run_module, "measure_memory", lambda s, cases, progress: ([1 << 20] * len(cases), ""))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


def refused(capsys, arguments, *words):
    assert run(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reassoc: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, (word, err)


def test_ratios_come_first_and_everything_is_written(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert run(["bench", *QUICK, "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    lines = printed.splitlines()
    assert lines[0] == "forward: how many times longer the others take"
    places = [printed.index(title) for title in (
        "forward: how many times", "forward and backward: how many", "one decode step: how many",
        "forward: milliseconds", "one decode step: microseconds", "ceilings: 100 GFLOP/s",
    )]  # fmt: skip
    assert places == sorted(places)
    assert lines[-1] == f"Report: {out / 'report.html'}"
    for name in ("elu+1 sum", "favor+ sum", "identity decay", "identity delta", "identity gated-delta"):
        assert f"\n {name} " in printed and f"{name} is never slower than softmax " in printed
    # Sentences may be longer; tables fit the terminal.
    assert max(len(line.rstrip()) for line in lines if line.startswith(" ")) <= 80
    ratio = next(line for line in lines if "softmax (SDPA)" in line)
    assert ratio.count("x [") == 2
    assert {p.name for p in out.iterdir()} == {
        "bench.csv", "bench.json", "ratios.csv", "report.html", "figures"
    }  # fmt: skip
    whole = json.loads((out / "bench.json").read_text())
    assert whole["command"] == (
        "reassoc bench --lengths 16,40 --peers none --heads 2 --head-dim 8 --threads 1 --repeats 2"
    )
    assert whole["settings"]["value_dim"] == 8 and whole["settings"]["lengths"] == [16, 40]
    assert str(tmp_path) not in (out / "report.html").read_text(encoding="utf-8")


def test_options_reach_the_benchmark(tmp_path, capsys):
    options = [
        "--maps",
        "relu,trig",
        "--rules",
        "decay",
        "--directions",
        "forward",
        "--backends",
        "torch,auto",
    ]
    options += [
        "--value-dim",
        "6",
        "--features",
        "12",
        "--normalize",
        "none",
        "--dtype",
        "float64",
        "--seed",
        "3",
    ]
    options += ["--batch", "2", "--limit", "5", "--bidirectional"]
    assert run(["bench", *QUICK, *options, "--out", str(tmp_path / "o")]) == 0
    whole = json.loads((tmp_path / "o" / "bench.json").read_text())
    settings = whole["settings"]
    assert settings["problems"] == [["relu", "decay"], ["trig", "decay"]]
    assert settings["backends"] == ["torch", "auto"] and settings["directions"] == ["forward"]
    got = {
        k: settings[k]
        for k in ("value_dim", "features", "normalize", "dtype", "seed", "batch", "causal", "limit")
    }
    assert got == {
        "value_dim": 6, "features": 12, "normalize": "none", "dtype": "float64", "seed": 3, "batch": 2,
        "causal": False, "limit": 5.0,
    }  # fmt: skip
    assert {row["status"] for row in whole["rows"]} == {"measured"}
    names = [about["name"] for about in whole["contenders"]]
    assert names == ["relu decay [torch]", "relu decay", "trig decay [torch]", "trig decay", "softmax (SDPA)"]
    assert all(option in whole["command"] for option in ("--bidirectional", "--rules decay", "--limit 5.0"))
    assert "relu decay [torch]" in capsys.readouterr()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "a"], ["--lengths: expected whole numbers separated by commas, got 'a'"]),
        (["--lengths", "0"], ["--lengths: expected numbers of tokens from 1"]),
        (["--maps", "elu"], ["--maps: unknown map 'elu'", "elu+1"]),
        (["--maps", ","], ["--maps"]),
        (["--rules", "add"], ["--rules: expected a list of sum, decay, delta, gated-delta, kda; got 'add'"]),
        (["--directions", "up"], ["--directions", "'up'"]),
        (["--backends", "cuda"], ["--backends", "'cuda'"]),
        (["--peers", "flash"], ["--peers", "'flash'", "opengdn"]),
        (["--heads", "0"], ["--heads"]),
        (["--heads", "many"], ["--heads"]),
        (["--repeats", "0"], ["--repeats"]),
        (["--dtype", "int8"], ["--dtype"]),
        (["--normalize", "both"], ["--normalize"]),
        (["--threads", "0"], ["--threads"]),
        (["--speed"], ["--speed"]),
    ],
)
def test_a_mistake_is_one_line(arguments, words, capsys, tmp_path):
    refused(capsys, [*arguments, "--out", str(tmp_path / "o")], *words)
    assert not (tmp_path / "o").exists()


def test_a_file_is_no_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    refused(capsys, [*QUICK, "--out", str(tmp_path / "file")], "is not a folder")


def test_help_is_enough_to_work_from(capsys):
    assert run(["bench", "--help"]) == 0
    text = capsys.readouterr()[0]
    for word in (
        "--lengths",
        "--bidirectional",
        "gated-delta",
        "performer-pytorch",
        "report.html",
        "reassoc bench",
    ):
        assert word in text
