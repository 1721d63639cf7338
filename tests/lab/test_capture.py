"""Capture, on tiny random models: what is written must give back what the models themselves computed."""

import hashlib
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from reassoc._errors import InputError  # noqa: E402
from reassoc.lab import _recorder  # noqa: E402
from reassoc.lab.activations import load_activations  # noqa: E402
from reassoc.lab.capture import capture  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
TEXT = " ".join(f"w{i * i * 7 % 60}" for i in range(200))
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # large enough for attention that is far from uniform
}


def save_tokenizer(folder, special):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if special:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        # As some published tokenizers have them switched on; capture must not follow.
        tokenizer.enable_padding(length=40, pad_token="[PAD]", pad_id=0)
        tokenizer.enable_truncation(max_length=40)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    wrapped.save_pretrained(folder)


def save_model(folder, model, special=False):
    model.eval().save_pretrained(folder)
    save_tokenizer(folder, special)
    return folder


def make_llama(**changes):
    torch.manual_seed(1)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return transformers.LlamaModel(transformers.LlamaConfig(**SIZES, **heads, **changes))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, num_attention_heads=4))
    return save_model(tmp_path_factory.mktemp("bert"), model, special=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), make_llama())


def softmax_outputs(site):
    """Return the attention output (m, H * e) of each sequence, recomputed from what was captured."""
    for query, key, value in site.sequences():
        group = query.shape[0] // key.shape[0]
        key, value = (x.float().repeat_interleave(group, 0) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query.float(), key, value, is_causal=site.causal, scale=site.scale
        )
        yield out.transpose(0, 1).flatten(1)


def own_outputs(folder, modules, ids):
    """Return the model's own attention outputs, per layer (B, N, H * e), on one padded batch, eager."""
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    seen = []
    for layer in modules(model):
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    longest = max(map(len, ids))
    batch = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    with torch.no_grad():
        model(input_ids=batch, attention_mask=mask)
    return seen


def assert_reproduces(activations, own, lengths):
    assert len(activations.sites) == len(own)
    for site, outputs in zip(activations.sites, own):
        assert site.query.dtype == torch.float16
        assert site.cu_seqlens.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
        for mine, theirs, length in zip(softmax_outputs(site), outputs, lengths):
            error = (mine - theirs[:length]).abs().max() / theirs.abs().max()
            assert error < 5e-3  # queries and keys were rounded to float16


# What is captured is what the model computed


def test_encoder_with_special_tokens_and_a_short_last_sequence(tmp_path, bert, text):
    activations = capture(bert, text, "all", 30, out=tmp_path / "a.safetensors", sequence_length=12)
    words = [WORDS.index(word) for word in TEXT.split()]
    ids = [[2, *words[:10], 3], [2, *words[10:20], 3], [2, *words[20:24], 3]]
    own = own_outputs(bert, lambda m: [layer.attention.output.dense for layer in m.encoder.layer], ids)
    assert_reproduces(activations, own, [12, 12, 6])
    assert [site.name for site in activations.sites] == [f"{bert.name}.layer{i}" for i in range(3)]
    for site in activations.sites:
        assert not site.causal and site.scale == 8**-0.5
        assert site.key_heads == site.query_heads == (0, 1, 2, 3)


def test_decoder_with_rotary_and_grouped_heads(tmp_path, llama, text):
    activations = capture(
        llama, text, "all", 40, out=tmp_path / "a.safetensors", sequence_length=16, prefix="p"
    )
    words = [WORDS.index(word) for word in TEXT.split()]
    ids = [words[:16], words[16:32], words[32:40]]
    own = own_outputs(llama, lambda m: [layer.self_attn.o_proj for layer in m.layers], ids)
    assert_reproduces(activations, own, [16, 16, 8])
    for i, site in enumerate(activations.sites):
        assert site.causal and site.scale == 8**-0.5 and (site.name, site.layer) == (f"p.layer{i}", i)
        assert site.query.shape == (4, 40, 8) and site.key.shape == (2, 40, 8)  # not repeated
    # After the rotary embedding: the first key is unrotated, the same word later is not.
    model = transformers.AutoModel.from_pretrained(llama).eval()
    with torch.no_grad():
        hidden = model.layers[0].input_layernorm(model.embed_tokens(torch.tensor(ids[0])))
        plain = model.layers[0].self_attn.k_proj(hidden).view(16, 2, 8).transpose(0, 1)
    captured = activations.sites[0].key[:, :16].float()
    torch.testing.assert_close(captured[:, 0], plain[:, 0], rtol=2e-3, atol=2e-3)
    assert (captured[:, 8] - plain[:, 8]).abs().max() > 0.1
    torch.testing.assert_close(captured.norm(dim=-1), plain.norm(dim=-1), rtol=2e-3, atol=2e-3)


