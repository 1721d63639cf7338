"""Panel "Reassociation": the same attention by rescanning every key and from a running state."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import AttentionState, attention_matrix, linear_attention, read
from .._errors import InputError
from ..feature_maps import FeatureMap, make
from .controls import Control, choice, numbers, settle
from .presets import PRESETS
from .tables import tables

_RANDOM = ("trig", "favor+")
CONTROLS: tuple[Control, ...] = (
    choice("preset", "Preset", {name: preset.label for name, preset in PRESETS.items()}),
    choice(
        "map",
        "Feature map",
        {
            "identity": "identity",
            "elu+1": "ELU+1",
            "relu": "ReLU",
            "trig": "trigonometric",
            "favor+": "positive (FAVOR+)",
            "dpfp": "DPFP-n",
        },
    ),
    numbers("m", "Projections m", tuple(range(1, 17)), 4, (4, 16), when=("map", _RANDOM)),
    numbers("seed", "Seed", tuple(range(10)), 0, (0, 1, 2), when=("map", _RANDOM)),
    numbers("nu", "Shifts n", (1, 2, 3), 1, when=("map", ("dpfp",))),
)


def reassociation(given: Mapping[str, str]) -> dict[str, Any]:
    """Everything that the panel shows, for every query and every prefix.

    Returns:
        ``query_features`` (Q, r), ``key_features`` (n, r), ``scores`` (Q, n), ``terms`` (Q, n, e), score
        times value, and ``notes`` of the map; and of ``prefixes`` 0 to n each: ``S`` (r, e), ``z`` (r) at
        true scale, what the last key added to them (``added_S``, ``added_z``), and by query ``weights`` and
        ``softmax_weights`` of its keys, ``rescan`` and ``state`` (each numerator (e), denominator, output
        (e)), ``difference`` of their outputs, ``softmax`` (e), ``undefined``: what each policy gives where
        there is no result, ``beyond``: whether a result has sums beyond the range of float64.

    Raises:
        InputError: parameters that cannot be read, are too many, or do not fit together.
    """
    settings = settle(CONTROLS, given)
    query, key, value = tables(given, PRESETS[settings["preset"]])
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        phi = feature_map(settings, query.shape[-1])
    unit = torch.eye(key.shape[2], dtype=key.dtype)[None, None]
    found: dict[str, Any] = {
        "notes": [str(note.message) for note in notes],
        "query_features": (queries := phi.query(query)[0, 0]),
        "key_features": (keys := phi.key(key)[0, 0]),
        "scores": (scores := attention_matrix(query, key, phi, normalize="none")[0, 0]),
        "terms": scores[..., None] * value[0, 0],
    }
    state = None
    prefixes = []
    for count in range(key.shape[2] + 1):
        seen = key[:, :, :count], value[:, :, :count]
        last = slice(max(count - 1, 0), count)
        _, state = linear_attention(
            query[:, :, :0], key[:, :, last], value[:, :, last], phi, state=state, return_state=True
        )
        seen_so_far = _prefix(query, *seen, queries, phi, state, unit[:, :, :count, :count])
        added = {"added_S": keys[last].mT @ value[0, 0, last], "added_z": keys[last].sum(0)}
        prefixes.append(seen_so_far | added)
    return found | {"prefixes": prefixes}


def feature_map(settings: Mapping[str, str], dim: int) -> FeatureMap:
    """The map that settled controls name, in float64."""
    name = settings["map"]
    if name == "dpfp":
        if int(settings["nu"]) >= 2 * dim:
            raise InputError(f"nu: keys of size {dim} allow shifts up to {2 * dim - 1}, got {settings['nu']}")
        return make(f"dpfp-{settings['nu']}", dim)
    if name in _RANDOM:
        return make(name, dim, num_features=int(settings["m"]), seed=int(settings["seed"])).double()
    return make(name, dim)


def _prefix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: Tensor,
    phi: FeatureMap,
    state: AttentionState,
    unit: Tensor,
) -> dict[str, Any]:
    S, z = true_scale(state)
    naive = functools.partial(linear_attention, query, key, feature_map=phi, backend="reference")
    output = naive(value)[0, 0]
    numerator = naive(value, normalize="none")[0, 0]
    denominator = naive(torch.ones_like(value[..., :1]), normalize="none")[0, 0, :, 0]
    rescan = zip(numerator, denominator, output, strict=True)
    read_out = read(query, phi, state)[0, 0]
    # The factor that a calibrated map leaves out does not arise here: these maps are not calibrated.
    running = zip(features @ S, features @ z, read_out, strict=True)
    names = ("numerator", "denominator", "output")
    weights = attention_matrix(query, key, phi)[0, 0]
    shares = scaled_dot_product_attention(query, key, unit)[0, 0] if key.shape[2] else weights
    softmax = scaled_dot_product_attention(query, key, value)[0, 0] if key.shape[2] else output
    undefined = [
        _policies(query[:, :, i : i + 1], key, value, phi) if bool(row.isnan().all()) else None
        for i, row in enumerate(output)
    ]
    return {
        "S": S, "z": z, "weights": weights, "softmax_weights": shares, "softmax": softmax,
        "rescan": [dict(zip(names, parts, strict=True)) for parts in rescan],
        "state": [dict(zip(names, parts, strict=True)) for parts in running],
        "difference": (output - read_out).abs().amax(-1), "undefined": undefined,
        # A result that exists although its sums, at true scale, are too large or too small for a number.
        "beyond": (denominator.isinf() | (denominator == 0)) & ~output.isnan().any(-1),
    }  # fmt: skip


def true_scale(state: AttentionState) -> tuple[Tensor, Tensor]:
    """S ``(r, e)`` and z ``(r,)`` of a state of one head, the logarithms beside them multiplied in."""
    assert state.z is not None
    scale = 1.0 if state.log_scale is None else state.log_scale[0, 0].exp()
    z: Tensor = state.z[0, 0] * scale
    return state.S[0, 0] * (scale if isinstance(scale, float) else scale[:, None]), z


def _policies(query: Tensor, key: Tensor, value: Tensor, phi: FeatureMap) -> dict[str, str] | None:
    """What each policy gives for a row without a result; ``None``: the row is NaN for another reason."""
    try:
        linear_attention(query, key, value, phi, undefined="raise")
    except ValueError as error:
        zero = linear_attention(query, key, value, phi, undefined="zero")[0, 0, 0]
        return {"nan": "NaN", "zero": f"{zero[0].item():g}", "raise": f"ValueError: {error}"}
    return None
