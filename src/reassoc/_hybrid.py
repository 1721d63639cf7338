"""Hybrid attention: exact softmax weights for near keys, a kernel for far ones, and one denominator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from ._checks import check_mask, check_tensor, key_heads
from ._core import Tokens, unnormalized
from ._hybrid_state import HybridOrigin, HybridState, check_hybrid_state
from ._normalize import divide
from ._prepare import Settings, settings
from ._recent import First, exact_reads
from ._state import AttentionState, check_state
from ._stream import advanced, prepared_token
from .feature_maps import FeatureMap
from .rules import Decay, Rule, Sum


@overload
def hybrid_attention(
    query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap | str | None, *, window: int,
    sinks: int = ..., span: int | None = ..., scale: float | None = ..., log_weight: Tensor | None = ...,
    rule: Rule | None = ..., key_mask: Tensor | None = ..., undefined: str = ...,
    state: HybridState | None = ..., return_state: Literal[False] = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip


@overload
def hybrid_attention(
    query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap | str | None, *, window: int,
    sinks: int = ..., span: int | None = ..., scale: float | None = ..., log_weight: Tensor | None = ...,
    rule: Rule | None = ..., key_mask: Tensor | None = ..., undefined: str = ...,
    state: HybridState | None = ..., return_state: Literal[True], backend: str = ...,
) -> tuple[Tensor, HybridState]: ...  # fmt: skip


def hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap | str | None,
    *,
    window: int,
    sinks: int = 0,
    span: int | None = None,
    scale: float | None = None,
    log_weight: Tensor | None = None,
    rule: Rule | None = None,
    key_mask: Tensor | None = None,
    undefined: str = "nan",
    state: HybridState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, HybridState]:
    """Causal attention, exact over the near keys and by a kernel over the others, under one denominator.

    With N the near keys of query i (the last ``window`` positions and the first ``sinks`` keys) and F
    the others,

        o_i = (sum_N exp(s q_i.k_j) v_j + w sum_F phi(q_i).phi(k_j) v_j)
              / (sum_N exp(s q_i.k_j) + w sum_F phi(q_i).phi(k_j))

    No N x N matrix is made: the cost is linear in the number of tokens, and the state does not grow.

    Args:
        query: ``(B, H, N, d)``, any floating dtype. key: ``(B, G, N, d)``. value: ``(B, G, N, e)``;
            query head h reads key head ``h // (H // G)``.
        feature_map: of the far keys; ``None`` leaves them out: window and sinks alone. A factor of the query
            that a map leaves out elsewhere, because it cancels, is put back here.
        window: number of most recent positions, the query's own included, that are exact.
        sinks: number of first real keys of a sequence that stay exact for ever.
        span: nothing further back than this many positions is seen, the sinks neither: for models with a
            sliding window of their own. Larger than ``window``, and then ``sinks`` is 0.
        scale: s; default ``d ** -0.5``. A map has its own scale.
        log_weight: ``(H,)``, the logarithm of w for every query head; ``None``: 0.
        rule: :class:`reassoc.rules.Sum` (default), or :class:`reassoc.rules.Decay` with one decay for
            each key head; it acts on the kernel's part, each time a key leaves the window.
        key_mask: bool ``(B, N)``, True = real. A masked key does nothing, and may hold NaN.
        undefined, backend: as in :func:`reassoc.linear_attention`; the backend is that of the kernel.
        state: continue after the keys that this state has seen. return_state: return the one after.

    Returns:
        ``(B, H, N, e)`` in the query's dtype, and with ``return_state`` a :class:`HybridState`.

    Raises:
        ValueError, TypeError: naming the argument, what was expected, what came and what to do.

    Example:
        >>> import torch, reassoc
        >>> q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
        >>> phi = reassoc.feature_maps.make("favor+", 16, num_features=64)
        >>> reassoc.hybrid_attention(q, k, v, phi, window=64, sinks=4).shape
        torch.Size([1, 2, 300, 16])

    Sources: Zhang et al. 2025 (LoLCATs) for one denominator; Xiao et al. 2024 for sinks.
    """
    s, origin = _checked(
        query, key, value, feature_map, window, sinks, span, scale, log_weight, rule, key_mask, undefined,
        state, backend,
    )  # fmt: skip
    with torch.autocast(query.device.type, enabled=False):
        tokens, first, after = _split(query, key, value, key_mask, origin, state)
        sums = _exact(tokens, first, origin, s.accumulate(query.dtype))
        far: AttentionState | None = None
        if feature_map is not None:
            memory = None if state is None else state.memory
            if memory is not None:
                memory._owned = False  # the result may hold the same tensors: a later step copies first
            read, row, far = unnormalized(tokens.leaving(query), s, memory, return_state)
            sums = _join(sums, (read, row), log_weight)
        output = divide(*sums, 0.0, undefined, None).to(query.dtype)
        return (output, replace(after, memory=far)) if return_state else output


def hybrid_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap | str | None,
    state: HybridState,
    *,
    log_weight: Tensor | None = None,
    rule: Rule | None = None,
    key_mask: Tensor | None = None,
    undefined: str = "nan",
    backend: str = "auto",
) -> Tensor:
    """One decode step of :func:`hybrid_attention`: the cost and the state do not grow.

    ``state`` is advanced; clones and detached copies made before keep their numbers. Window, sinks, span
    and scale are those of the state.

    Args:
        query: ``(B, H, 1, d)``. key: ``(B, G, 1, d)``. value: ``(B, G, 1, e)``.
        state: from a call with ``return_state=True``.
        key_mask: bool ``(B, 1)``: sequences whose key is real.
        feature_map, log_weight, rule, undefined, backend: as in :func:`hybrid_attention`.

    Returns:
        ``(B, H, 1, e)`` in the query's dtype: what the call over the whole would give at this position.

    Raises:
        ValueError, TypeError: as :func:`hybrid_attention`; then the state is unchanged.
    """
    if not isinstance(state, HybridState):
        raise TypeError(
            f"state must be a HybridState, got {type(state).__name__}; start with return_state=True"
        )
    check_tensor("query", query, ("B", "H", 1, "d"))
    o = state.origin
    s, origin = _checked(
        query, key, value, feature_map, o.window, o.sinks, o.span, o.scale, log_weight, rule, key_mask,
        undefined, state, backend,
    )  # fmt: skip
    with torch.autocast(query.device.type, enabled=False):
        tokens, first, after = _split(query, key, value, key_mask, origin, state)
        sums = _exact(tokens, first, origin, s.accumulate(query.dtype))
        memory, advance = state.memory, None
        # A backend that was named runs the step too; "auto" takes the one written for single tokens.
        if memory is not None and (s.window is not None or backend in ("reference", "native")):
            read, row, memory = unnormalized(tokens.leaving(query), s, memory, True)
            sums = _join(sums, (read, row), log_weight)
        elif memory is not None:
            leaving = tokens.leaving(query)
            queries, ready = prepared_token(query, leaving.key, leaving.value, leaving.mask, s)
            advance = advanced(queries, ready, leaving.mask, s, memory)
            sums = _join(sums, (advance.read, advance.row), log_weight)
        output = divide(*sums, 0.0, undefined, None).to(query.dtype)
    if advance is not None and memory is not None:
        advance.commit(memory)
    vars(state).update(vars(replace(after, memory=memory)))
    return output


class _Joined(NamedTuple):
    """The queries of a call, and keys ``(B, G, window + N, d)`` with the window before them in front."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor

    def leaving(self, query: Tensor) -> Tokens:
        """For every query the key that has just left its window: what the kernel writes before it reads."""
        length = query.shape[2]
        return Tokens(
            query, self.key[:, :, :length], self.value[:, :, :length], self.mask[:, :length].contiguous()
        )


