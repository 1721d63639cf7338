"""Conversion in memory: every architecture against every weight written out, padding, and what is refused."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
import dense
import transformers as T
from hf_models import (
    CASES,
    DECODERS,
    MODELS,
    TOKENS,
    converted,
    gpt2,
    inputs,
    logits,
    make,
    tokens,
)  # fmt: skip

from reassoc import hf
from reassoc._errors import InputError

# Models run in float64: at most a few hundred terms a sum, a few layers deep.
EXACT = 1e-9


def close(got, wanted, tolerance=EXACT):
    return ((got - wanted).abs().max() / wanted.abs().max()).item() < tolerance


@pytest.mark.parametrize("padding", [{}, {"left": 7}, {"right": 9}], ids=["whole", "left", "right"])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_every_architecture_does_what_the_formula_says(name, way, padding):
    if name == "vit" and padding:
        pytest.skip("images have no padding")
    model, x = converted(name, way), inputs(name, **padding)
    got = logits(model, x)
    model.set_attn_implementation(dense.NAME)
    wanted = logits(model, x)
    if padding and name != "bart":
        real = x["attention_mask"].bool()
        got, wanted = got[real], wanted[real]
    assert close(got, wanted)


@pytest.mark.parametrize("name", DECODERS)
def test_a_window_over_everything_is_softmax(name):
    original = make(name)
    x = inputs(name, left=7)
    real = x["attention_mask"].bool()
    wanted = logits(original, x)[real]
    model = hf.convert(original, "codebook", map_options={"num_features": 16}, window=TOKENS)
    assert close(logits(model, x)[real], wanted)


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_converted_is_the_original(name):
    original = make(name)
    x = inputs(name, **({} if name == "vit" else {"right": 9}))
    real = x["attention_mask"].bool() if name in (*DECODERS, "bert") else ...
    wanted = logits(original, x)[real]
    model = hf.convert(original, "elu+1", layers=[])
    assert close(logits(model, x)[real], wanted)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(("name", "way"), [case for case in CASES if case[0] not in ("vit", "gpt2")])
def test_a_row_does_not_see_its_padding(name, way, left):
    model = converted(name, way)
    x = inputs(name, **({"left": 7} if left else {"right": 7}))
    part = slice(7, None) if left else slice(None, TOKENS - 7)
    alone = {key: row[:1] if key == "decoder_input_ids" else row[:1, part] for key, row in x.items()}
    if name in ("bert", "bart") and left:  # their positions are absolute, whatever the mask says
        pytest.skip("an encoder with absolute positions is padded at the right")
    got, wanted = logits(model, x)[:1], logits(model, alone)
    assert close(got if name == "bart" else got[:, part], wanted)


def test_layers_left_out_stay_softmax():
    original = make("llama", num_hidden_layers=3)
    changed = hf.convert(copy.deepcopy(original), "elu+1", layers=[1])
    seen = {}
    for which, model in (("original", original), ("changed", changed)):
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda _, __, out, at=(which, index): seen.__setitem__(at, out))
        logits(model, inputs("llama", right=5))
    assert [hasattr(layer.self_attn, "reassoc") for layer in changed.model.layers] == [False, True, False]
    real = inputs("llama", right=5)["attention_mask"].bool()
    assert close(seen["changed", 0][real], seen["original", 0][real])
    assert not close(seen["changed", 1][real], seen["original", 1][real], 1e-3)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: T.T5ForConditionalGeneration(
                T.T5Config(
                    vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                    decoder_start_token_id=0,
                )
            ),
            "position bias",
        ),
        (
            lambda: T.Gemma2ForCausalLM(
                T.Gemma2Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                               num_attention_heads=4, num_key_value_heads=2, head_dim=8)
            ),
            "soft-capped",
        ),
        (
            lambda: T.BloomForCausalLM(T.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
            "does not use transformers' attention interface",
        ),
    ],
    ids=["t5", "gemma2", "bloom"],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_reason(model, reason):
    model = model()
    before = model.config._attn_implementation
    with pytest.raises(InputError, match=reason) as caught:
        hf.convert(model)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == before and not hasattr(model.config, "reassoc")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama", {"feature_map": "nonsense"}, "nonsense"),
        ("llama", {"map_options": {"colour": 3}}, "colour"),
        ("llama", {"feature_map": None}, "window"),
        ("llama", {"window": 0}, "window is 0"),
        ("llama", {"sinks": -1, "window": 4}, "sinks is -1"),
        ("llama", {"sinks": 3}, "sinks=3"),
        ("llama", {"rule": "sun"}, "rule is 'sun'"),
        ("llama", {"rule": "delta", "window": 8}, "delta"),
        ("llama", {"layers": [0, 7]}, "layers 0 to 1"),
        ("mistral", {"feature_map": "elu+1", "rule": "delta"}, "sliding window"),
        ("bert", {"feature_map": "elu+1", "rule": "delta"}, "both ways"),
        ("bert", {"feature_map": None, "window": 8}, "both ways"),
        ("llama", {"feature_map": "exp", "map_options": {"projections": torch.ones(2, 4, 8)}}, "map_options"),
        ("llama", {"example": {"input_ids": torch.ones(1, 5)}}, "cannot be run"),
    ],
)
def test_a_bad_request_gives_one_line_and_leaves_the_model_alone(name, options, words):
    model = make(name)
    x = inputs(name)
    before = logits(model, x)
    with pytest.raises(InputError, match=words) as caught:
        hf.convert(model, **options)
    assert "\n" not in str(caught.value)
    assert next(hf.kernel_layers(model), None) is None and not hasattr(model.config, "reassoc")
    assert torch.equal(logits(model, x), before)


def test_twice_and_other_things_are_refused():
    with pytest.raises(InputError, match="already"):
        hf.convert(converted("llama"))
    with pytest.raises(InputError, match="transformers model"):
        hf.convert(torch.nn.Linear(2, 2))


def test_attention_dropout_becomes_zero_with_one_warning():
    model = MODELS["llama"](attention_dropout=0.1)
    with pytest.warns(UserWarning, match="attention_dropout") as seen:
        hf.convert(model, "elu+1")
    assert len(seen) == 1 and model.config.attention_dropout == 0.0
    model = gpt2(attn_pdrop=0.1)
    with pytest.warns(UserWarning, match="attn_pdrop"):
        hf.convert(model, "elu+1")
    model.train()
    ids = tokens()
    assert torch.equal(model(ids).logits, model(ids).logits)  # nothing random is left


@pytest.mark.parametrize("way", ["pure", "codebook", "decay"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "bart"])
def test_gradient_checkpointing_gives_the_same_gradients(name, way):
    model, x = converted(name, way), inputs(name)
    x.pop("position_ids", None)
    model.train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            # Renamed between the versions of transformers that are supported.
            old = model.gradient_checkpointing_enable
            getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        model.zero_grad()
        model(**x, use_cache=False).logits.square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert any("reassoc" in n for n in found[0]) == (way != "pure")
    for n, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][n], rtol=1e-9, atol=1e-12), n


def test_a_copy_is_another_model():
    model, x = converted("llama"), inputs("llama")
    twin = copy.deepcopy(model)
    wanted = logits(model, x)
    assert torch.equal(logits(twin, x), wanted)
    with torch.no_grad():
        for layer in hf.kernel_layers(twin):
            layer.log_weight += 1
    assert torch.equal(logits(model, x), wanted) and not close(logits(twin, x), wanted, 1e-6)


def test_packed_sequences_and_masks_over_pairs_are_refused():
    model, ids = converted("llama"), tokens(1)
    restart = torch.cat([torch.arange(15), torch.arange(TOKENS - 15)])[None]
    with pytest.raises(InputError, match="packed"):
        model(ids, position_ids=restart, use_cache=False)
    pairs = torch.ones(TOKENS, TOKENS).tril()[None, None].bool()
    with pytest.raises(InputError, match="padding only"):
        model(ids, attention_mask=pairs)


def test_a_map_that_is_not_fitted_says_so():
    model = hf.convert(make("llama"), "landmark", map_options={"num_features": 10, "landmarks": 8})
    with pytest.raises(ValueError, match="fitted"):
        model(tokens())


def test_a_model_that_is_not_converted_is_not_touched():
    before = make("llama")
    wanted = logits(before, inputs("llama"))
    converted("llama")
    assert torch.equal(logits(make("llama"), inputs("llama")), wanted)


def test_a_sliding_window_that_is_in_the_mask_alone_is_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12}
    with pytest.raises(InputError, match="by its mask alone"):
        hf.convert(T.PhimoeForCausalLM(T.PhimoeConfig(**sizes, **heads)))
