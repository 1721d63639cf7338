"""The weights that an operator implies: what one would look at, not what one would compute with."""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from ._checks import check_mask, check_tensor, check_visibility, key_heads
from ._output import finish
from ._prepare import Keys, prepare_queries, settings
from ._problem import pose
from .feature_maps import FeatureMap
from .kernels.additive.reference import weights
from .kernels.delta import problem as delta
from .rules import Rule


def attention_matrix(
    query: Tensor,
    key: Tensor,
    feature_map: FeatureMap | str = "elu+1",
    *,
    rule: Rule | None = None,
    causal: bool = False,
    window: int | None = None,
    key_mask: Tensor | None = None,
    normalize: str | None = None,
    eps: float = 0.0,
    undefined: str = "nan",
    rows: slice | None = None,
) -> Tensor:
    """The matrix W with ``linear_attention(query, key, value, ...) = W @ value``. Quadratic.

    Signed maps give negative weights here, as they are.

    Args:
        query: ``(B, H, N, d)``. key: ``(B, G, M, d)``.
        rows: a slice of query positions, for a part of a long sequence; default all.
        feature_map, rule, causal, window, key_mask, normalize, eps, undefined: as in
            :func:`reassoc.linear_attention`.

    Returns:
        ``(B, H, n, M)`` in the query's dtype, computed in float64. Undefined rows as ``undefined`` says.
    """
    check_tensor("query", query, ("B", "H", "N", "d"))
    batch, heads, length, dim = query.shape
    check_tensor("key", key, (batch, "G", "M", dim), query)
    groups, keys = key.shape[1:3]
    s = settings(
        feature_map, dim, rule=rule, normalize=normalize, window=window, eps=eps, undefined=undefined,
        backend="reference",
    )  # fmt: skip
    key_heads(heads, groups, s.map)
    check_mask("key_mask", key_mask, (batch, keys), key.device)
    check_visibility(s.rule, causal, window, length, keys)
    rows = slice(None) if rows is None else rows
    if not isinstance(rows, slice):
        raise TypeError(f"rows must be a slice of query positions, got {type(rows).__name__}")
    with torch.autocast(query.device.type, enabled=False):
        ready = Keys(key, key[..., :0], key_mask, s, torch.float64)
        queries = prepare_queries(query, s, groups, torch.float64, ready.features.log is not None)
        if ready.beta is not None:
            # What is read when every key's value is a unit vector of its own.
            eye = torch.eye(keys, dtype=torch.float64, device=key.device).expand(batch, groups, -1, -1)
            ready.value = torch.cat([eye, ready.value], dim=-1)
        problem = pose(queries.features, ready, s, causal=causal, window=window)
        scale: Tensor | None = None
        if isinstance(problem, delta.Problem):
            found = kernels.solve(problem, "reference").read[:, :, rows]
        else:
            found, _, scale = weights(problem, rows)
            if s.has_z:
                found = torch.cat([found, found.sum(-1, keepdim=True)], dim=-1)
        part = queries._replace(
            log_row=None if queries.log_row is None else queries.log_row[:, :, rows],
            empty=None if queries.empty is None else queries.empty[:, :, rows],
        )
        found = finish(found, scale, s, part)
    return found.to(query.dtype)
