"""Modules from what a checkpoint tells of itself, in either mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._errors import InputError
from ._recognize import FAST, PERFORMER, Model

FEATURES = {
    PERFORMER: ("favor", "generalized", "none"),
    FAST: ("favor", "fourier", "generalized", "elu"),
}


def rebuild(model: Model, legacy: str | None, options: dict[str, Any], redraw: bool = False) -> nn.Module:
    """The model of a checkpoint with its weights, in evaluation.

    Args:
        model: what was recognized. legacy: the mode.
        options: what shapes do not tell: ``causal``, ``features``, and those of :func:`check`.
        redraw: let a map of fast-transformers draw in evaluation, as the original does by default.

    Raises:
        InputError: the weights are not those of such a model.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # construction draws; the caller's numbers are not its to use
            if model.library == PERFORMER:
                made = _performer(model, legacy, options)
            elif model.library == FAST:
                made = _fast(model, legacy, options, redraw)
            else:
                made = _geometric(model, legacy)
    except (ValueError, ImportError) as error:
        raise InputError(f"{model.library}: {error}") from error
    except RuntimeError as error:  # of load_state_dict: a title, then one line for each kind of difference
        lines = [line.strip() for line in str(error).splitlines()]
        raise InputError(
            f"the weights are not those of a plain {model.library} model: "
            f"{' '.join(lines[1:2] or lines)[:300]}"
        ) from error
    return made.float().eval().requires_grad_(False)


def _performer(model: Model, legacy: str | None, options: dict[str, Any]) -> nn.Module:
    from .performer_pytorch import FastAttention, Performer, find_modules

    sizes = dict(model.sizes)
    if options["cross_attend"]:
        if sizes["depth"] % 2:
            raise InputError(f"cross-attention needs an even number of layers, the file has {sizes['depth']}")
        sizes["depth"] //= 2
    made = Performer(
        **sizes,
        causal=options["causal"],
        cross_attend=options["cross_attend"],
        generalized_attention=options["features"] == "generalized",
        no_projection=options["features"] == "none",
        local_attn_heads=options["local_heads"],
        local_window_size=options["local_window"],
        auto_check_redraw=False,
        legacy=legacy,
    )
    made.load_state_dict(model.weights)
    for attention in find_modules(made, FastAttention):
        attention.older = options["older"]
    return made


def _fast(model: Model, legacy: str | None, options: dict[str, Any], redraw: bool) -> nn.Module:
    from .fast_transformers.builders import TransformerEncoderBuilder
    from .fast_transformers.rotary import RotaryEncoderBuilder

    if model.sizes["decoder"]:
        raise InputError(
            "a decoder of pytorch-fast-transformers can be described, not run; leave out --input"
        )
    sizes = dict(model.sizes)
    heads = int(sizes.get("n_heads") or options["heads"] or 0)
    if heads < 1:
        raise InputError("the number of heads is not in the file: give --heads, at least 1")
    if "queries" in sizes:
        if sizes["queries"] % heads or sizes["values"] % heads:
            raise InputError(f"--heads {heads} does not divide {sizes['queries']}, the size of all queries")
        sizes["query_dimensions"] = sizes["queries"] // heads
        sizes["value_dimensions"] = sizes["values"] // heads
    if sizes["value_dimensions"] * heads != sizes["d_model"]:
        raise InputError(
            f"values of {heads} heads of size {sizes['value_dimensions']} do not make the model's size "
            f"{sizes['d_model']}"
        )
    wanted = (
        "n_layers", "query_dimensions", "value_dimensions", "feed_forward_dimensions", "final_normalization",
    )  # fmt: skip
    builder = RotaryEncoderBuilder if sizes["rotary"] else TransformerEncoderBuilder
    made = builder.from_kwargs(
        **{name: sizes[name] for name in wanted},
        n_heads=heads,
        attention_type="causal-linear" if options["causal"] else "linear",
        activation=options["activation"],
        feature_map=_feature_map(sizes, options, redraw),
        legacy=legacy,
    ).get()
    made.load_state_dict(model.weights)
    return made  # type: ignore[no-any-return]


def _feature_map(sizes: dict[str, Any], options: dict[str, Any], redraw: bool) -> Any:
    from .fast_transformers import feature_maps as maps

    kind: str = options["features"]
    if kind == "elu":
        return maps.elu_feature_map
    m: int = sizes["omega"]
    shared: dict[str, Any] = {"deterministic_eval": not redraw}
    if options["softmax_temp"] is not None:
        shared["softmax_temp"] = options["softmax_temp"]
    if kind == "favor":
        return maps.Favor.factory(n_dims=2 * m, stabilize=options["stabilize"], **shared)
    if kind == "fourier":
        return maps.RandomFourierFeatures.factory(n_dims=2 * m, **shared)
    return maps.GeneralizedRandomFeatures.factory(n_dims=m, **shared)


def _geometric(model: Model, legacy: str | None) -> nn.Module:
    """Its attention layers alone: what lies between them is not of one shape."""
    from .torch_geometric import PerformerAttention

    sizes = dict(model.sizes)
    names = sizes.pop("layers")
    sizes.pop("features")
    layers = nn.ModuleList()
    for name in names:
        layer = PerformerAttention(**sizes, legacy=legacy)
        given = {n: model.weights[name + n] for n in layer.state_dict() if name + n in model.weights}
        layer.load_state_dict(given)
        layers.append(layer)
    return layers
