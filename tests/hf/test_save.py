"""Saving and loading: the converted model comes back, whole, by transformers' own means."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
import transformers as T
from hf_models import HYBRID, MODELS, WAYS, converted, inputs, logits, make, stir, tokens

from reassoc import hf
from reassoc._errors import InputError

AUTO = {
    "bert": T.AutoModelForMaskedLM, "bart": T.AutoModelForSeq2SeqLM, "vit": T.AutoModelForImageClassification
}  # fmt: skip
FAVOR = {"feature_map": "favor+", "map_options": {"num_features": 16, "seed": 3}, "window": 8}
LANDMARK = {"feature_map": "landmark", "map_options": {"num_features": 10, "landmarks": 12}, "window": 8}
TEXT = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens(6, 48, seed=3)]


def load(folder, name="llama", **options):
    return AUTO.get(name, T.AutoModelForCausalLM).from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("way", ["pure", "codebook", "hybrid-decay"])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, way, tmp_path):
    model, x = converted(name, way), inputs(name)
    model.save_pretrained(tmp_path)
    back = load(tmp_path, name, dtype=torch.float64)
    assert type(back) is type(model)
    for (part, mine), its in zip(model.state_dict().items(), back.state_dict().values(), strict=True):
        assert torch.equal(mine, its), part
    # Constants that are in no checkpoint are computed in the precision that a model is made in: single here,
    # double there.
    torch.testing.assert_close(logits(back, x), logits(model, x), rtol=1e-5, atol=1e-5)
    assert [la.site for la in hf.kernel_layers(back)] == [la.site for la in hf.kernel_layers(model)]


@pytest.mark.parametrize("way", [FAVOR, LANDMARK, HYBRID], ids=["favor+", "landmark", "codebook"])
def test_calibrated_maps_come_back_as_they_were(way, tmp_path):
    model = hf.convert(make("llama").float(), **way)
    plain = logits(model, inputs("llama")) if way is FAVOR else None
    assert hf.calibrate(model, TEXT) == 2
    wanted = logits(model, inputs("llama"))
    assert plain is None or not torch.allclose(plain, wanted, rtol=1e-3)
    model.save_pretrained(tmp_path)
    back = load(tmp_path)
    for mine, its in zip(hf.kernel_layers(model), hf.kernel_layers(back), strict=True):
        assert mine.feature_map.fingerprint == its.feature_map.fingerprint
    assert torch.equal(logits(back, inputs("llama")), wanted)


def test_bfloat16_and_shards(tmp_path):
    model = converted("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert one.dtype == torch.bfloat16 and next(hf.kernel_layers(one)).log_weight.dtype == torch.bfloat16
    for (part, mine), its in zip(model.state_dict().items(), many.state_dict().values(), strict=True):
        assert torch.equal(mine, its), part
    assert torch.equal(logits(one, inputs("llama")), logits(many, inputs("llama")))


def test_a_fresh_process_needs_the_import_only(tmp_path):
    wanted = {}
    for name, way in (("llama", HYBRID), ("bert", WAYS["pure"]), ("gpt2", FAVOR)):
        model = converted(name, way)
        if way is FAVOR:
            hf.calibrate(model.float(), TEXT)
        model.double().save_pretrained(tmp_path / name)
        wanted[name] = logits(model, {"input_ids": tokens()})
    torch.save(wanted, tmp_path / "wanted.pt")
    program = """
import sys, torch, transformers, reassoc.hf
folder = sys.argv[1]
for name, wanted in torch.load(folder + "/wanted.pt").items():
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder + "/" + name, dtype=torch.float64)
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(ids).logits, wanted), name
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_base_model_of_a_checkpoint(tmp_path):
    model = converted("llama")
    model.save_pretrained(tmp_path)
    base = T.AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(base) is T.LlamaModel and len(list(hf.kernel_layers(base))) == 2
    with torch.no_grad():
        got = model.lm_head(base(tokens()).last_hidden_state)
    assert torch.equal(got, logits(model, {"input_ids": tokens()}))
    base.save_pretrained(tmp_path / "base")
    again = T.AutoModel.from_pretrained(tmp_path / "base", dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(again(tokens()).last_hidden_state, base(tokens()).last_hidden_state)


def test_layers_left_out_stay_left_out(tmp_path):
    model = converted("llama", layers=[1], num_hidden_layers=3)
    model.save_pretrained(tmp_path)
    back = load(tmp_path, dtype=torch.float64)
    assert [hasattr(layer.self_attn, "reassoc") for layer in back.model.layers] == [False, True, False]
    assert torch.equal(logits(back, inputs("llama")), logits(model, inputs("llama")))


def test_a_model_made_from_the_configuration_starts_as_convert_does():
    fresh = T.AutoModelForCausalLM.from_config(hf.convert(make("llama"), **HYBRID).config).double()
    new = hf.convert(make("llama"), **HYBRID)
    for mine, its in zip(hf.kernel_layers(fresh), hf.kernel_layers(new), strict=True):
        for (name, a), b in zip(mine.state_dict().items(), its.state_dict().values(), strict=True):
            assert torch.equal(a, b), name


def test_the_files_of_the_original_do_not_change(tmp_path):
    make("llama").save_pretrained(tmp_path)

    def sums():
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(tmp_path.iterdir())}

    before = sums()
    model = hf.convert(load(tmp_path), **HYBRID)
    hf.calibrate(model, TEXT)
    model(tokens(), labels=tokens()).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert sums() == before
    got = logits(load(tmp_path, dtype=torch.float64), inputs("llama"))
    assert torch.equal(got, logits(make("llama"), inputs("llama")))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda kept: kept.update(format=99), "format 99"),
        (lambda kept: kept.pop("sites"), "sites"),
        (lambda kept: kept.update(extra=1), "extra"),
        (lambda kept: kept.update(rule="sun"), "rule is 'sun'"),
        (lambda kept: kept.update(window=-1), "window is -1"),
        (lambda kept: kept.update(feature_map="nonsense"), "nonsense"),
        (lambda kept: kept["sites"]["layers.0.self_attn"].pop("heads"), "heads"),
        (lambda kept: kept["sites"]["layers.0.self_attn"].update(heads=-1), "heads and sizes"),
        (lambda kept: kept.update(sites={}), "names no such layer"),
        (lambda kept: kept.update(sites={"no": kept["sites"]["layers.0.self_attn"]}), "names no such layer"),
        (lambda kept: kept.update(sites=[1]), "convert the original model again"),
        ("a word", "convert the original model again"),
        ([3], "convert the original model again"),
    ],
)
def test_a_damaged_configuration_gives_one_line(damage, words, tmp_path):
    converted("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    if callable(damage):
        damage(config["reassoc"])
    else:
        config["reassoc"] = damage
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=words) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_the_kernel_weights_is_refused(tmp_path):
    converted("llama").save_pretrained(tmp_path / "converted")
    make("llama").save_pretrained(tmp_path / "original")
    config = (tmp_path / "converted" / "config.json").read_text()
    (tmp_path / "original" / "config.json").write_text(config)
    with pytest.raises(InputError, match="lacks") as caught:
        load(tmp_path / "original")
    assert "\n" not in str(caught.value)


def test_a_converted_model_saved_and_converted_again_is_refused(tmp_path):
    converted("llama").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="already"):
        hf.convert(load(tmp_path))
    model = load(tmp_path)
    stir(model)  # loading leaves parameters that can be trained
    assert all(p.requires_grad for la in hf.kernel_layers(model) for p in la.parameters())
