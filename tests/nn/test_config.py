"""Configs: plain values that say what is wrong with them."""

import json
import types
from dataclasses import FrozenInstanceError, fields

import pytest

from reassoc.nn import AttentionConfig, EncoderDecoderConfig, LanguageModelConfig

CONFIGS = {
    "attention": AttentionConfig(
        heads=8, key_heads=2, head_dim=12, value_dim=20, feature_map="favor+",
        map_options={"num_features": 64},
        rule="gated-delta", decay="feature", normalize="sum+attention", eps=1e-6, undefined="nan",
        position="rotary", rotary_base=500.0, convolution=4, query_key_norm=True, output_norm=True,
        output_gate=True, backend="torch",
    ),
    "language model": LanguageModelConfig(
        vocabulary=11, width=24, layers=3, hidden=30, learned_positions=7, dropout=0.25,
        attention=AttentionConfig(mixer="softmax", window=5, heads=3),
    ),
    "encoder-decoder": EncoderDecoderConfig(
        source_vocabulary=5, target_vocabulary=6, width=24, layers=3, hidden=30, learned_positions=7,
        dropout=0.5, attention=AttentionConfig(rule="delta"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_json_brings_a_config_back(name):
    config = CONFIGS[name]
    text = json.dumps(config.to_dict())
    back = type(config).from_dict(json.loads(text))
    assert back == config
    assert json.dumps(back.to_dict()) == text
    # Every field has a value of its own here, so that none is forgotten.
    untouched = {f.name for f in fields(config) if getattr(config, f.name) == f.default}
    assert untouched <= {"mixer", "window"}


def test_defaults_come_back_too():
    for config in (AttentionConfig(), LanguageModelConfig(7), EncoderDecoderConfig(7, 8)):
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert LanguageModelConfig.from_dict({"vocabulary": 7}) == LanguageModelConfig(7)


def test_a_dict_is_a_copy_of_plain_values():
    options = types.MappingProxyType({"num_features": 8})
    config = AttentionConfig(map_options=options)
    found = config.to_dict()
    assert type(found["map_options"]) is dict
    found["map_options"]["num_features"] = 9
    assert config.to_dict()["map_options"] == {"num_features": 8}
    json.dumps(LanguageModelConfig(7, attention=config).to_dict())


def test_a_config_does_not_change():
    with pytest.raises(FrozenInstanceError):
        AttentionConfig().heads = 2


def test_what_is_filled_in():
    assert AttentionConfig().groups == 4
    assert AttentionConfig(key_heads=2).groups == 2
    assert AttentionConfig().sizes(64) == (16, 16)
    assert AttentionConfig(head_dim=5).sizes(64) == (5, 5)
    assert AttentionConfig(value_dim=7).sizes(64) == (16, 7)
    chosen = {
        rule: AttentionConfig(rule=rule).normalization for rule in ("sum", "decay", "delta", "gated-delta")
    }
    assert chosen == {"sum": "attention", "decay": "attention", "delta": "sum", "gated-delta": "sum"}
    assert AttentionConfig(rule="delta", normalize="none").normalization == "none"


REFUSED = [
    ({"mixer": "conv"}, "mixer must be one of linear, softmax, got 'conv'"),
    ({"rule": "add"}, "rule must be one of sum, decay, delta, gated-delta, got 'add'"),
    ({"decay": "head"}, "decay must be one of token, feature, fixed, got 'head'"),
    ({"position": "learned"}, "position must be one of none, rotary, rotary-after, got 'learned'"),
    (
        {"normalize": "atention"},
        "normalize must be one of None, attention, sum, sum+attention, none, got 'atention'",
    ),
    ({"undefined": "0"}, "undefined must be one of nan, zero, raise, got '0'"),
    ({"mixer": []}, "mixer must be one of linear, softmax, got []"),
    ({"heads": 0}, "heads must be a whole number, at least 1, got 0"),
    ({"heads": None}, "heads must be a whole number, at least 1, got None"),
    ({"heads": True}, "heads must be a whole number, at least 1, got True"),
    ({"heads": 2.0}, "heads must be a whole number, at least 1, got 2.0"),
    ({"key_heads": 3}, "heads must be a multiple of key_heads, got 4 and 3"),
    ({"key_heads": 0}, "key_heads must be a whole number, at least 1, got 0"),
    ({"head_dim": -1}, "head_dim must be a whole number, at least 1, got -1"),
    ({"value_dim": "8"}, "value_dim must be a whole number, at least 1, got '8'"),
    ({"window": 0}, "window must be a whole number, at least 1, got 0"),
    ({"convolution": -1}, "convolution must be a whole number, at least 0, got -1"),
    ({"convolution": None}, "convolution must be a whole number, at least 0, got None"),
    ({"eps": float("nan")}, "eps must be a finite number, got nan"),
    ({"eps": "small"}, "eps must be a finite number, got 'small'"),
    ({"rotary_base": 0}, "rotary_base must be at least 1, got 0"),
    ({"rotary_base": True}, "rotary_base must be a finite number, got True"),
    ({"map_options": None}, "map_options must map names to values, got None"),
    ({"mixer": "softmax", "position": "rotary-after"}, "use rotary"),
    ({"rule": "delta", "window": 5}, "rule 'delta' has no window"),
    ({"rule": "delta", "eps": 0.1}, "normalize='sum' has none: leave eps=0"),
    ({"normalize": "none", "eps": 0.1}, "normalize='none' has none: leave eps=0"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_what_is_refused(values, message):
    for make in (lambda: AttentionConfig(**values), lambda: AttentionConfig.from_dict(values)):
        with pytest.raises(ValueError) as found:
            make()
        assert message in str(found.value)


def test_the_softmax_twin_takes_the_options_that_do_not_matter_to_it():
    AttentionConfig(mixer="softmax", rule="delta", window=5)
    AttentionConfig(mixer="softmax", normalize="none", eps=0.1)


WHOLE = [
    (LanguageModelConfig, {"vocabulary": 0}, "vocabulary must be a whole number, at least 1, got 0"),
    (LanguageModelConfig, {"vocabulary": 5, "layers": 0}, "layers must be a whole number"),
    (LanguageModelConfig, {"vocabulary": 5, "hidden": 0}, "hidden must be a whole number"),
    (LanguageModelConfig, {"vocabulary": 5, "width": 30}, "width 30 is not a multiple of 4 heads"),
    (LanguageModelConfig, {"vocabulary": 5, "learned_positions": -1}, "learned_positions must be"),
    (LanguageModelConfig, {"vocabulary": 5, "dropout": 1.0}, "dropout must be at least 0 and less than 1"),
    (LanguageModelConfig, {"vocabulary": 5, "dropout": "x"}, "dropout must be a finite number, got 'x'"),
    (EncoderDecoderConfig, {"source_vocabulary": 5, "target_vocabulary": -5}, "target_vocabulary must be"),
    (EncoderDecoderConfig, {"source_vocabulary": 5, "target_vocabulary": 5, "dropout": -1}, "dropout must"),
    (EncoderDecoderConfig, {"source_vocabulary": 5, "target_vocabulary": 5, "width": 9}, "give head_dim"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "message"), WHOLE, ids=str)
def test_whole_configs_refuse(kind, values, message):
    for make in (lambda: kind(**values), lambda: kind.from_dict(values)):
        with pytest.raises(ValueError, match=message):
            make()


STRANGE = [
    (AttentionConfig, {"colour": 1, "age": 2}, "AttentionConfig has no age, colour: made by another version"),
    (LanguageModelConfig, {"vocabulary": 5, "depth": 1}, "LanguageModelConfig has no depth"),
    (LanguageModelConfig, {"vocabulary": 5, "attention": {"depth": 1}}, "AttentionConfig has no depth"),
    (LanguageModelConfig, {"attention": {}}, "LanguageModelConfig needs vocabulary"),
    (LanguageModelConfig, {"vocabulary": 5, "attention": 5}, "made from names and values, got 5"),
    (EncoderDecoderConfig, {}, "EncoderDecoderConfig needs source_vocabulary, target_vocabulary"),
    (EncoderDecoderConfig, [1], r"made from names and values, got \[1\]"),
    (AttentionConfig, {1: 2}, "AttentionConfig has no 1"),
]


@pytest.mark.parametrize(("kind", "values", "message"), STRANGE, ids=str)
def test_strange_dicts_are_refused(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind.from_dict(values)
