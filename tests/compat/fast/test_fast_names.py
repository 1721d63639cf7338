"""Builders, registries, specs, events and mappers, as old code uses them; what is not here says so."""

import argparse

import pytest
import torch
from torch import nn

from reassoc.compat.fast_transformers import attention as attentions
from reassoc.compat.fast_transformers import builders
from reassoc.compat.fast_transformers.attention_registry import (
    AttentionRegistry,
    Bool,
    Callable,
    Choice,
    EventDispatcherInstance,
    Float,
    Int,
    Optional,
    Registry,
    Spec,
)
from reassoc.compat.fast_transformers.builders.base import BaseBuilder
from reassoc.compat.fast_transformers.builders.transformer_builders import BaseTransformerEncoderBuilder
from reassoc.compat.fast_transformers.events import (
    AttentionEvent,
    Event,
    EventDispatcher,
    IntermediateOutput,
    QKVEvent,
)
from reassoc.compat.fast_transformers.events.filters import from_layer, layer_name_contains
from reassoc.compat.fast_transformers.feature_maps import Favor, GeneralizedRandomFeatures
from reassoc.compat.fast_transformers.masking import FullMask, LengthMask
from reassoc.compat.fast_transformers.rotary import RotaryEncoderBuilder
from reassoc.compat.fast_transformers.transformers import TransformerEncoder, TransformerEncoderLayer
from reassoc.compat.fast_transformers.weight_mapper import (
    HugginfaceBertEncoderMapper,
    IdentityRule,
    LongformerMapper,
    OrRule,
    PytorchMapper,
    RegexRule,
    SimpleMapper,
)

SMALL = {"n_layers": 1, "n_heads": 2, "query_dimensions": 4, "value_dimensions": 4, "dropout": 0.0}
EVERY = ["TransformerEncoder", "RecurrentEncoder", "TransformerDecoder", "RecurrentDecoder"]


@pytest.mark.parametrize("name", EVERY)
def test_builders_from_everything(name):
    """Keywords, a dictionary, a namespace; unknown names are refused, or left out."""
    kind = getattr(builders, f"{name}Builder")
    assert kind.from_kwargs(**SMALL).n_heads == 2
    assert kind.from_dictionary(SMALL | {"other": 1}, strict=False).query_dimensions == 4
    assert kind.from_namespace(argparse.Namespace(n_layers=3, learning_rate=1.0)).n_layers == 3
    with pytest.raises(ValueError, match=f"{name}Builder has no parameter 'other'"):
        kind.from_kwargs(other=1)
    with pytest.raises(ValueError, match=r"activation must be one of .*, got 'tanh'"):
        kind.from_kwargs(activation="tanh")
    with pytest.raises(ValueError, match="legacy must be one of"):
        kind.from_kwargs(legacy="old")
    with pytest.raises(AttributeError, match="has a parameter 'dropout_rate'"):
        kind().dropout_rate = 0.1


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("legacy", [None, "exact"])
def test_the_mode_reaches_every_attention(name, legacy):
    """And the maps within."""
    types = ["self_attention_type", "cross_attention_type"] if "Decoder" in name else ["attention_type"]
    for kind in ("linear", "full"):
        model = (
            getattr(builders, f"{name}Builder")
            .from_kwargs(**SMALL, **dict.fromkeys(types, kind), feature_map=Favor.factory(), legacy=legacy)
            .get()
        )
        modes = [m.legacy for m in model.modules() if hasattr(m, "legacy")]
        assert len(modes) == len(types) * (2 if kind == "linear" else 1)
        assert set(modes) == {legacy}