def test_choosing_layers_and_heads(tmp_path, llama, text):
    whole = capture(llama, text, "all", 24, out=tmp_path / "whole.safetensors", sequence_length=8)
    part = capture(llama, text, [2, 0], 24, out=tmp_path / "part.safetensors", sequence_length=8, heads=[1])
    assert [site.layer for site in part.sites] == [0, 2]
    for site in part.sites:
        other = whole.sites[site.layer]
        assert site.key_heads == (1,) and site.query_heads == (2, 3)
        assert torch.equal(site.query, other.query[2:])
        assert torch.equal(site.key, other.key[1:]) and torch.equal(site.value, other.value[1:])


def test_encoder_decoder_gives_its_encoder(tmp_path, text):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}
    layers = {
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    config = transformers.BartConfig(vocab_size=len(WORDS), **sizes, **layers)
    folder = save_model(tmp_path / "bart", transformers.BartModel(config))
    activations = capture(folder, text, "all", 20, out=tmp_path / "a.safetensors", sequence_length=10)
    assert [(site.layer, site.causal) for site in activations.sites] == [(0, False), (1, False)]


def test_batches_are_only_for_speed(tmp_path, llama, text, monkeypatch):
    one = capture(llama, text, [1], 48, out=tmp_path / "one.safetensors", sequence_length=8)
    monkeypatch.setattr("reassoc.lab.capture._BATCH_TOKENS", 16)
    other = capture(llama, text, [1], 48, out=tmp_path / "other.safetensors", sequence_length=8)
    torch.testing.assert_close(one.sites[0].query, other.sites[0].query, rtol=2e-3, atol=2e-3)


# The file


def test_provenance_names_everything_but_this_machine(tmp_path, bert, text):
    out = tmp_path / "a.safetensors"
    activations = capture(bert, text, [1], 24, out=out, sequence_length=12, heads=[0, 2], prefix="p")
    provenance = activations.provenance
    digest = hashlib.sha256((bert / "model.safetensors").read_bytes()).hexdigest()
    assert provenance["model_sha256"]["model.safetensors"] == digest
    assert set(provenance["model_sha256"]) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert provenance["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert provenance["versions"]["transformers"] == transformers.__version__
    assert (provenance["tokens"], provenance["sequence_length"]) == (24, 12)
    assert provenance["command"] == (
        f"reassoc capture --model {bert.name} --text text.txt --layers 1 --tokens 24 --sequence-length 12 "
        "--heads 0,2 --prefix p --out a.safetensors"
    )
    assert not any(str(folder).encode() in out.read_bytes() for folder in (tmp_path, bert.parent))
    again = capture(bert, text, [1], 24, out=out, sequence_length=12, heads=[0, 2], prefix="p")
    assert again.sha256 == activations.sha256


def test_values_beyond_float16_are_kept_in_float32(tmp_path, text):
    model = make_llama()
    model.layers[1].self_attn.v_proj.weight.data *= 1e6
    folder = save_model(tmp_path / "big", model)
    sites = capture(folder, text, "all", 16, out=tmp_path / "a.safetensors", sequence_length=8)
    assert [site.query.dtype for site in sites.sites] == [torch.float16, torch.float32, torch.float16]
    assert sites.sites[1].value.abs().max() > 65504
    assert sites.provenance["stored_as_float32"] == ["big.layer1"]


def test_a_broken_model_leaves_no_file(tmp_path, text):
    model = make_llama()
    model.layers[1].self_attn.v_proj.weight.data[0] = float("nan")
    folder = save_model(tmp_path / "nan", model)
    with pytest.raises(InputError, match=r"a.safetensors: tensor 'nan.layer1.value' holds 16 NaN"):
        capture(folder, text, [1], 16, out=tmp_path / "a.safetensors", sequence_length=8)
    assert not (tmp_path / "a.safetensors").exists()


def test_transformers_is_left_as_it_was(tmp_path, llama, text, monkeypatch):
    functions = transformers.AttentionInterface._global_mapping
    masks = transformers.AttentionMaskInterface._global_mapping
    before = (dict(functions), dict(masks), transformers.logging.get_verbosity())
    model = transformers.AutoModel.from_pretrained(llama)
    with _recorder.recording(model, _recorder.Recorder(None, None)):
        assert model.config._attn_implementation.startswith("reassoc_capture")
    assert model.config._attn_implementation == "sdpa"

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_recorder.Recorder, "record", interrupt)
    out = tmp_path / "a.safetensors"
    out.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        capture(llama, text, "all", 16, out=out)
    assert (functions, masks, transformers.logging.get_verbosity()) == before
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_progress_bar_only_when_asked_for_or_on_a_terminal(tmp_path, llama, text, capsys):
    capture(llama, text, [0], 16, out=tmp_path / "a.safetensors")
    assert capsys.readouterr() == ("", "")
    capture(llama, text, [0], 16, out=tmp_path / "a.safetensors", progress=True)
    assert "capturing tokens" in capsys.readouterr().err


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": [0, 3]}, "no attention in layer 3; layers are 0 to 2"),
        ({"layers": []}, r"layers is \[\]; expected a list of indices"),
        ({"layers": [-1]}, r"layers is \[-1\]; expected"),
        ({"layers": "0"}, "layers is '0'; expected"),
        ({"heads": [2]}, "layer 0 has no key head 2; choose --heads from 0 to 1"),
        ({"tokens": 0}, "tokens is 0; expected at least 1"),
        ({"tokens": 201}, "text.txt: the text has 200 tokens of this model; 201 are needed"),
        ({"sequence_length": 65, "tokens": 80}, "sequence_length is 65; this model takes at most 64"),
        ({"model": "no/such/folder"}, "no/such/folder: no such model folder"),
        ({"model": "none"}, "none: no such model folder, nor a model of this name"),
        ({"gguf": "x.gguf"}, "no GGUF file 'x.gguf' in the folder; found: none"),
        ({"gguf": "../x.gguf"}, "no GGUF file"),
        ({"source_file": "none.txt"}, "none.txt: no such text file"),
        ({"source_file": "."}, "is a folder; expected a text file"),
        ({"out": "."}, "is a folder; --out takes the file to write"),
        ({"out": "none/a.safetensors"}, "the folder none does not exist"),
    ],
)
def test_wrong_arguments(tmp_path, llama, text, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    given = {"model": llama, "source_file": text, "layers": [0], "tokens": 16, "out": "a.safetensors"}
    with pytest.raises(InputError, match=message) as caught:
        capture(**{**given, "sequence_length": 8, **arguments})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_wrong_text(tmp_path, bert, llama, text):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"latin.txt: not UTF-8 text .byte 3"):
        capture(llama, latin, "all", 1, out=tmp_path / "a")
    with pytest.raises(InputError, match="is the text file itself"):
        capture(llama, latin, "all", 1, out=latin)
    with pytest.raises(
        InputError, match="make a sequence of 2, which the 2 special tokens of this model fill"
    ):
        capture(bert, text, "all", 14, out=tmp_path / "a", sequence_length=12)
    with pytest.raises(InputError, match=r"text.txt: the text has 200 tokens of this model; 240 are needed"):
        capture(bert, text, "all", 288, out=tmp_path / "a", sequence_length=12)


