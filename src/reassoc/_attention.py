"""The front door: check, features, normalize, rule, read."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from . import _fused as fused
from ._checks import check_mask, check_tensor, check_visibility, key_heads
from ._core import Tokens, solve, state_after, whole
from ._layout import check_boundaries
from ._output import finish
from ._prepare import settings
from ._state import AttentionState, check_state
from .feature_maps import FeatureMap
from .rules import Rule


@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap | str = ..., *,
    rule: Rule | None = ..., normalize: str | None = ..., causal: bool = ..., window: int | None = ...,
    key_mask: Tensor | None = ..., cu_seqlens: Tensor | None = ..., eps: float = ..., undefined: str = ...,
    state: AttentionState | None = ..., return_state: Literal[False] = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip


@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap | str = ..., *,
    rule: Rule | None = ..., normalize: str | None = ..., causal: bool = ..., window: int | None = ...,
    key_mask: Tensor | None = ..., cu_seqlens: Tensor | None = ..., eps: float = ..., undefined: str = ...,
    state: AttentionState | None = ..., return_state: Literal[True], backend: str = ...,
) -> tuple[Tensor, AttentionState]: ...  # fmt: skip


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap | str = "elu+1",
    *,
    rule: Rule | None = None,
    normalize: str | None = None,
    causal: bool = False,
    window: int | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    eps: float = 0.0,
    undefined: str = "nan",
    state: AttentionState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, AttentionState]:
    """Kernel attention ``o_i = phi(q_i)^T S / phi(q_i)^T z`` with ``S = sum_j phi(k_j) v_j^T``.

    Exact for the kernel named; linear in the number of tokens. Other rules change how S is written,
    see :mod:`reassoc.rules`.

    Args:
        query: ``(B, H, N, d)``, any floating dtype.
        key: ``(B, G, M, d)``, H a multiple of G: query head h reads key head ``h // (H // G)``.
        value: ``(B, G, M, e)``.
        feature_map: a :class:`reassoc.feature_maps.FeatureMap`, or the name of one without
            parameters or randomness.
        rule: :class:`reassoc.rules.Sum` (default), :class:`reassoc.rules.Decay`,
            :class:`reassoc.rules.Delta` or :class:`reassoc.rules.GatedDelta`. The delta rules need
            ``causal``, a named ``normalize`` and no ``window``.
        normalize: ``"attention"`` (default) divides by ``phi(q)^T z``; ``"sum"`` divides every feature
            vector by its own sum; ``"sum+attention"`` does both; ``"none"`` neither.
        causal: query i sees keys 0..i; needs N == M.
        window: with ``causal``, only the most recent ``window`` positions, the query's own included.
        key_mask: bool ``(B, M)``, True = real. A masked key does nothing, and may hold NaN.
        cu_seqlens: int ``(n + 1,)``: B is 1 and holds n sequences end to end (empty ones allowed),
            which do not see each other; needs N == M.
        eps: added to the denominator. Any value but 0 is a different operator.
        undefined: what a row with a zero denominator, or without a visible key, gives: ``"nan"``,
            ``"zero"`` or ``"raise"`` (a ``ValueError`` naming the first such row).
        state: continue after the keys that this state has seen (causal), or add to them.
        return_state: also return the state after the last key.
        backend: ``"auto"`` takes the fastest that can serve the call: ``"native"`` (C++, on a CPU) or
            ``"torch"`` (chunks of torch operations); ``"reference"`` is the specification, float64 and
            slow. One named explicitly is used or refused.

    Returns:
        ``(B, H, N, e)`` in the query's dtype, and with ``return_state`` an :class:`AttentionState`.

    Raises:
        ValueError, TypeError: naming the argument, what was expected, what came and what to do.

    Example:
        >>> import torch, reassoc
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> reassoc.linear_attention(q, k, v, "elu+1", causal=True).shape
        torch.Size([1, 2, 100, 16])

    Source: Katharopoulos et al. 2020; state and normalizer as in its section 3.2 and 3.3.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    check_tensor("query", query, ("B", "H", "N", "d"))
    batch, heads, length, dim = query.shape
    check_tensor("key", key, (batch, "G", "M", dim), query)
    groups, keys = key.shape[1], key.shape[2]
    check_tensor("value", value, (batch, groups, keys, "e"), query)
    s = settings(
        feature_map,
        dim,
        rule=rule,
        normalize=normalize,
        window=window,
        eps=eps,
        undefined=undefined,
        backend=backend,
        like=query,
    )
    key_heads(heads, groups, s.map)
    check_mask("key_mask", key_mask, (batch, keys), key.device)
    check_visibility(s.rule, causal, window, length, keys)
    sequences = batch
    if cu_seqlens is not None:
        sequences = _check_packing(cu_seqlens, batch, length, keys)
    columns = value.shape[-1] + s.has_z
    if state is not None:
        check_state(state, s.origin, (sequences, groups, s.map.feature_dim, columns), query.device)
        state._owned = False  # the result may hold the same tensors: a later step copies first

    with torch.autocast(query.device.type, enabled=False):
        tokens = Tokens(query, key, value, key_mask, cu_seqlens)
        if whole(s, state, return_state):
            before = (None, None) if state is None else state._parts(s.accumulate(query.dtype))
            output, *after = fused.attend(
                query, key, value, s, key_mask=key_mask, boundaries=cu_seqlens, before=before, causal=causal
            )
            tail = None
        else:
            queries, answer, tail = solve(tokens, s, causal, state, return_state)
            output = finish(answer.read, answer.log_row, s, queries).to(query.dtype)
            after = [answer.memory, answer.scale]
        if not return_state:
            return output
        return output, state_after(tokens, s, state, after[0], after[1], tail)


def _check_packing(cu_seqlens: Tensor, batch: int, length: int, keys: int) -> int:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {got}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (n + 1,), got {tuple(cu_seqlens.shape)}")
    if batch != 1 or length != keys:
        raise ValueError(
            f"cu_seqlens needs B == 1 and as many queries as keys, got B={batch}, N={length}, M={keys}"
        )
    if not torch.compiler.is_compiling():
        check_boundaries(cu_seqlens, length)
    return cu_seqlens.shape[0] - 1