def test_parameters_come_in_the_original_s_order():
    """Optimizers keep their state by number: another order would load one weight's moments into another's."""
    model = builders.TransformerDecoderBuilder.from_kwargs(**SMALL).get()
    seen = dict.fromkeys(name.split(".")[2] for name, _ in model.layers.named_parameters(prefix="layers"))
    names = ["self_attention", "cross_attention", "linear1", "linear2", "norm1", "norm2", "norm3"]
    assert list(seen) == names
    first = model.layers[0].self_attention
    roles = ["query", "key", "value", "out"]
    assert list(dict.fromkeys(n.split("_")[0] for n, _ in first.named_parameters())) == roles


def test_parameters_of_builders():
    """Defaults, norms, types, compositions, and what repr says."""
    builder = builders.TransformerEncoderBuilder()
    assert (builder.n_layers, builder.feed_forward_dimensions, builder.activation) == (4, 1024, "relu")
    builder.final_normalization = 0
    builder.attention_type = "conditional-full:causal-linear"
    builder.query_dimensions = "8"  # the attention's own copy is a number
    assert builder.attention.query_dimensions == 8
    builder.length_limit = 7
    assert "length_limit=7" in repr(builder.attention)
    builder.query_dimensions = 8
    model = builder.get()
    assert model.norm is None
    inner = model.layers[0].attention.inner_attention
    assert inner.length_limit == 7 and type(inner.other_attention) is attentions.CausalLinearAttention
    with pytest.raises(ValueError, match="parameter 'feature_map' must be Optional"):
        builder.attention.feature_map = 3
    with pytest.raises(AttributeError, match="'softmax_temp' of AttentionBuilder was not set"):
        _ = builder.attention.softmax_temp
    with pytest.raises(ValueError, match="must leave one attention outermost"):
        builder.attention.get("full,linear")
    with pytest.raises(ValueError, match="attention_type must be made of"):
        builder.attention.get("nothing")
    assert isinstance(builder, BaseBuilder)


@pytest.mark.parametrize("name", attentions._elsewhere.NAMES)
def test_attention_that_is_not_linear_is_refused_by_name(name):
    """With what to use; its parameters are taken, since old scripts set them all."""
    builder = builders.TransformerEncoderBuilder()
    for parameter in attentions._elsewhere.PARAMETERS:
        setattr(builder, parameter, 3)
    with pytest.raises(ValueError, match=f"{name} is not linear attention and not part of reassoc.*'full'"):
        builder.attention_type = name
    with pytest.raises(ValueError, match="is not linear attention"):
        builders.AttentionBuilder().get(f"conditional-full:{name}")


@pytest.mark.parametrize("name", attentions._elsewhere.CLASSES)
def test_classes_that_are_not_here(name):
    """Importing says why; any other name is merely unknown."""
    with pytest.raises(ImportError, match=f"{name} is not linear attention"):
        getattr(attentions, name)
    assert not hasattr(attentions, "Unheard")


def test_registries():
    """Names once, parameters with one meaning."""
    registry = Registry()
    registry.register("a", dict, [("x", Int), ("y", Optional(Float, 0.5))])
    registry.register("b", dict, [("y", Optional(Float, 0.5))])
    assert registry.keys == ["a", "b"] and "a" in registry and registry["b"] == (dict, ["y"])
    assert registry.contains_parameter("x") and not registry.contains_parameter("z")
    assert registry.validate_parameter("y", None) == 0.5
    with pytest.raises(ValueError, match="'a' is already registered"):
        registry.register("a", dict, [])
    with pytest.raises(ValueError, match=r"must have the spec Int .* got Float"):
        registry.register("c", dict, [("y", Optional(Float, 0.5)), ("x", Float)])
    assert "c" not in registry
    with pytest.raises(ValueError, match="parameter 'x' must be Int, got 'many'"):
        registry.validate_parameter("x", "many")
    assert {"full", "linear", "causal-linear", "conditional-full"} <= set(AttentionRegistry.keys)


