"""The front door: check, features, normalize, rule, read."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from . import _fused as fused
from . import kernels
from ._checks import check_mask, check_tensor, check_visibility, key_heads
from ._layout import check_boundaries, interleave
from ._output import finish
from ._prepare import Keys, Settings, prepare_queries, settings
from ._problem import pose
from ._state import AttentionState, check_state, empty_tail, state_dtype
from ._summary import Tail
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
        # With a window everything that is carried is in the tail.
        before = (
            (None, None) if state is None or window is not None else state._parts(s.accumulate(query.dtype))
        )
        tail: Tail | None = None
        carried = window is not None and (state is not None or return_state)
        if s.backend == "native" and not carried:
            output, *after = fused.attend(
                query, key, value, s, key_mask=key_mask, boundaries=cu_seqlens, before=before, causal=causal
            )
        else:
            output, *after, tail = _through_features(
                query,
                key,
                value,
                s,
                key_mask,
                cu_seqlens,
                before,
                causal,
                state,
                sequences if carried else None,
            )
        if not return_state:
            return output
        memory, scale = after
        kept = state_dtype(query.dtype)
        if memory is None:
            shape = (sequences, groups, s.map.feature_dim, columns)
            memory = query.new_zeros(shape, dtype=kept)
            exponential = tail is not None and tail.log is not None
            scale = memory.new_full(shape[:-1], -torch.inf) if exponential else None
        seen = _count(key_mask, cu_seqlens, sequences, keys, query.device)
        if state is not None:
            seen = seen + state.length
        if tail is not None:
            tail = tail.map(lambda t: t.to(kept) if t.is_floating_point() else t)
        scale = None if scale is None else scale.to(kept)
        return output, AttentionState(memory.to(kept), scale, seen, s.origin, tail)


def _through_features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    s: Settings,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    before: tuple[Tensor | None, Tensor | None],
    causal: bool,
    state: AttentionState | None,
    carrying: int | None,  # number of sequences whose window is carried on
) -> tuple[Tensor, Tensor | None, Tensor | None, Tail | None]:
    """Output, memory and scale after, and the tail: features, a problem of the rule's family, a quotient."""
    dtype = s.accumulate(query.dtype)
    ready = Keys(key, value, key_mask, s, dtype)
    queries = prepare_queries(query, s, key.shape[1], dtype, ready.features.log is not None)
    cu_keys, tail = cu_seqlens, None
    if carrying is not None and s.window is not None:
        cu_keys, tail = _prepend_tail(ready, state, s.window - 1, cu_seqlens, carrying)
    problem = pose(
        queries.features, ready, s, cu_queries=cu_seqlens, cu_keys=cu_keys, memory=before[0], scale=before[1],
        causal=causal, window=s.window,
    )  # fmt: skip
    answer = kernels.solve(problem, s.backend)
    output = finish(answer.read, answer.log_row, s, queries).to(query.dtype)
    return output, answer.memory, answer.scale, tail


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


def _prepend_tail(
    ready: Keys, state: AttentionState | None, length: int, cu_seqlens: Tensor | None, sequences: int
) -> tuple[Tensor | None, Tail]:
    """Put the positions that the window still needs in front of the keys; return the new tail."""
    tokens = ready.tail()
    old = None if state is None else state.tail
    old = empty_tail(tokens, sequences, length) if old is None else old
    mine = [tokens.log_decay, old.log_decay]
    if mine[0] is not None and mine[1] is not None and mine[0].shape[-1] != mine[1].shape[-1]:
        # Gates per token now and per feature before, or the other way round.
        width = max(gate.shape[-1] for gate in mine if gate is not None)
        mine = [None if gate is None else gate.expand(*gate.shape[:-1], width) for gate in mine]
    before, now = vars(old) | {"log_decay": mine[1]}, vars(tokens) | {"log_decay": mine[0]}
    joined: dict[str, Tensor | None] = {}
    kept: dict[str, Tensor | None] = {}
    places = None if cu_seqlens is None else interleave(cu_seqlens, ready.value.shape[2], length)
    for name, new in now.items():
        past = before[name]
        if new is None or past is None:
            joined[name] = kept[name] = None
            continue
        axis = 1 if name == "mask" else 2
        past = past.to(new.dtype)
        if places is None:
            whole = torch.cat([past, new], dim=axis)
            # A copy: a view would keep the whole piece alive in the state.
            kept[name] = whole.narrow(axis, whole.shape[axis] - length, length).clone()
        else:
            flat = past.transpose(0, axis - 1).flatten(axis - 1, axis)[None]
            whole = torch.cat([flat, new], dim=axis).index_select(axis, places.gather)
            picked = whole[0].index_select(axis - 1, places.last.flatten())
            kept[name] = picked.unflatten(axis - 1, (sequences, length)).movedim(axis - 1, 0)
        joined[name] = whole
    ready.replace(Tail(**joined))  # type: ignore[arg-type]
    return None if places is None else places.cu_keys, Tail(**kept)  # type: ignore[arg-type]


def _count(
    mask: Tensor | None, cu_seqlens: Tensor | None, sequences: int, keys: int, device: torch.device
) -> Tensor:
    """Real keys of every sequence, int64 ``(sequences,)``."""
    if cu_seqlens is None:
        if mask is None:
            return torch.full((sequences,), keys, dtype=torch.int64, device=device)
        return mask.sum(-1)
    if mask is None:
        return cu_seqlens.diff().long()
    total = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask[0].cumsum(0)])
    return total[cu_seqlens.long()].diff()
