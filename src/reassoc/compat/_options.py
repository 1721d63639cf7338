"""What no weight tells and a user says: checked, and completed by what is usual."""

from __future__ import annotations

import math
from typing import Any

from .._errors import InputError
from ._rebuild import FEATURES
from ._recognize import FAST, GEOMETRIC, PERFORMER, Model
from .fast_transformers.builders._transformer import ACTIVATIONS

LOCAL_WINDOW = 256
# Who knows an option, and what it is when nobody gives it.
_KNOWN: dict[str, tuple[tuple[str, ...], Any]] = {
    "causal": ((PERFORMER, FAST), False),
    "heads": ((FAST,), None),
    "activation": ((FAST,), None),
    "stabilize": ((FAST,), False),
    "softmax_temp": ((FAST,), None),
    "cross_attend": ((PERFORMER,), False),
    "local_heads": ((PERFORMER,), 0),
    "local_window": ((PERFORMER,), LOCAL_WINDOW),
    "older": ((PERFORMER,), False),
}
_LEAST = {"heads": 1, "local_heads": 0, "local_window": 1}


def check_options(options: dict[str, Any], models: list[Model]) -> None:
    """Refuse values without a meaning, and options that none of the models has: they would be ignored.

    Raises:
        InputError: such a one.
    """
    for name, least in _LEAST.items():
        if options[name] is not None and options[name] < least:
            raise InputError(f"{name} must be at least {least}, got {options[name]}")
    temperature = options["softmax_temp"]
    if temperature is not None and not 0 < temperature < math.inf:
        raise InputError(f"softmax_temp must be a positive number, got {temperature}")
    if options["activation"] not in (None, *ACTIVATIONS):
        raise InputError(f"activation must be one of {ACTIVATIONS}, got {options['activation']!r}")
    libraries = {model.library for model in models}
    for name, (known, default) in _KNOWN.items():
        if options[name] != default and not libraries & set(known):
            raise InputError(f"{name} is an option for {' and '.join(known)}, and this is of another library")


def choices(model: Model, options: dict[str, Any]) -> dict[str, Any]:
    """The options for one model, all of them: with rotary layers what MoLFormer has is usual.

    Raises:
        InputError: what the model's weights contradict.
    """
    molformer = bool(model.sizes.get("rotary"))
    features = options["features"]
    if molformer and features is None and model.matrices:
        features = "generalized"
    features = _features(model, features)
    heads = model.sizes.get("n_heads")
    if options["heads"] and heads and options["heads"] != heads:
        raise InputError(f"heads: {options['heads']} was given, and the file has {heads}")
    if features == "elu" and (options["stabilize"] or options["softmax_temp"]):
        raise InputError("stabilize and softmax_temp are options for random features, and these are elu + 1")
    return {
        **options,
        "features": features,
        "activation": options["activation"] or ("gelu" if molformer else "relu"),
        "older": options["older"] or model.before_updater,
    }


def _features(model: Model, asked: str | None) -> str:
    if model.library == GEOMETRIC:
        known: tuple[str, ...] = ("generalized",)
    elif model.library == FAST:
        known = FEATURES[FAST][:3] if model.matrices else FEATURES[FAST][3:]
    else:
        known = FEATURES[model.library]
    if asked is not None and asked not in known:
        raise InputError(
            f"features of this {model.library} checkpoint can be {', '.join(known)}, got {asked!r}"
        )
    return asked or known[0]