def test_specs():
    """Values, equality, and how they show."""
    assert Int.get("3") == 3 and Float.get(1) == 1.0 and Bool.get(0) is False
    assert Callable.get(len) is len and not Callable.check(3)
    assert Choice(["a", "b"]).check("a") and not Choice(["a"]).check("c")
    assert EventDispatcherInstance.check("name") and not EventDispatcherInstance.check(None)
    assert Optional(Int, 5) == Optional(Int, 5) != Optional(Int, 6)
    assert Choice([1]) == Choice([1]) != Choice([2]) and Int != Float
    assert repr(Optional(Choice([1]), 1)) == "Optional[Choice([1]), 1]"
    assert Spec(int).check("x") is False and repr(Spec(int)) == "CustomSpec"


def test_events_and_filters():
    """Classes, layers, names and functions, combined."""
    dispatcher = EventDispatcher()
    model = builders.TransformerEncoderBuilder.from_kwargs(
        n_layers=3, n_heads=2, query_dimensions=4, value_dimensions=4, event_dispatcher=dispatcher
    ).get()
    counts = {}

    def count(key, event_filter):
        counts[key] = 0

        def handle(event):
            counts[key] += 1

        dispatcher.listen(event_filter, handle)

    count("all", Event)
    count("qkv", QKVEvent)
    count("weights", AttentionEvent)
    count("outputs", IntermediateOutput)
    count("last", AttentionEvent & layer_name_contains(model, "layers.2"))
    count("not last", AttentionEvent & ~layer_name_contains(model, "layers.2"))
    count("either", from_layer(model.layers[0].attention) | layer_name_contains(model, "layers.2"))
    count("function", QKVEvent & layer_name_contains(model, "layers") & (lambda e: e.queries.shape[1] == 5))
    model(torch.randn(2, 5, 8))
    assert counts == {
        "all": 9, "qkv": 3, "weights": 3, "outputs": 3, "last": 1, "not last": 2, "either": 3, "function": 3,
    }  # fmt: skip
    dispatcher.clear()
    model(torch.randn(2, 5, 8))
    assert counts["all"] == 9
    assert EventDispatcher.get("x") is EventDispatcher.get("x") is not EventDispatcher.get("y")
    assert EventDispatcher.get(dispatcher) is dispatcher


def test_a_handler_may_remove_itself():
    """While it handles."""
    dispatcher, heard = EventDispatcher(), []

    def once(event):
        heard.append(event)
        dispatcher.remove(once)

    dispatcher.listen(Event, once)
    for _ in range(2):
        dispatcher.dispatch(Event(None))
    assert len(heard) == 1


def test_masks_refuse_what_they_are_not():
    """A bool tensor, or a size."""
    with pytest.raises(ValueError, match=r"mask must be a bool tensor, got torch.float32"):
        FullMask(torch.ones(2, 2))
    with pytest.raises(ValueError, match="got neither"):
        FullMask()
    assert LengthMask(torch.tensor([2, 1])).shape == (2, 2)
    assert FullMask(100_000).shape == (100_000, 100_000)  # no matrix of ten billion


class Rotated(attentions.AttentionLayer):
    """A layer of a user's own, as MoLFormer has one (with rotary positions), around attention."""

    def forward(self, queries, keys, values, attn_mask, query_lengths, key_lengths):
        flipped = queries.flip(-1)
        return super().forward(flipped, keys, values, attn_mask, query_lengths, key_lengths)


class RotatedBuilder(BaseTransformerEncoderBuilder):
    def _get_attention_builder(self):
        return builders.AttentionBuilder()

    def _get_attention_layer_class(self):
        return Rotated

    def _get_encoder_class(self):
        return TransformerEncoder

    def _get_encoder_layer_class(self):
        return TransformerEncoderLayer


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_builders_of_users_own(legacy):
    """Four hooks name the classes; everything else is inherited."""
    model = RotatedBuilder.from_kwargs(
        **SMALL, attention_type="linear", feature_map=GeneralizedRandomFeatures.factory(n_dims=16),
        activation="gelu", legacy=legacy,
    ).get().eval()  # fmt: skip
    assert type(model.layers[0].attention) is Rotated
    x = torch.randn(2, 6, 8)
    out = model(x, length_mask=LengthMask(torch.tensor([6, 3]), 6))
    assert out.shape == x.shape and out.isfinite().all()


