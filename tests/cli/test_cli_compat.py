"""`reassoc compat check`: what it prints; one line and exit code 2 for every mistake."""

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("rich")
pytest.importorskip("typer")

from reassoc.cli._app import run
from reassoc.compat.performer_pytorch import PerformerEncDec, PerformerLM

LM = {"num_tokens": 30, "max_seq_len": 24, "dim": 16, "depth": 2, "heads": 2, "dim_head": 8}


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """80 columns, the same draws, two checkpoints and two inputs."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save({"model_state_dict": PerformerLM(**LM).state_dict(), "epoch": 3}, "lm.pt")
    sizes = {f"{side}_{name}": n for name, n in LM.items() if name != "dim" for side in ("enc", "dec")}
    save_file({n: t.clone() for n, t in PerformerEncDec(dim=16, **sizes).state_dict().items()}, "both.st")
    tokens = torch.randint(30, (2, 24))
    save_file({"tokens": tokens}, "full.st")
    save_file({"tokens": tokens, "mask": torch.arange(24) < torch.tensor([[24], [10]])}, "padded.st")


def printed(capsys, *arguments):
    """What a check prints, with its tables' line ends joined; nothing else comes out."""
    capsys.readouterr()
    assert run(["compat", "check", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_checkpoint_is_described(capsys):
    out = printed(capsys, "lm.pt")
    lines = out.splitlines()
    assert lines[0] == "lm.pt under performer.: performer-pytorch 1.0.9 to 1.1.4"
    assert lines[1].startswith("dim 16, depth 2, heads 2, dim_head 8, nb_features 16, ff_mult 4, ff_glu no,")
    for words in ("row norms", "1e-4 in every feature", "hides keys", "second copy of layers", "not causal"):
        assert words in out
    assert lines[-1] == "Not run: no input was given, so nothing was run."
    assert all(len(line) <= 80 for line in lines)


def test_a_safe_switch(capsys):
    out = printed(capsys, "lm.pt", "--input", "full.st")
    assert "net.layers.0.0.fn" in out and "differs so far" in out
    assert out.splitlines()[-1].startswith("Safe to switch to legacy=None: the last output differs by 0.000")


def test_an_unsafe_switch_says_why(capsys):
    last = printed(capsys, "lm.pt", "--input", "padded.st").splitlines()[-1]
    assert last.startswith('Keep legacy="exact": the last output differs by ')
    assert "masked keys that weigh are the cause" in last and "the tolerance is 0.001" in last
    last = printed(capsys, "lm.pt", "--input", "padded.st", "--tolerance", "10").splitlines()[-1]
    assert last.startswith("Safe to switch")
    last = printed(capsys, "lm.pt", "--input", "padded.st", "--causal").splitlines()[-1]
    assert last.startswith("Safe to switch")  # a causal query reads no padding behind it


def test_several_models_are_described_and_one_is_run(capsys):
    out = printed(capsys, "both.st")
    assert "both.st under enc.performer.:" in out and "both.st under dec.net.performer.:" in out
    out = printed(capsys, "both.st", "--root", "enc.performer.", "--input", "full.st")
    assert "Safe to switch" in out and "dec.net" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "CHECKPOINT"),
        (["gone.pt"], "gone.pt: no such file"),
        (["full.st"], "no attention of performer-pytorch"),
        (["lm.pt", "--input", "gone.st"], "gone.st"),
        (["lm.pt", "--input", "lm.pt"], "lm.pt: not a readable safetensors file"),
        (["lm.pt", "--input", "both.st"], "expected tokens or x"),
        (["both.st", "--input", "full.st"], "name one model"),
        (["lm.pt", "--features", "elu"], "favor, generalized, none"),
        (["lm.pt", "--tolerance", "nan"], "tolerance"),
        (["lm.pt", "--tolerance", "small"], "tolerance"),
        (["lm.pt", "--input", "full.st", "--cross-attend"], "context"),
        (["lm.pt", "--nonsense"], "nonsense"),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    capsys.readouterr()
    assert run(["compat", "check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reassoc: ") and err.count("\n") == 1, (out, err)
    assert words in err


def test_a_file_that_would_run_code_is_refused(capsys, tmp_path):
    import pickle

    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"performer.net": Harmful()}))
    capsys.readouterr()
    assert run(["compat", "check", "evil.pt"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "could run code" in err
    assert not (tmp_path / "harm").exists()


def test_the_group_shows_its_commands(capsys):
    assert run(["compat", "--help"]) == 0
    assert "check" in capsys.readouterr().out
