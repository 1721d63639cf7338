"""`reassoc doctor`: a report that never fails, in words and for machines."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import reassoc
from reassoc.cli import _doctor
from reassoc.cli._app import run
from reassoc.kernels import _library

PARTS = ["versions", "machine", "native kernels", "extras", "backends"]


def report(capsys):
    assert run(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_the_report_is_of_this_process(capsys):
    found = report(capsys)
    assert list(found) == PARTS
    assert found["versions"]["reassoc"] == reassoc.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["backends"] == reassoc.backends()
    assert found["native kernels"]["in use"] is (_library.library() is not None)


def test_words_name_every_part(capsys):
    assert run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == PARTS
    assert f"  reassoc          {reassoc.__version__}" in lines
    assert not [line for line in lines if "True" in line or "False" in line or "[" in line]


def test_a_missing_library_is_reported_with_what_to_do_and_what_is_lost():
    code = "from reassoc.cli._app import run; raise SystemExit(run(['doctor', '--json']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "REASSOC_NATIVE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    native = json.loads(done.stdout)["native kernels"]
    assert native["in use"] is False
    assert "REASSOC_NATIVE=0" in native["why"] and "unset" in native["why"]
    assert "speed" in native["lost"]


def test_a_library_in_use_says_what_was_chosen(monkeypatch, capsys):
    class Module:
        version, isa, openmp, __file__ = "9.9.9", "avx2", False, "/somewhere/_native.so"

    monkeypatch.setattr(_library, "library", Module)
    native = report(capsys)["native kernels"]
    assert native["in use"] is True and native["instruction set"] == "avx2"
    assert "one thread" in native["openmp"]
    assert "install reassoc again" in native["version"] and "9.9.9" in native["version"]


CPU = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu {}\n\n"


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", ["avx512", "avx2"]),
        ("avx2 fma f16c avx512f avx512bw", ["avx2"]),
        ("sse2", []),
    ],
)
def test_instruction_sets_are_those_of_the_processor(monkeypatch, tmp_path, flags, sets):
    (tmp_path / "cpuinfo").write_text(2 * CPU.format(flags))
    monkeypatch.setattr(_doctor, "CPUINFO", tmp_path / "cpuinfo")
    assert _doctor._instruction_sets() == sets


def test_a_system_without_cpuinfo_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(_doctor, "CPUINFO", tmp_path / "none")
    assert _doctor._instruction_sets() == []


def test_extras_name_the_missing_packages(monkeypatch):
    needs = ["torch>=2.6", 'no-such-package>=1; extra == "hf"', "pytest; extra == 'dev'"]
    monkeypatch.setattr(_doctor.metadata, "requires", lambda name: needs)
    assert _doctor._extras() == {"hf": "missing: no-such-package", "dev": "installed"}