def test_rotary_layers_turn_queries_and_keys():
    """Coordinates i and i + E/2 are one complex number, turned by the position times a frequency."""
    made = {}
    for builder in (RotaryEncoderBuilder, builders.TransformerEncoderBuilder):
        torch.manual_seed(0)
        made[builder] = builder.from_kwargs(**SMALL, attention_type="linear").get().eval()
    turned, plain = (model.layers[0].attention for model in made.values())
    assert list(turned.state_dict())[-1] == "rotaryemb.inv_freq"
    seen = []
    plain.inner_attention.register_forward_pre_hook(lambda _, given: seen.append(given))
    turned.inner_attention.register_forward_pre_hook(lambda _, given: seen.append(given))
    x = torch.randn(2, 6, 8)
    for model in made.values():
        model(x)
    size = seen[0][0].shape[-1]
    frequencies = 10000 ** -(torch.arange(0, size, 2) / size).double()
    factor = torch.polar(torch.ones(1).double(), torch.arange(6)[:, None, None] * frequencies)
    for was, now in zip(seen[1][:2], seen[0][:2], strict=True):
        first, second = (torch.view_as_complex(torch.stack(t.double().chunk(2, -1), -1)) for t in (was, now))
        torch.testing.assert_close(second, first * factor, rtol=1e-6, atol=1e-6)
    assert torch.equal(seen[0][2], seen[1][2])
    with pytest.raises(ValueError, match="even size, got 3"):
        RotaryEncoderBuilder.from_kwargs(**SMALL | {"query_dimensions": 3}).get()


def test_weights_of_other_encoders():
    """Torch's encoder gives the same output under the mapped names; BERT's names become ours."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    ours = builders.TransformerEncoderBuilder.from_kwargs(
        **SMALL | {"n_layers": 2}, feed_forward_dimensions=12, final_normalization=False
    ).get().eval()  # fmt: skip
    ours.load_state_dict(PytorchMapper().map(theirs.state_dict()), strict=True)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)

    bert = {
        "layer.3.attention.self.query.weight": "layers.3.attention.query_projection.weight",
        "layer.3.attention.output.dense.bias": "layers.3.attention.out_projection.bias",
        "layer.3.attention.output.LayerNorm.bias": "layers.3.norm1.bias",
        "layer.3.intermediate.dense.weight": "layers.3.linear1.weight",
        "layer.3.output.dense.weight": "layers.3.linear2.weight",
        "layer.3.output.LayerNorm.weight": "layers.3.norm2.weight",
    }
    values = dict.fromkeys(bert, torch.ones(1))
    assert list(HugginfaceBertEncoderMapper().map(values)) == list(bert.values())
    wide = values | {"layer.3.attention.self.key_global.weight": torch.ones(1)}
    assert list(LongformerMapper().map(wide)) == list(bert.values())


def test_mappers_from_files_and_rules(tmp_path):
    """Only tensors are read; rules do not leak from one mapper to the next."""
    torch.save({"model": {"self_attn.in_proj_bias": torch.arange(6.0)}, "epoch": 3}, tmp_path / "a.pt")
    state = PytorchMapper.load_file(tmp_path / "a.pt", model_root="model")
    assert state["epoch"] == 3
    assert state["model"]["attention.key_projection.bias"].tolist() == [2.0, 3.0]
    either = OrRule(RegexRule("^a", "b"), RegexRule("c$", "d"))
    assert SimpleMapper([either]).map({"ac": 1, "x": 2}) == {"bd": 1, "x": 2}
    assert SimpleMapper([either], add_identity=False).map({"x": 2}) == {}
    assert SimpleMapper().map({"x": 2}) == {"x": 2}
    assert IdentityRule().matches("anything")