def test_wrong_model_files(tmp_path, text):
    def refuse(message):
        with pytest.raises(InputError, match=message) as caught:
            capture(tmp_path / "m", text, "all", 16, out=tmp_path / "a", sequence_length=8)
        assert "\n" not in str(caught.value)

    folder = tmp_path / "m"
    folder.mkdir()
    refuse("m: cannot load the configuration")
    make_llama().save_pretrained(folder)
    refuse("m: cannot load the tokenizer")
    save_tokenizer(folder, False)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    lost = tensors.pop("layers.1.self_attn.k_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    refuse("the weights lack 1 tensors of the model, first 'layers.1.self_attn.k_proj.weight'")
    weights.write_bytes(weights.read_bytes()[:-100])
    refuse("m: cannot load the model")
    weights.unlink()
    torch.save({**tensors, "layers.1.self_attn.k_proj.weight": lost}, folder / "pytorch_model.bin")
    refuse("m: cannot load the model .* with safetensors weights")  # pickles are not opened


def test_attention_that_a_file_cannot_hold(tmp_path, text):
    def run(name, model, length=8):
        folder = save_model(tmp_path / name, model)
        return capture(folder, text, "all", 16, out=tmp_path / "a", sequence_length=length)

    config = transformers.OpenAIGPTConfig(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=1, n_head=2
    )
    with pytest.raises(InputError, match="openai: nothing was captured, OpenAIGPTModel does not send"):
        run("openai", transformers.OpenAIGPTModel(config))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    window = transformers.MistralConfig(**SIZES, **heads, sliding_window=4)
    with pytest.raises(InputError, match=r"layer 0 masks something else than the future .a window"):
        run("window", transformers.MistralModel(window))
    assert run("window", transformers.MistralModel(window), 4).sites[0].causal  # inside the window
    config = transformers.T5Config(
        vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    with pytest.raises(InputError, match="T5Attention uses a position bias, which an activation file does"):
        run("t5", transformers.T5Model(config))


def test_missing_packages(tmp_path, llama, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"needs the package transformers; pip install 'reassoc\[hf\]'"):
        capture(llama, text, "all", 16, out=tmp_path / "a")
    monkeypatch.undo()
    (tmp_path / "x.gguf").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"reading GGUF needs the package gguf; pip install 'reassoc\[hf\]'"):
        capture(tmp_path, text, "all", 16, out=tmp_path / "a", gguf="x.gguf")


# The command


def test_command(tmp_path, llama, text):
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from reassoc.cli._capture import capture as command

    app = typer.Typer()
    app.command()(command)
    out = tmp_path / "a.safetensors"
    options = ["--model", str(llama), "--text", str(text), "--tokens", "16", "--sequence-length", "8"]
    options += ["--out", str(out)]
    result = CliRunner().invoke(app, [*options, "--layers", "0,2", "--heads", "1", "--prefix", "p"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}: 2 sites, 16 tokens each, from p.layer0 to p.layer2\n"
    assert [site.key_heads for site in load_activations(out).sites] == [(1,), (1,)]
    result = CliRunner().invoke(app, [*options, "--layers", "first"])
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == "--layers is 'first'; expected numbers with commas, such as 0,2,5 or all"
    assert "--sequence-length" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).stdout
