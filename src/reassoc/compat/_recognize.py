"""Which library wrote a checkpoint, and what names and shapes tell of its model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._errors import InputError

PERFORMER, FAST, GEOMETRIC = "performer-pytorch", "pytorch-fast-transformers", "torch_geometric"
_ROOT = r"^(?P<root>(?:[^.]+\.)*?)"
_PERFORMER = re.compile(
    _ROOT + r"(?P<stack>net\.(?:layers\.(?P<i>\d+)\.0|blocks\.(?P<j>\d+)\.f\.net)\.)(?P<inner>(?:fn\.)+)"
    r"fast_attention\.projection_matrix$"
)
_FAST = re.compile(
    _ROOT + r"layers\.(?P<i>\d+)\.(?P<kind>attention|self_attention)\.query_projection\.weight$"
)
_GEOMETRIC = re.compile(_ROOT + r"fast_attn\.projection_matrix$")
# Drawing projections takes the cube of a head's size; no real head comes near.
LARGEST_HEAD = 2048


@dataclass(frozen=True)
class Model:
    """One model in a checkpoint.

    Attributes:
        library: which. version: in words.
        root: what the names of its weights begin with.
        sizes: what the shapes tell, by the names of the library's own options.
        weights: its tensors, without the root.
        matrices: projections as ``(m, d)``, by layer.
        around: all other tensors of the checkpoint, by full name.
        before_updater: whether it is of a performer-pytorch before 1.0.9, which had no projection updater.
    """

    library: str
    version: str
    root: str
    sizes: dict[str, Any]
    weights: dict[str, Tensor]
    matrices: dict[str, Tensor]
    around: dict[str, Tensor] = field(default_factory=dict)
    before_updater: bool = False


def recognize(state: Mapping[str, Tensor]) -> list[Model]:
    """The models of a checkpoint, in the order of their names.

    Raises:
        InputError: none known, or shapes that do not fit together.
    """
    found: dict[tuple[str, str], list[re.Match[str]]] = {}
    for name in state:
        for library, pattern in ((PERFORMER, _PERFORMER), (FAST, _FAST), (GEOMETRIC, _GEOMETRIC)):
            match = pattern.match(name)
            if match:
                root = "" if library == GEOMETRIC else match["root"]
                found.setdefault((library, root), []).append(match)
                break
    if not found:
        shown = ", ".join(list(state)[:3])
        raise InputError(
            f"no attention of {PERFORMER}, {FAST} or {GEOMETRIC} in it: expected names that end in "
            f"fast_attention.projection_matrix, attention.query_projection.weight or "
            f"fast_attn.projection_matrix; it has {len(state)} tensors ({shown}, ...)"
        )
    of_library = {PERFORMER: _performer, FAST: _fast, GEOMETRIC: _geometric}
    try:
        return [of_library[library](state, root, matches) for (library, root), matches in found.items()]
    except KeyError as error:
        raise InputError(f"tensor {error.args[0]} is missing, though its neighbors are there") from error


def _performer(state: Mapping[str, Tensor], root: str, matches: list[re.Match[str]]) -> Model:
    matches = sorted(matches, key=lambda m: int(m["i"] or m["j"]))
    first = matches[0]
    attention = first[0].removesuffix("fast_attention.projection_matrix")
    m, d = _matrix(state, first[0]).shape
    inner, dim = _matrix(state, attention + "to_q.weight").shape
    feed = f"net.layers.{first['i']}.1." if first["i"] else f"net.blocks.{first['j']}.g.net."
    feed = f"{root}{feed}{first['inner']}fn."
    wide, narrow = _matrix(state, feed + "w1.weight").shape[0], _matrix(state, feed + "w2.weight").shape[1]
    gate = state.get(root + first["stack"] + "g")
    sizes = {
        "dim": dim,
        "depth": len(matches),
        "heads": _heads(inner, d, attention + "to_q.weight"),
        "dim_head": d,
        "nb_features": m,
        "ff_mult": narrow // dim,
        "ff_glu": wide == 2 * narrow,
        "reversible": first["j"] is not None,
        "use_rezero": gate is not None and gate.ndim == 0,
        "use_scalenorm": gate is not None and gate.ndim == 1,
        "shift_tokens": first["inner"].count("fn.") == 2,
        "qkv_bias": attention + "to_q.bias" in state,
        "attn_out_bias": attention + "to_out.bias" in state,
    }
    own = tuple(root + part for part in ("net.", "proj_updater.", "calls_since_last_redraw"))
    weights = {name.removeprefix(root): t for name, t in state.items() if name.startswith(own)}
    matrices = {f"layer {i}": _matrix(state, match[0]) for i, match in enumerate(matches)}
    before = not any(name.startswith("proj_updater.") for name in weights)
    version = "before 1.0.9" if before else "1.0.9 to 1.1.4"
    return Model(PERFORMER, version, root, sizes, weights, matrices, _around(state, own), before)


def _fast(state: Mapping[str, Tensor], root: str, matches: list[re.Match[str]]) -> Model:
    matches = sorted(matches, key=lambda m: int(m["i"]))
    layer = f"{root}layers.{matches[0]['i']}."
    attention = f"{layer}{matches[0]['kind']}."
    q, v = (_matrix(state, f"{attention}{part}_projection.weight") for part in ("query", "value"))
    omegas = {
        f"layer {i}": _matrix(state, name)
        for i, match in enumerate(matches)
        if (name := f"{root}layers.{match['i']}.{match['kind']}.inner_attention.feature_map.omega") in state
    }
    sizes: dict[str, Any] = {
        "n_layers": len(matches),
        "d_model": q.shape[1],
        "feed_forward_dimensions": _matrix(state, layer + "linear1.weight").shape[0],
        "final_normalization": root + "norm.weight" in state,
        "decoder": matches[0]["kind"] == "self_attention",
        "rotary": f"{attention}rotaryemb.inv_freq" in state,  # MoLFormer's
    }
    if omegas:
        d, m = next(iter(omegas.values())).shape
        heads = _heads(q.shape[0], d, f"{attention}query_projection.weight")
        sizes |= {
            "n_heads": heads,
            "query_dimensions": d,
            "value_dimensions": v.shape[0] // heads,
            "omega": m,
        }
    else:
        sizes |= {"queries": q.shape[0], "values": v.shape[0]}
    own = (root + "layers.", root + "norm.")
    weights = {name.removeprefix(root): t for name, t in state.items() if name.startswith(own)}
    matrices = {name: omega.mT for name, omega in omegas.items()}
    return Model(FAST, "0.4.0, or near it", root, sizes, weights, matrices, _around(state, own))


def _geometric(state: Mapping[str, Tensor], root: str, matches: list[re.Match[str]]) -> Model:
    layers = [match["root"] for match in matches]
    q = _matrix(state, layers[0] + "q.weight")
    matrices = {
        layer.removesuffix(".") or "attention": _matrix(state, f"{layer}fast_attn.projection_matrix")
        for layer in layers
    }
    (m, d), (inner, channels) = next(iter(matrices.values())).shape, q.shape
    sizes = {
        "layers": layers,
        "channels": channels,
        "heads": _heads(inner, d, layers[0] + "q.weight"),
        "head_channels": d,
        "features": m,
        "qkv_bias": layers[0] + "q.bias" in state,
        "attn_out_bias": layers[0] + "attn_out.bias" in state,
    }
    own = tuple(layer + part for layer in layers for part in ("fast_attn.", "q.", "k.", "v.", "attn_out."))
    weights = {name: t for name, t in state.items() if name.startswith(own)}
    return Model(GEOMETRIC, "2.x", root, sizes, weights, matrices, _around(state, own))


def _around(state: Mapping[str, Tensor], own: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if not name.startswith(own)}


def _matrix(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of two axes: ``KeyError`` where it is missing, :class:`InputError` where it is another."""
    tensor = state[name]
    if tensor.ndim != 2 or not tensor.numel() or not tensor.is_floating_point():
        raise InputError(
            f"tensor {name} must be floating point with 2 axes, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor


def _heads(inner: int, d: int, name: str) -> int:
    if not 0 < d <= LARGEST_HEAD or inner % d:
        raise InputError(
            f"tensor {name}: its {inner} rows are no number of heads of the projections' size {d} "
            f"(at most {LARGEST_HEAD})"
        )
    return inner // d
