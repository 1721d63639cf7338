"""Code in the README and the documentation: Python blocks run, commands are such as the program takes.

Commands of shell blocks are parsed by the program's own parser and not run: most train for minutes, or read
files that only the reader has. `tests/cli` runs every command on small inputs. What needs neither files nor
time (`RUNS`) runs here.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if "_build" not in path.parts
)
FENCE = re.compile(r"^([ \t]*)```(python|sh)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
RUNS = ("doctor", "backends")  # commands that need no file, no model and no time


def blocks(language):
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            if found[2] == language:
                line = text.count("\n", 0, found.start()) + 1
                code = "\n".join(row.removeprefix(found[1]) for row in found[3].split("\n"))
                yield pytest.param(path, line, code, id=f"{path.relative_to(ROOT)}:{line}")


@pytest.mark.parametrize(("path", "line", "code"), list(blocks("python")))
def test_a_python_block_runs_by_itself(path, line, code, capsys, monkeypatch, tmp_path):
    if "transformers" in code or "reassoc.hf" in code:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    # Lines before the block, so that a traceback names the line of the document.
    exec(compile("\n" * line + code, str(path), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip(), "a block prints something"


def called(code, folder):
    """The commands of a block, as bash understands it, none of them run: name and arguments."""
    for name in ("reassoc", "make", "python", "bash"):
        (folder / name).write_text(
            f"#!/bin/sh\n{{ printf '%s\\0' {name} \"$@\"; printf '\\n\\0'; }} >> '{folder}/calls'\n"
        )
        (folder / name).chmod(0o755)
    # Whatever else is named is not found, for nothing is on the path, and is then no error.
    start = "command_not_found_handle() { :; }\ncd() { :; }\nsource() { :; }\nset -r\n"
    code = code.replace(".venv/bin/", "")
    done = subprocess.run(
        [shutil.which("bash"), "--norc", "-c", start + code], cwd=folder, env={"PATH": str(folder)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    calls = folder / "calls"
    raw = calls.read_text() if calls.exists() else ""
    return [call.split("\0")[:-1] for call in raw.split("\n\0")[:-1]]


@pytest.mark.parametrize(("path", "line", "code"), list(blocks("sh")))
def test_a_shell_block_calls_what_there_is(path, line, code, tmp_path, monkeypatch, capsys):
    pytest.importorskip("typer")
    from typer.main import get_command

    from reassoc.cli._app import app, run

    calls = called(code, tmp_path)
    assert sum(name == "reassoc" for name, *_ in calls) >= len(re.findall(r"^reassoc ", code, re.MULTILINE))
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    monkeypatch.chdir(tmp_path)
    for name, *arguments in calls:
        if name == "make":
            assert set(arguments) <= set(targets.split())
        elif name != "reassoc":
            script = next((a for a in arguments if a.endswith((".py", "/run"))), None)
            assert script is None or (ROOT / script).exists(), script
        elif "--help" in arguments or "--version" in arguments:
            assert run(arguments) == 0
        else:
            command, rest = get_command(app), list(arguments)
            while hasattr(command, "commands"):  # a group: its words come first
                command = command.commands[rest.pop(0)]
            command.make_context(arguments[0], rest)
            if arguments[0] in RUNS:
                assert run(arguments) == 0
                assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("reassoc lm --nonsense 1", "nonsense"),
        ("reassoc bench --batch many", "integer"),
        ("reassoc capture", "model"),
    ],
)
def test_a_wrong_command_is_found(code, problem, tmp_path, monkeypatch, capsys):
    pytest.importorskip("typer")
    path = ROOT / "README.md"
    with pytest.raises(Exception, match=f"(?i){problem}"):
        test_a_shell_block_calls_what_there_is(path, 1, code, tmp_path, monkeypatch, capsys)


def test_a_block_is_understood_as_bash_does(tmp_path):
    code = """
        run() { reassoc lm \\
          --steps 3 "$@"; }  # a comment
        run --out 'a b' && A=1 reassoc doctor | less
        rm x
    """
    assert called(code, tmp_path) == [
        ["reassoc", "lm", "--steps", "3", "--out", "a b"],
        ["reassoc", "doctor"],
    ]


def test_there_are_blocks():
    assert sum(1 for _ in blocks("python")) >= 5
    assert sum(1 for _ in blocks("sh")) >= 10