def _split(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, o: HybridOrigin, state: HybridState | None
) -> tuple[_Joined, First, HybridState]:
    """Keys of the window, the first keys, and the state after, still without the kernel's memory."""
    batch, _, length, _ = key.shape
    if mask is None:
        mask = torch.ones(batch, length, dtype=torch.bool, device=key.device)
    else:
        hidden = ~mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    before = _start(key, value, o) if state is None else state
    rank = before.length[:, None] + mask.cumsum(1)
    kept, filled = mask, before.first_mask
    seen = torch.zeros_like(filled, dtype=torch.int64)
    first = First(before.first_key, before.first_value, seen)
    if o.sinks and length:
        kept = mask & (rank > o.sinks)
        slot = torch.arange(1, o.sinks + 1, device=key.device)[:, None]
        match = (rank[:, None] == slot) & mask[:, None]  # (B, s, N)
        found, position = match.any(-1), match.to(torch.int64).argmax(-1)
        new, place = found[:, None, :, None], position[:, None, :, None]
        first = First(
            torch.where(new, key.take_along_dim(place, 2), before.first_key),
            torch.where(new, value.take_along_dim(place, 2), before.first_value),
            torch.where(found, position, torch.where(filled, 0, length)),
        )
        filled = filled | found
    joined = _Joined(
        query,
        torch.cat([before.key, key], 2),
        torch.cat([before.value, value], 2),
        torch.cat([before.mask, kept], 1),
    )
    after = HybridState(
        memory=None,
        # Copies: views would keep the whole call alive in the state.
        key=joined.key[:, :, length:].clone(),
        value=joined.value[:, :, length:].clone(),
        mask=joined.mask[:, length:].clone(),
        first_key=first.key,
        first_value=first.value,
        first_mask=filled,
        length=before.length + mask.sum(1),
        origin=o,
    )
    return joined, first, after


