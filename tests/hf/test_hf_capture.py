"""`reassoc capture` and `fidelity` on every architecture, original and converted."""

import pytest
import torch
from hf_models import MODELS, SPAN, VOCABULARY, converted
from safetensors.torch import save_file

tokenizers = pytest.importorskip("tokenizers")
import transformers  # noqa: E402

from reassoc.cli._app import run as main  # noqa: E402
from reassoc.lab import InputError, load_activations  # noqa: E402
from reassoc.lab.capture import capture  # noqa: E402

LAYERS = {"gemma3": 3}


def save(folder, model, name):
    model.float().save_pretrained(folder)
    if name != "vit":
        words = {f"w{i}": i for i in range(VOCABULARY)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
        wrapped.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path):
    text, images = tmp_path / "text.txt", tmp_path / "images.safetensors"
    text.write_text(" ".join(f"w{3 + i * i % 60}" for i in range(100)))
    save_file({"pixel_values": torch.randn(3, 3, 16, 16)}, images)
    return lambda name: ("--images", images) if name == "vit" else ("--text", text)


@pytest.mark.parametrize("name", MODELS)
def test_capture_then_fidelity(name, tmp_path, source, capsys):
    folder = save(tmp_path / "model", MODELS[name](), name)
    option, path = source(name)
    out, report = tmp_path / "qkv.safetensors", tmp_path / "report"
    length = ["--sequence-length", str(SPAN)] if name != "vit" else []
    call = ["capture", "--model", str(folder), option, str(path), "--tokens", "24", *length]
    assert main([*call, "--out", str(out)]) == 0, capsys.readouterr().err
    sites = load_activations(out).sites
    assert len(sites) == LAYERS.get(name, 2)
    # A 16 x 16 image in patches of 4 x 4, and the class token: whole images until there are 24 tokens.
    assert {site.query.shape[1] for site in sites} == ({34} if name == "vit" else {24})
    assert {site.causal for site in sites} == {name not in ("bert", "bart", "vit")}
    measure = ["fidelity", "--input", str(out), "--maps", "elu+1,favor+", "--widths", "8", "--seeds", "1"]
    assert main([*measure, "--out", str(report)]) == 0, capsys.readouterr().err
    assert (report / "report.html").stat().st_size > 10_000


def test_a_converted_model_is_captured_as_softmax_sees_it(tmp_path, source):
    """What its layers receive is the model's own; nothing of the kernels is in the way."""
    model = converted("llama")
    folder = save(tmp_path / "model", model, "llama")
    sites = capture(folder, source("llama")[1], "all", 24, out=tmp_path / "a", sequence_length=24).sites
    assert [site.key.shape for site in sites] == [(2, 24, 8)] * 2


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [({"other": torch.zeros(2)}, "no safetensors file with pixel_values"),
     ({"pixel_values": torch.zeros(2, 3)}, "expected floating point"),
     ({"pixel_values": torch.zeros(1, 3, 4, 4, dtype=torch.int64)}, "expected floating point")],
)  # fmt: skip
def test_images_that_are_none(tensors, problem, tmp_path):
    folder = save(tmp_path / "model", MODELS["vit"](), "vit")
    save_file(tensors, tmp_path / "images")
    with pytest.raises(InputError, match=problem):
        capture(folder, tmp_path / "images", "all", 24, out=tmp_path / "a", images=True)


def test_text_or_images(tmp_path, capsys):
    assert main(["capture", "--model", str(tmp_path), "--out", str(tmp_path / "a")]) == 2
    assert "one of --text FILE and --images FILE" in capsys.readouterr().err
