"""The example scripts run as a person runs them, and print what they promise."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run(name: str) -> str:
    """Standard output of a script; a warning is an error there too."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern: str, text: str) -> float:
    """The number that a pattern finds, thousands separated by commas."""
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return float(found[1].replace(",", ""))


def held(text: str) -> list[str]:
    """What every line says that a state or cache holds."""
    return re.findall(r"holds ([\d,]+) bytes", text)


def test_every_script_has_a_test():
    assert [name for name in SCRIPTS if f'run("{name}")' not in Path(__file__).read_text("utf-8")] == []


def test_attention():
    text = run("attention.py")
    errors = {
        name: number(rf"  {re.escape(name)} +r = +\d+ +([\d.]+)", text) for name in ("elu+1", "landmark, 253")
    }
    assert 0 < errors["landmark, 253"] < errors["elu+1"] < 1
    assert number(r"weights add up to ([\d.]+)", text) == pytest.approx(1, abs=1e-5)
    assert number(r"is the output to (\S+)", text) < 1e-5
    assert "undefined='nan': the first output is nan" in text
    assert "undefined='zero': the first output is 0.0" in text
    assert "undefined='raise': undefined result at batch 0, head 0, position 0" in text


def test_streaming():
    text = run("streaming.py")
    sizes = held(text)
    assert len(sizes) == 5 and len(set(sizes[:4])) == 1
    assert number(r"differ from the whole by (\S+)", text) < 1e-5
    assert "2001 tokens, the other state 3000" in text
    assert "refused: state: the state was made with feature_map" in text


def test_train_tiny():
    text = run("train_tiny.py")
    before = number(r"before training: perplexity ([\d.]+)", text)
    after = number(r"s: perplexity ([\d.]+)", text)
    assert before > 100 and after < 10  # bytes at random have 256, their frequencies alone about 20
    assert "And Jesus said unto them, " in text and "after 225 tokens" in text


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra hf")
def test_convert_generate():
    text = run("convert_generate.py")
    assert text.startswith("2 layers converted and calibrated")
    assert number(r"at (\d+)% of 500 positions", text) > 20  # by chance 1 in 256
    sizes = held(text)
    assert len(sizes) == 2 and sizes[0] == sizes[1]