def _start(key: Tensor, value: Tensor, o: HybridOrigin) -> HybridState:
    def blank(x: Tensor, count: int) -> Tensor:
        return x.new_zeros(*x.shape[:2], count, x.shape[3])

    def none(count: int) -> Tensor:
        return torch.zeros(key.shape[0], count, dtype=torch.bool, device=key.device)

    return HybridState(
        memory=None,
        key=blank(key, o.window),
        value=blank(value, o.window),
        mask=none(o.window),
        first_key=blank(key, o.sinks),
        first_value=blank(value, o.sinks),
        first_mask=none(o.sinks),
        length=torch.zeros(key.shape[0], dtype=torch.int64, device=key.device),
        origin=o,
    )


def _exact(joined: _Joined, first: First, o: HybridOrigin, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    query, key, value = (t.to(dtype) for t in joined[:3])
    first = First(first.key.to(dtype), first.value.to(dtype), first.since)
    return exact_reads(query * o.scale, key, value, joined.mask, first, o.window)


def _join(
    near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor | None], log_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Two sums, each with the logarithm of its scale, as one."""
    (sums, row), (read, far_row) = near, far
    weight = row.new_zeros(()) if log_weight is None else log_weight.to(row.dtype)[:, None]
    far_row = weight.expand_as(row) if far_row is None else far_row + weight
    # A read of nothing has no scale: weights near zero beside it would vanish. It still has a gradient.
    level = far_row.detach().masked_fill((read.detach() == 0).all(-1), -torch.inf)
    top = torch.maximum(row, level)
    top = top.masked_fill(top == -torch.inf, 0.0)
    most = math.log(torch.finfo(row.dtype).max) / 2
    far_size = (far_row - top).clamp(max=most).exp()
    return sums * (row - top).exp()[..., None] + read * far_size[..., None], top


def _checked(
    query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap | str | None, window: int, sinks: int,
    span: int | None, scale: float | None, log_weight: Tensor | None, rule: Rule | None,
    key_mask: Tensor | None, undefined: str, state: HybridState | None, backend: str,
) -> tuple[Settings, HybridOrigin]:  # fmt: skip
    check_tensor("query", query, ("B", "H", "N", "d"))
    batch, heads, length, dim = query.shape
    check_tensor("key", key, (batch, "G", length, dim), query)
    groups = key.shape[1]
    check_tensor("value", value, (batch, groups, length, "e"), query)
    check_mask("key_mask", key_mask, (batch, length), key.device)
    for name, count, least in (("window", window, 1), ("sinks", sinks, 0), ("span", span, 1)):
        if count is None and name == "span":
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"{name} must be a whole number, at least {least}, got {count!r}")
    if span is not None and (span <= window or sinks):
        raise ValueError(
            f"span must be larger than window={window} and goes with sinks=0, got span={span}, sinks={sinks}"
            ": nothing further back than span is seen, so with span <= window use that window and no map"
        )
    if rule is not None and not (
        isinstance(rule, Sum) or (isinstance(rule, Decay) and rule.log_decay.ndim == 1)
    ):
        gates = getattr(rule, "log_decay", None)
        got = type(rule).__name__ + (f" with log_decay {tuple(gates.shape)}" if gates is not None else "")
        raise ValueError(
            "hybrid_attention takes rule Sum, or Decay with one log_decay for each key head: under a shared "
            f"denominator every weight must stay one that softmax could give, got {got}"
        )
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if scale is not None and not -math.inf < scale < math.inf:  # math.isfinite would not trace
        raise ValueError(f"scale must be finite, got {scale!r}")
    if log_weight is not None:
        check_tensor("log_weight", log_weight, (heads,))
        if log_weight.device != query.device:
            raise TypeError(f"log_weight must be on {query.device}, got {log_weight.device}")
    far = None if span is None else span - window
    named = "identity" if feature_map is None else feature_map
    s = settings(named, dim, rule=rule, window=far, undefined=undefined, backend=backend, like=query)
    key_heads(heads, groups, s.map)
    scale = dim**-0.5 if scale is None else float(scale)
    origin = HybridOrigin(window, sinks, span, scale)
    if state is not None:
        check_hybrid_state(state, origin, key, value)
        if (state.memory is None) != (feature_map is None):
            raise ValueError(
                "state: one with a feature map serves calls with that map, and one without, without"
            )
        if state.memory is not None:
            shape = (batch, groups, s.map.feature_dim, value.shape[-1] + 1)
            check_state(state.memory, s.origin, shape, query.device)
    return replace(s, shared=True), origin
