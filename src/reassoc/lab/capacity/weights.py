"""What a retrieval takes of each stored value: ``read = sum_j w_j v_j``, one query after all writes.

By linearity in the values the weights say everything, and for one query they cost less than the memory:
r numbers a token instead of r times e. The operator itself gives them, when keys and query change places.

Sum rule: ``phi(k_j) . phi(q)`` is what "query" k_j reads from a memory that holds q alone, with value 1.

Delta rule: with ``M_t = I - beta_t phi_t phi_t^T`` the read is
``phi(q)^T sum_j M_T ... M_{j+1} beta_j phi_j v_j^T``, so with ``u_T = phi(q)`` and ``u_{t-1} = M_t u_t`` the
weights are ``w_t = beta_t phi_t . u_t``. Applying M_t is a delta write of the value 0 to a memory of one
column: u is a memory that first holds q with value 1 and then forgets the keys, the last one first; w_t is
read just before key t is forgotten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import linear_attention
from ...feature_maps import FeatureMap
from ...rules import Delta


def sum_weights(query: Tensor, key: Tensor, phi: FeatureMap, normalize: str, eps: float) -> Tensor:
    """Weights of the sum rule.

    Args:
        query: ``(B, d)``. key: ``(B, T, d)``. phi: a symmetric map.
        normalize: ``"attention"``, ``"sum"`` or ``"none"``. eps: added to the query's denominator.

    Returns:
        ``(B, T)``: ``linear_attention(query, key, value, phi)`` is their product with the values.
    """
    one = query.new_ones(len(query), 1, 1, 1)
    found = linear_attention(
        key[:, None], query[:, None, None], one, phi, undefined="zero",
        normalize="sum" if normalize == "sum" else "none",
    )[:, 0, :, 0]  # fmt: skip
    if normalize == "attention":
        return found / (found.sum(-1, keepdim=True) + eps)
    return found * shrink(query, phi, eps) if normalize == "sum" else found


def delta_weights(
    query: Tensor, key: Tensor, beta: Tensor, phi: FeatureMap, normalize: str, eps: float
) -> Tensor:
    """Weights of the delta rule.

    Args:
        query: ``(B, d)``. key: ``(B, T, d)``. beta: ``(B, T)``. phi, eps: as for :func:`sum_weights`.
        normalize: as for :func:`sum_weights`; under ``"attention"`` z adds up, unweighted by beta.

    Returns:
        ``(B, T)``: the last row of the causal ``linear_attention`` is their product with the values.
    """
    latest = key.flip(1)[:, None]
    first = query[:, None, None]
    value = torch.zeros_like(latest[..., :1])
    strength = torch.cat([torch.ones_like(beta[:, :1]), beta.flip(1)], dim=1)
    found = linear_attention(
        torch.cat([latest, first], dim=2),  # the last read is not asked for
        torch.cat([first, latest], dim=2),
        torch.cat([torch.ones_like(value[:, :, :1]), value], dim=2),
        phi, rule=Delta(strength[:, None]), causal=True, undefined="zero",
        normalize="sum" if normalize == "sum" else "none",
    )[:, 0, :-1, 0]  # fmt: skip
    found = found.flip(1) * beta
    if normalize == "attention":
        return found / (sum_weights(query, key, phi, "none", 0.0).sum(-1, keepdim=True) + eps)
    return found * shrink(query, phi, eps) if normalize == "sum" else found


def shrink(query: Tensor, phi: FeatureMap, eps: float) -> Tensor:
    """``total / (total + eps)``, ``(..., 1)``: turns division by a query's own sum into one with eps."""
    total = phi.query(query).sum(-1, keepdim=True)
    return total / (total + eps)
