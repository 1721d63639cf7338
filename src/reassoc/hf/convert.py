"""From a pretrained model to one with kernel attention, in memory and from a checkpoint."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .._errors import InputError
from ._interface import NAME, SLOT
from ._layer import KernelLayer
from ._probe import find_sites
from ._settings import Conversion
from .cache import take_place

_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attention_probs_dropout")


def convert(
    model: PreTrainedModel,
    feature_map: str | None = "codebook",
    *,
    map_options: Mapping[str, Any] | None = None,
    window: int | None = None,
    sinks: int = 0,
    layers: Iterable[int] | None = None,
    rule: str = "sum",
    example: dict[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Replace softmax attention by kernel attention in a transformers model, in memory and in place.

    Works for every model that uses transformers' attention interface: encoder or decoder, grouped heads,
    rotary or not, sliding windows (which keep their width). Cross-attention stays softmax: its keys do
    not grow. Weights are kept; maps are as they start, so :func:`calibrate` comes next.

    ``generate`` then has a cache of constant size; ``save_pretrained`` keeps everything, and
    ``from_pretrained`` brings it back where ``reassoc.hf`` has been imported.

    Args:
        model: any loaded model; evaluation or training mode stays as it is.
        feature_map: a name of :func:`reassoc.feature_maps.names`; ``None`` with a window: window and
            sinks alone.
        map_options: for :func:`reassoc.feature_maps.make`, such as ``{"num_features": 256}``. Parameters are
            separate for every key head, random maps drawn anew for every layer.
        window, sinks: causal layers are exact over so many recent positions and first keys (see
            :func:`reassoc.hybrid_attention`). ``None``: no exact part. Other layers have none either.
        layers: which self-attention layers, counted in the order they run; ``None``: all.
        rule: ``"sum"``, ``"decay"``, or without a window ``"delta"`` or ``"gated-delta"``, with one trainable
            rate for each key head.
        example: inputs to find the layers with, for a model that takes neither tokens nor pixels.

    Returns:
        The model itself.

    Raises:
        InputError: a ``ValueError`` naming what cannot be converted and why.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import reassoc.hf
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = reassoc.hf.convert(LlamaForCausalLM(config), "elu+1", window=16, sinks=2)
        >>> sum(isinstance(m, reassoc.hf.KernelLayer) for m in model.modules())
        2
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"convert takes a transformers model, got {type(model).__name__}")
    if next(kernel_layers(model), None) is not None:
        raise InputError("this model is converted already; convert the original")
    wanted = Conversion(feature_map, dict(map_options or {}), window, sinks, rule)
    wanted.check()
    found = find_sites(model, example)
    chosen = list(range(len(found))) if layers is None else sorted(set(layers))
    if chosen and not (chosen[0] >= 0 and chosen[-1] < len(found)):
        raise InputError(f"layers are {chosen}; the model has layers 0 to {len(found) - 1}")
    names = {module: name for name, module in _base(model).named_modules()}
    sites = {}
    for index, (module, site) in enumerate(found.items()):
        if index not in chosen:
            continue
        if not site.causal and (site.span is not None or wanted.rule not in ("sum", "decay")):
            what = f"a sliding window of {site.span}" if site.span else f"rule {wanted.rule!r}"
            raise InputError(
                f"layer {index} sees both ways, and {what} needs an order; leave it out with layers="
            )
        if not site.causal and feature_map is None:
            raise InputError(f"layer {index} sees both ways and has no recent tokens: it needs a feature map")
        if site.span is not None and "delta" in wanted.rule:
            raise InputError(
                f"layer {index} has a sliding window of {site.span}, which rule={wanted.rule!r} cannot have: "
                "use rule='sum' or 'decay', or leave the layer out with layers="
            )
        sites[names[module]] = site
    conversion = replace(wanted, sites=sites)
    install(model, conversion)
    model.config.reassoc = conversion.to_dict()
    _stop_dropout(model)
    return model


def install(model: PreTrainedModel, conversion: Conversion) -> None:
    """Put a :class:`KernelLayer` into every attention module that the conversion names and that is there."""
    base = _base(model)
    modules = dict(base.named_modules())
    made = [
        (modules[name], KernelLayer(conversion, site, index))
        for index, (name, site) in enumerate(conversion.sites.items())
        if name in modules and not hasattr(modules[name], SLOT)
    ]
    for module, layer in made:
        like = next(module.parameters(), None)
        if like is not None:
            layer.to(like.device)
        module.add_module(SLOT, layer)
        module.register_forward_pre_hook(take_place, with_kwargs=True)
    model.set_attn_implementation(NAME)


def kernel_layers(model: nn.Module) -> Iterator[KernelLayer]:
    """The converted layers of a model, in order."""
    return (module for module in model.modules() if isinstance(module, KernelLayer))


def _base(model: PreTrainedModel) -> nn.Module:
    base: nn.Module = model.base_model
    return base


def _stop_dropout(model: PreTrainedModel) -> None:
    rates = [(c, name) for c in _configs(model) for name in _DROPOUTS if getattr(c, name, 0.0)]
    if rates:
        warnings.warn(
            f"attention dropout ({', '.join(sorted({name for _, name in rates}))}) is now 0: it has no "
            "counterpart in a sum over keys",
            stacklevel=3,
        )
    for config, name in rates:
        setattr(config, name, 0.0)


def _configs(model: PreTrainedModel) -> list[Any]:
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


def _come_back(original: Any) -> Any:
    @functools.wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        kept = getattr(self.config, "reassoc", None)
        if kept is not None:
            install(self, Conversion.from_dict(kept))

    return post_init


def _complete(original: Any) -> Any:
    @functools.wraps(original)
    def adjust(self: PreTrainedModel, loading_info: Any) -> Any:
        missing, extra = (
            sorted(name for name in names if f".{SLOT}." in name)
            for names in (loading_info.missing_keys, loading_info.unexpected_keys)
        )
        if missing:
            raise InputError(
                f"the checkpoint lacks {missing[0]}, which its config.json promises: it is not the one that "
                "save_pretrained wrote after the conversion"
            )
        if extra and next(kernel_layers(self), None) is None:
            raise InputError(
                f"the checkpoint holds {extra[0]}, but 'reassoc' in its config.json names no such layer: "
                "take the config.json that save_pretrained wrote beside it"
            )
        return original(self, loading_info)

    return adjust


# Weights that are missing would be whatever was in memory, and weights too many would be left out silently.
PreTrainedModel._adjust_missing_and_unexpected_keys = _complete(
    PreTrainedModel._adjust_missing_and_unexpected_keys
)

# A checkpoint's weights are read into what its class makes: the layers have to be there before. Every model
# class of transformers ends its construction with this method.
PreTrainedModel.post_init = _come_back(PreTrainedModel.post_init)
