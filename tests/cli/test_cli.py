"""The command line: what it writes and prints; one line and exit code 2 for everything that goes wrong."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

import reassoc
import reassoc.lab
from reassoc import feature_maps
from reassoc.cli._app import run
from reassoc.lab import figures, timing

sweep = sys.modules["reassoc.lab.fidelity"]

OPTIONS = ["--maps", "mean,elu+1,favor+", "--widths", "4,8", "--seeds", "0,1"]
PARTS = 4  # mean, elu+1, favor+ at two widths
TABLES = {"results.csv", "heads.csv", "manifest.json", "times.csv"}


def tensors(heads=2, tokens=24, size=8):
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(heads, tokens, size, generator=generator) for n in ("query", "key", "value")}


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    path = tmp_path_factory.mktemp("input") / "qkv.safetensors"
    save_file(tensors(), path)
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Times of 32 tokens, the terminal of 80 columns that is the default, and no stray default folder."""
    monkeypatch.setattr(timing, "LENGTH", 32)
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


@pytest.fixture()
def one_figure(monkeypatch):
    """Only the figure that PLACES names: drawing is what a tiny sweep spends its time on."""
    original = figures._of_model

    def few(results, model):
        return (found for found in original(results, model) if found[0] == "gradients")

    monkeypatch.setattr(figures, "_of_model", few)


@pytest.fixture()
def measured(monkeypatch):
    """Every (map, width) measured, in order."""
    calls = []
    original = sweep.measure

    def measure(candidate, data, seeds):
        calls.append((candidate.name, candidate.width))
        return original(candidate, data, seeds)

    monkeypatch.setattr(sweep, "measure", measure)
    return calls


def fidelity(given, out, *more):
    return run(["fidelity", "--input", str(given), "--out", str(out), *OPTIONS, *more])


def files(folder):
    """Every file under a folder, hidden ones included."""
    return {str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file()}


def content(folder):
    return {name: (Path(folder) / name).read_bytes() for name in sorted(files(folder)) if name != "times.csv"}


