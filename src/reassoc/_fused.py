"""Calls of the native backend: which maps it computes itself, and features for it where it does not."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._features import Features
from ._gates import check_beta, expand_decay
from ._output import finish
from ._prepare import Queries, Settings, key_features, prepare_queries
from ._state import require_scale
from .feature_maps import ELU1, Exp, ExponentialMap, FeatureMap, Identity, ReLU, SquaredReLU
from .kernels.answer import Answer
from .kernels.native.call import Inputs, Options
from .kernels.native.operator import run

# By exact type: a derived class may compute something else.
_ELEMENTWISE: dict[type[FeatureMap], str] = {
    Identity: "identity",
    ELU1: "elu+1",
    ReLU: "relu",
    SquaredReLU: "relu^2",
}


def fused_map(s: Settings) -> str | None:
    """The map that the library computes itself for these settings, ``None``: it takes features."""
    if "sum" not in s.normalize:
        return "exp" if type(s.map) is Exp and s.rule.family == "additive" else _ELEMENTWISE.get(type(s.map))
    # Divided by their sum inside: then an empty query is a row with a zero denominator, and only that. The
    # sum of signed features may cancel, which is a matter of its own, and exponential ones need logarithms.
    simple = s.undefined != "raise" and s.eps == 0.0 and type(s.map) is not Identity
    return _ELEMENTWISE.get(type(s.map)) if simple else None


def _factors(
    query: Tensor, key: Tensor, key_mask: Tensor | None, s: Settings, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """For logarithms that are one product away: left factors of queries and keys, and the right ones."""
    phi = s.map
    if not isinstance(phi, ExponentialMap) or s.rule.family != "additive" or "sum" in s.normalize:
        return None
    if not (_own(phi, "query") and _own(phi, "key")):
        return None
    if key_mask is not None:
        key = key.masked_fill(~key_mask[:, None, :, None], 0.0)
    heads = key.shape[1]
    x = query.to(dtype)
    grouped = phi.heads is not None and x.shape[1] != heads
    if grouped:  # heads of the map are those of the keys
        x = x.unflatten(1, (heads, -1)).flatten(2, 3)
    if s.needs_query_factor and phi.log_query_factor(x) is not None:
        return None
    of_query, of_key = phi.log_query_factors(x), phi.log_key_factors(key.to(dtype))
    if of_query is None or of_key is None:
        return None
    (left, query_matrix), (right, key_matrix) = of_query, of_key
    if query_matrix.requires_grad or key_matrix.requires_grad:
        return None
    if grouped:
        left = left.unflatten(2, (query.shape[1] // heads, -1)).flatten(1, 2)
    return (left, right), (query_matrix, key_matrix)


def _own(phi: ExponentialMap, role: str) -> bool:
    """Whether the factors speak for the map: no class further down defines its features otherwise."""

    def depth(method: str) -> int:
        return next(i for i, base in enumerate(type(phi).__mro__) if method in vars(base))

    others = (f"log_{role}", f"{role}_features", role)
    return not vars(phi).keys() & set(others) and all(
        depth(f"log_{role}_factors") <= depth(other) for other in others
    )


class Posed(NamedTuple):
    """A call as the library takes it.

    Attributes:
        name: the map that the library computes itself, ``None``: it takes features.
        queries: as prepared; ``exponential``: whether keys have logarithms.
    """

    inputs: Inputs
    name: str | None
    queries: Queries
    exponential: bool


def _posed(
    query: Tensor,  # (B, H, N, d)
    key: Tensor,  # (B, G, M, d)
    value: Tensor,  # (B, G, M, e)
    s: Settings,
    key_mask: Tensor | None,
    boundaries: Tensor | None,
    before: tuple[Tensor | None, Tensor | None],
) -> Posed:
    name = fused_map(s)
    dtype = s.accumulate(query.dtype)
    matrices: tuple[Tensor | None, Tensor | None] = (None, None)
    factors = _factors(query, key, key_mask, s, dtype) if name is None else None
    if factors is not None:
        (left, right), matrices = factors
        queries, keys = Queries(Features(None, left), None, None), Features(None, right)
    elif name == "exp":
        queries, keys = Queries(Features(None, query), None, None), Features(None, key)
    elif name is not None:
        queries, keys = Queries(Features(query, None), None, None), Features(key, None)
    else:
        keys = key_features(key, key_mask, s, dtype)
        queries = prepare_queries(query, s, key.shape[1], dtype, keys.log is not None)
    inputs = Inputs(
        *queries.features,
        *keys,
        value,
        expand_decay(s.rule, key, s.map.feature_dim, dtype),
        check_beta(s.rule, key, dtype),
        key_mask,
        None if boundaries is None else boundaries.long(),
        *before,
        *matrices,
    )
    logs = keys.log is not None
    if before[0] is not None and s.rule.family == "additive":
        require_scale(logs, before[1])
    return Posed(inputs, name, queries, logs)


def _options(posed: Posed, s: Settings, *, causal: bool, divide: bool, dtype: torch.dtype) -> Options:
    inputs, name = posed.inputs, posed.name
    tokens = [t.shape[2] for t in (posed.queries.features.tensor, inputs.value)]
    return Options(
        causal,
        "identity" if name is None or name == "exp" else name,
        name is not None and "sum" in s.normalize,
        s.has_z,
        divide,
        s.eps if divide else 0.0,
        math.nan if s.undefined == "nan" else 0.0,
        str(dtype).removeprefix("torch."),
        0 if s.window is None or s.window >= tokens[0] == tokens[1] else s.window,
    )


def attend(
    query: Tensor,  # (B, H, N, d)
    key: Tensor,  # (B, G, M, d)
    value: Tensor,  # (B, G, M, e)
    s: Settings,
    *,
    key_mask: Tensor | None = None,
    boundaries: Tensor | None = None,
    before: tuple[Tensor | None, Tensor | None] = (None, None),  # memory and its scale
    causal: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output ``(B, H, N, e)`` in the query's dtype, and the state after: memory and its scale.

    With a window there is no state: what it would be is in the tail, which the caller keeps.
    """
    posed = _posed(query, key, value, s, key_mask, boundaries, before)
    queries, logs = posed.queries, posed.exponential
    # A logarithm of the whole row cancels in a quotient, unless an epsilon stands beside it.
    divide = s.has_z and s.undefined != "raise" and queries.empty is None
    divide = divide and (s.eps == 0.0 or not (logs or queries.log_row is not None))
    plain = divide or not (s.has_z or logs or queries.log_row is not None or queries.empty is not None)
    dtype = query.dtype if plain else s.accumulate(query.dtype)
    results = run(posed.inputs, _options(posed, s, causal=causal, divide=divide, dtype=dtype))
    output = results.out
    if not plain:
        output = finish(output, results.log_row, s, queries).to(query.dtype)
    return output, results.memory, results.scale


def reads(
    query: Tensor,  # (B, H, N, d)
    key: Tensor,  # (B, G, M, d)
    value: Tensor,  # (B, G, M, e)
    s: Settings,
    *,
    key_mask: Tensor | None,
    before: tuple[Tensor | None, Tensor | None],
    causal: bool,
) -> Answer:
    """Reads before any division, and the state after."""
    posed = _posed(query, key, value, s, key_mask, None, before)
    options = _options(posed, s, causal=causal, divide=False, dtype=s.accumulate(query.dtype))
    results = run(posed.inputs, options)
    log_row = posed.queries.log_row if results.log_row is None else results.log_row
    return Answer(results.out, log_row, results.memory, results.scale)