def refused(code, capsys, *words):
    """Exit code 2, exactly one line on standard error, nothing on standard output."""
    out, err = capsys.readouterr()
    assert code == 2, (code, out, err)
    assert err.startswith("reassoc: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert len(err.strip()) > len("reassoc:")
    assert out == ""
    for word in words:
        assert str(word) in err, (word, err)
    return err


# ---------------------------------------------------------------------------------------------------------
# What it writes and prints
# ---------------------------------------------------------------------------------------------------------


def test_a_sweep_writes_everything_and_says_where(given, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert fidelity(given, out) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    written = files(out)
    assert written >= {*TABLES, "report.html"}
    drawn = {name for name in written if name.startswith("figures/")}
    assert written == {*TABLES, "report.html", *drawn}  # no parts and no temporary files stay
    assert not list(out.glob(".*"))
    assert {Path(f).suffix for f in drawn} == {".png", ".svg"} and len(drawn) >= 6
    assert printed.rstrip().splitlines()[-1] == f"Report: {out / 'report.html'}"
    for name in ("mean", "elu+1", "favor+"):
        assert sum(line.split()[:1] == [name] for line in printed.splitlines()) == (
            2 if name == "favor+" else 1
        )
    table = [line for line in printed.splitlines() if line.split()[:1] == ["elu+1"]]
    assert "/2" in table[0] and "B" in table[0] and "x" in table[0]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["input"]["name"] == "qkv.safetensors" and manifest["seeds"] == [0, 1]
    assert len((out / "results.csv").read_text().splitlines()) == 1 + 2 * (1 + 1 + 2 * 2)
    assert len((out / "heads.csv").read_text().splitlines()) == 1 + 2 * PARTS
    assert len((out / "times.csv").read_text().splitlines()) == 1 + PARTS
    page = (out / "report.html").read_text(encoding="utf-8")
    assert (
        "reassoc fidelity --input qkv.safetensors --maps mean,elu+1,favor+ --widths 4,8 --seeds 0,1" in page
    )
    assert str(tmp_path) not in page


def test_the_same_command_gives_the_same_bytes(given, tmp_path, capsys):
    assert fidelity(given, tmp_path / "one") == fidelity(given, tmp_path / "two") == 0
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    assert {"results.csv", "heads.csv", "manifest.json", "report.html"} <= one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


def test_another_run_replaces_the_files(given, tmp_path, capsys, one_figure):
    out = tmp_path / "out"
    assert fidelity(given, out) == 0
    first = content(out)
    assert fidelity(given, out) == 0 and content(out) == first
    assert fidelity(given, out, "--seeds", "5") == 0
    assert content(out).keys() == first.keys()
    assert content(out)["results.csv"] != first["results.csv"]  # the comparisons of bytes can fail


def test_synthetic_input(tmp_path, capsys):
    command = ["fidelity", "--synthetic", "--norms", "0.5,2", "--lengths", "6,12", "--out", "s", *OPTIONS]
    assert run(command) == 0
    printed, err = capsys.readouterr()
    assert err == "" and "Report: s/report.html" in printed
    assert set(json.loads(Path("s/manifest.json").read_text())["sites"]) == {
        "norm 0.5, length 6", "norm 0.5, length 12", "norm 2, length 6", "norm 2, length 12",
    }  # fmt: skip
    assert any("error-by-norm" in name for name in files("s"))
    assert Path("s/times.csv").read_text() == "\n"  # random inputs have no layer to time


def test_the_default_input_is_the_sample(capsys, monkeypatch, one_figure):
    """Without --input; what is measured is replaced, because two models take a while."""

    def measure(candidate, data, seeds):
        heads = data.judged[0].query.shape[1]
        of = {c: [0.05] * heads for c in (*sweep.SEED_COLUMNS, *sweep.HEAD_COLUMNS)}
        return sweep.Measured(8, dict.fromkeys(seeds, of), of)

    monkeypatch.setattr(sweep, "measure", measure)
    assert run(["fidelity", "--maps", "elu+1", "--target", "0.25"]) == 0
    out, _ = capsys.readouterr()
    assert "Report: reassoc-fidelity/report.html" in out and "at most 0.25" in out
    manifest = json.loads(Path("reassoc-fidelity/manifest.json").read_text())
    assert manifest["input"]["name"] == "sample.safetensors" and manifest["target_error"] == 0.25
    assert len({site["model"] for site in manifest["sites"].values()}) == 2


FIDELITY = ["input", "maps", "widths", "seeds", "target", "synthetic", "norms", "lengths", "out"]
CAPTURE = ["model", "text", "out", "gguf", "layers", "tokens", "sequence-length", "heads", "prefix"]
HELP = {(): ["version"], ("fidelity",): FIDELITY, ("capture",): CAPTURE, ("backends",): []}


@pytest.mark.parametrize("command, options", HELP.items(), ids=[" ".join(c) or "reassoc" for c in HELP])
def test_help(command, options, capsys):
    assert run([*command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "Usage: reassoc" in out
    for option in [*options, "help"]:
        assert f"--{option} " in out, option
    assert not command or f"reassoc {command[0]}" in out
    assert command or all(name in out for name in ("fidelity", "capture", "backends"))
    assert max(map(len, out.splitlines())) <= 80


def test_version_and_backends(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{reassoc.__version__}\n"
    assert run(["backends"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == list(reassoc.backends()) and err == ""


def test_no_command_prints_help_or_one_line(capsys):
    run([])
    out, err = capsys.readouterr()
    assert err.strip() != "reassoc:" and (err or "Usage" in out)


# ---------------------------------------------------------------------------------------------------------
# Mistakes
# ---------------------------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "unknown command": (["fidelty"], ["fidelty"]),
    "unknown option": (["fidelity", "--map", "mean"], ["--map"]),
    "stray argument": (["fidelity", "qkv.safetensors"], ["qkv.safetensors"]),
    "no value": (["fidelity", "--widths"], ["--widths"]),
    "target no number": (["fidelity", "--target", "small"], ["--target"]),
    "target 0": (["fidelity", "--target", "0"], ["--target"]),
    "target nan": (["fidelity", "--target", "nan"], ["--target", "nan"]),
    "widths no numbers": (["fidelity", "--widths", "64,many"], ["--widths", "whole numbers", "64,many"]),
    "widths fractions": (["fidelity", "--widths", "1.5"], ["--widths", "whole numbers", "1.5"]),
    "widths empty": (["fidelity", "--widths", ""], ["--widths"]),
    "width 0": (["fidelity", "--widths", "0"], ["--widths", "at least 1", "got 0"]),
    "width below 0": (["fidelity", "--widths", "-4"], ["--widths", "at least 1", "got -4"]),
    "odd width": (["fidelity", "--maps", "trig", "--widths", "64,7"], ["--widths", "trig", "7 is odd"]),
    "seeds no numbers": (["fidelity", "--seeds", "a"], ["--seeds", "whole numbers", "'a'"]),
    "seed below 0": (["fidelity", "--seeds", "-1"], ["--seeds", "0 or more"]),
    "no map": (["fidelity", "--maps", " , "], ["--maps", "at least one"]),
    "unknown map": (
        ["fidelity", "--maps", "mean,performer"],
        ["--maps", "'performer'", *feature_maps.names(), "mean"],
    ),
    "unknown map option": (
        ["fidelity", "--maps", "favor+:fast"],
        ["--maps", "'fast'", "calibrated", "hyperbolic"],
    ),
    "option of another map": (
        ["fidelity", "--maps", "elu+1:calibrated"],
        ["--maps", "'calibrated'", "favor+"],
    ),
    "favor++": (["fidelity", "--maps", "favor++"], ["favor++:calibrated"]),
    "input and synthetic": (
        ["fidelity", "--input", "x", "--synthetic"],
        ["--input", "--synthetic", "exclude"],
    ),
    "norms alone": (["fidelity", "--norms", "1"], ["--norms", "--synthetic"]),
    "lengths alone": (["fidelity", "--lengths", "8"], ["--lengths", "--synthetic"]),
    "norms no numbers": (["fidelity", "--synthetic", "--norms", "big"], ["--norms", "numbers", "'big'"]),
    "norm 0": (["fidelity", "--synthetic", "--norms", "0"], ["norms", "0"]),
    "norm nan": (["fidelity", "--synthetic", "--norms", "nan"], ["norms", "nan"]),
    "length 0": (["fidelity", "--synthetic", "--lengths", "0"], ["lengths", "at least 1"]),
    "lengths fractions": (
        ["fidelity", "--synthetic", "--lengths", "8.5"],
        ["--lengths", "whole numbers", "8.5"],
    ),
    "capture nothing": (["capture"], ["--model"]),
    "capture layers": (
        ["capture", "--model", "m", "--text", "t", "--out", "o", "--layers", "first"],
        ["--layers", "'first'", "0,2,5"],
    ),
    "capture heads": (
        ["capture", "--model", "m", "--text", "t", "--out", "o", "--heads", "x"],
        ["--heads", "'x'", "0,3"],
    ),
    "capture tokens": (
        ["capture", "--model", "m", "--text", "t", "--out", "o", "--tokens", "few"],
        ["--tokens"],
    ),
}


@pytest.mark.parametrize("command, words", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_wrong_options(command, words, capsys, measured, tmp_path):
    refused(run(command), capsys, *words)
    assert not measured and not list(tmp_path.iterdir())


def damaged(**changes):
    return {**tensors(), **changes}


def with_value(number):
    query = tensors()["query"]
    query[1, 3, 2] = number
    return {**tensors(), "query": query}


INPUTS = {
    "missing": (lambda path: None, ["no such file"]),
    "a folder": (lambda path: path.mkdir(), ["folder"]),
    "empty": (lambda path: path.write_bytes(b""), ["empty"]),
    "corrupt": (lambda path: path.write_bytes(b"\x10" * 999), ["not a readable safetensors file"]),
    "text": (
        lambda path: path.write_text("query,key,value\n1,2,3\n" * 9),
        ["not a readable safetensors file"],
    ),
    "other tensors": (lambda path: save_file({"weight": torch.ones(2)}, path), ["query", "key", "value"]),
    "no value": (
        lambda path: save_file({k: v for k, v in tensors().items() if k != "value"}, path),
        ["value"],
    ),
    "two dimensions": (
        lambda path: save_file(damaged(query=torch.ones(24, 8)), path),
        ["'query'", "(24, 8)", "three"],
    ),
    "three heads of two": (
        lambda path: save_file(damaged(query=torch.ones(3, 24, 8)), path),
        ["'query'", "multiple"],
    ),
    "other length": (
        lambda path: save_file(damaged(value=torch.ones(2, 23, 8)), path),
        ["'value'", "(2, 23, 8)"],
    ),
    "whole numbers": (
        lambda path: save_file(damaged(key=torch.ones(2, 24, 8).long()), path),
        ["'key'", "int64"],
    ),
    "NaN": (lambda path: save_file(with_value(math.nan), path), ["'query'", "1 NaN", "0 infinite"]),
    "infinity": (lambda path: save_file(with_value(-math.inf), path), ["'query'", "0 NaN", "1 infinite"]),
}


@pytest.mark.parametrize("make, words", INPUTS.values(), ids=INPUTS)
def test_wrong_input(make, words, capsys, measured, tmp_path):
    path = tmp_path / "bad.safetensors"
    make(path)
    refused(fidelity(path, tmp_path / "out"), capsys, "bad.safetensors", *words)
    assert not measured and not (tmp_path / "out").exists()


def test_a_cut_file(given, capsys, measured, tmp_path):
    whole = given.read_bytes()
    for size in (7, 100, len(whole) - 1):
        (tmp_path / "cut.safetensors").write_bytes(whole[:size])
        refused(fidelity(tmp_path / "cut.safetensors", tmp_path / "out"), capsys, "cut.safetensors")
    assert not measured and not (tmp_path / "out").exists()


def test_one_token_is_too_few(tmp_path, capsys):
    save_file(tensors(tokens=1), tmp_path / "one.safetensors")
    refused(fidelity(tmp_path / "one.safetensors", tmp_path / "out"), capsys, "1 tokens", "at least 2")
    assert not files(tmp_path) - {"one.safetensors"}


MISTAKES = {
    "a map that cannot be at this size": ["--maps", "dpfp-100"],
    "a seed beyond 64 bits": ["--seeds", "99999999999999999999"],
    "features beyond memory": ["--widths", "1000000000000000"],
}


@pytest.mark.parametrize("options", MISTAKES.values(), ids=MISTAKES.keys())
def test_impossible_numbers_are_one_line(options, given, capsys, tmp_path):
    refused(fidelity(given, tmp_path / "out", *options), capsys)


# ---------------------------------------------------------------------------------------------------------
# Places that cannot be written
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_out_is_a_file(inside, given, capsys, measured, tmp_path):
    place = tmp_path / "taken"
    place.write_text("mine")
    refused(fidelity(given, place / "deeper" if inside else place), capsys, "taken")
    assert not measured and place.read_text() == "mine" and files(tmp_path) == {"taken"}


def denied(path):
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_no_permission_to_make_the_folder(given, capsys, measured, tmp_path, monkeypatch):
    """Simulated, because tests may run as root, who may write anywhere."""
    mkdir = os.mkdir

    def refuse(path, *arguments, **options):
        if str(path).startswith(str(tmp_path / "out")):
            raise denied(path)
        return mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    refused(fidelity(given, tmp_path / "out"), capsys, tmp_path / "out", os.strerror(errno.EACCES))
    assert not measured and not files(tmp_path)


def failing(monkeypatch, where, error, call="replace"):
    """Let ``os.open`` (at the start of a write) or ``os.replace`` (at its end) fail for files named so."""
    original = getattr(os, call)
    hits = []

    def fail(*arguments, **options):
        path = Path(os.fspath(arguments[1 if call == "replace" else 0]))
        if where(path):
            hits.append(path)
            raise error(path)
        return original(*arguments, **options)

    monkeypatch.setattr(os, call, fail)
    return hits


def full(path):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


PLACES = {
    "part": lambda path: path.parent.name.startswith(".unfinished") and "00002" in path.name,
    "results.csv": lambda path: "results" in path.name,
    "heads.csv": lambda path: "heads" in path.name and path.suffix == ".csv",
    "manifest.json": lambda path: "manifest" in path.name,
    "times.csv": lambda path: "times" in path.name,
    "figure": lambda path: path.suffix == ".svg" and "gradients" in path.name,
    "report.html": lambda path: path.suffix == ".html",
}


@pytest.mark.parametrize("error", [full, denied], ids=["full disk", "no permission"])
@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_cannot_be_written(
    place, error, given, capsys, measured, tmp_path, monkeypatch, one_figure
):
    out = tmp_path / "out"
    call = "replace" if error is full else "open"
    with monkeypatch.context() as broken:
        hits = failing(broken, PLACES[place], error, call)
        code = fidelity(given, out)
    assert len(hits) == 1
    refused(code, capsys, os.strerror(errno.ENOSPC if error is full else errno.EACCES))
    left = files(out)
    assert not [name for name in left if ".tmp" in name] and "report.html" not in left
    assert len(measured) == (2 + 1 if place == "part" else PARTS)
    # What was measured is kept, and the same command carries on from there to the same result.
    assert len([name for name in left if name.startswith(".unfinished")]) == (2 if place == "part" else PARTS)
    measured.clear()
    if place in ("part", "report.html"):
        assert fidelity(given, out) == 0
        assert len(measured) == (PARTS - 2 if place == "part" else 0)
        assert not list(out.glob(".*")) and "report.html" in files(out)


def test_a_failure_keeps_the_earlier_report(given, capsys, tmp_path, monkeypatch, one_figure):
    out = tmp_path / "out"
    assert fidelity(given, out) == 0
    before = content(out)
    capsys.readouterr()
    with monkeypatch.context() as broken:
        failing(broken, PLACES["report.html"], full)
        code = fidelity(given, out, "--target", "0.3")
    refused(code, capsys, os.strerror(errno.ENOSPC))
    assert content(out)["report.html"] == before["report.html"]
    with monkeypatch.context() as broken:
        failing(broken, PLACES["part"], full)
        code = fidelity(given, out, "--target", "0.4")
    refused(code, capsys, os.strerror(errno.ENOSPC))
    for name in ("report.html", "results.csv"):
        assert content(out)[name] == before[name]


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a limit on the size of files")
def test_a_write_that_really_fails(given, capsys, tmp_path):
    """No simulation: the system refuses to let a file grow beyond 20 kB, in the middle of a write."""
    import resource

    assert fidelity(given, tmp_path / "good") == 0  # everything that is made once, such as caches, is made
    capsys.readouterr()
    large = {name for name, data in content(tmp_path / "good").items() if len(data) > 20_000}
    assert "report.html" in large and "results.csv" not in large
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
        code = fidelity(given, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    refused(code, capsys, os.strerror(errno.EFBIG))
    left = files(tmp_path / "out")
    assert "results.csv" in left and not left & large and not [name for name in left if ".tmp" in name]


# ---------------------------------------------------------------------------------------------------------
# Ctrl-C
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 2, PARTS - 1])
def test_ctrl_c_in_the_middle_and_on_again(place, given, capsys, measured, tmp_path, monkeypatch, one_figure):
    out, original = tmp_path / "out", sweep.measure

    def measure(candidate, data, seeds):
        if len(measured) == place:
            raise KeyboardInterrupt
        return original(candidate, data, seeds)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(sweep, "measure", measure)
        code = fidelity(given, out)
    assert code != 0
    left = files(out)
    assert len(left) == place and all(name.startswith(".unfinished") for name in left)
    measured.clear()
    assert fidelity(given, out) == 0
    assert len(measured) == PARTS - place
    assert fidelity(given, tmp_path / "whole") == 0
    assert content(out) == content(tmp_path / "whole")


def test_ctrl_c_is_one_line(given, capsys, tmp_path, monkeypatch):
    def measure(candidate, data, seeds):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "measure", measure)
    refused(fidelity(given, tmp_path / "out"), capsys, "interrupted", "continues")


def test_ctrl_c_while_writing(given, capsys, measured, tmp_path, monkeypatch, one_figure):
    out = tmp_path / "out"
    for place in ("results.csv", "figure", "report.html"):
        with monkeypatch.context() as interrupted:
            failing(interrupted, PLACES[place], lambda path: KeyboardInterrupt())
            code = fidelity(given, out)
        assert code != 0
        left = files(out)
        assert not [name for name in left if ".tmp" in name] and "report.html" not in left
    assert len(measured) == PARTS
    assert fidelity(given, out) == 0 and "report.html" in files(out)


def test_running_out_of_memory(given, capsys, tmp_path, monkeypatch):
    def measure(candidate, data, seeds):
        raise MemoryError

    monkeypatch.setattr(sweep, "measure", measure)
    refused(fidelity(given, tmp_path / "out"), capsys, "memory", "fewer")


def test_a_defect_is_not_hidden(given, tmp_path, monkeypatch):
    """Anything else is a bug of the library, and its traceback is needed to mend it."""

    def measure(candidate, data, seeds):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(sweep, "measure", measure)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        fidelity(given, tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------
# As a program
# ---------------------------------------------------------------------------------------------------------

ENTRY = "from reassoc.cli import main; main()"


def program(code, *arguments):
    environment = os.environ | {"PYTHONPATH": str(Path(reassoc.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


def test_the_program_ends_with_code_2_and_one_line():
    done = program(ENTRY, "fidelity", "--input", "missing.safetensors")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("reassoc: missing.safetensors: no such file") and done.stderr.count("\n") == 1
    )
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "arguments",
    [("convert", "--model", "m", "--text", "t", "--out", "o"), ("generate", "--model", "m", "--prompt", "p"),
     ("evaluate", "--model", "m", "--text", "t", "--out", "o")],
)  # fmt: skip
def test_without_transformers_it_says_what_to_install(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").write_text("Some text.")
    done = program(f"import sys; sys.modules['transformers'] = None; {ENTRY}", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'reassoc[hf]'" in done.stderr and done.stderr.count("\n") == 1


def test_without_the_parts_it_needs_it_says_what_to_install():
    done = program(f"import sys; sys.modules['typer'] = None; {ENTRY}", "fidelity")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "reassoc: the command line needs: pip install 'reassoc[lab]'\n"
