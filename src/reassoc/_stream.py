"""One token at a time, and reads without writes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ._attention import linear_attention
from ._checks import check_mask, check_tensor, key_heads
from ._decode import decode
from ._fused import fused_map
from ._output import finish
from ._prepare import Keys, Queries, Settings, prepare_queries, settings
from ._state import AttentionState, check_state, require_scale
from .feature_maps import FeatureMap
from .kernels.additive import recurrent as additive
from .kernels.additive.chunked import read_state
from .kernels.delta import recurrent as delta
from .rules import Rule


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap | str,
    state: AttentionState,
    *,
    rule: Rule | None = None,
    normalize: str | None = None,
    window: int | None = None,
    key_mask: Tensor | None = None,
    eps: float = 0.0,
    undefined: str = "nan",
    backend: str = "auto",
) -> Tensor:
    """One decode step: write one key and value to ``state``, then read it.

    The cost does not grow with what was seen; with a window it is that of the window's keys.

    ``state`` is advanced: in place when no gradient is needed, else to new tensors. Clones and
    detached copies made before keep their numbers.

    Args:
        query: ``(B, H, 1, d)``. key: ``(B, G, 1, d)``. value: ``(B, G, 1, e)``.
        state: from :meth:`AttentionState.zeros` or an earlier call with ``return_state=True``.
        key_mask: bool ``(B, 1)``: sequences whose key is real; the others keep their state.
        feature_map, rule, normalize, window, eps, undefined, backend: as in
            :func:`reassoc.linear_attention`; a gate of the rule has M == 1.

    Returns:
        ``(B, H, 1, e)`` in the query's dtype: what the causal call would give at this position.

    Raises:
        ValueError, TypeError: as :func:`reassoc.linear_attention`; then the state is unchanged.
    """
    call = (feature_map, rule, normalize, eps, undefined, backend)
    again = getattr(state, "_again", None)
    if again is not None and window is None and key_mask is None:
        quick: Tensor | None = again.step(query, key, value, call, state)
        if quick is not None:
            return quick
    check_tensor("query", query, ("B", "H", 1, "d"))
    batch, heads, _, dim = query.shape
    check_tensor("key", key, (batch, "G", 1, dim), query)
    check_tensor("value", value, (batch, key.shape[1], 1, "e"), query)
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
    groups = key.shape[1]
    key_heads(heads, groups, s.map)
    check_mask("key_mask", key_mask, (batch, 1), key.device)
    shape = (batch, groups, s.map.feature_dim, value.shape[-1] + s.has_z)
    check_state(state, s.origin, shape, query.device)
    prepared: tuple[Queries, Keys] | None = None
    if s.backend == "native" and window is None:
        with torch.autocast("cpu", enabled=False):
            if fused_map(s) is None:
                prepared = prepared_token(query, key, value, key_mask, s)
            output = decode(query, key, value, s, state, key_mask, call, prepared)
        if output is not None:
            return output
    if window is not None or backend in ("reference", "native"):
        output, after = linear_attention(
            query, key, value, s.map, rule=rule, normalize=normalize, causal=True, window=window,
            key_mask=key_mask, eps=eps, undefined=undefined, state=state, return_state=True, backend=backend,
        )  # fmt: skip
        state._replace(after._memory, after._scale, after._length, after._tail, None, owned=True)
        return output
    with torch.autocast(query.device.type, enabled=False):
        queries, ready = prepared_token(query, key, value, key_mask, s) if prepared is None else prepared
        advance = advanced(queries, ready, key_mask, s, state)
        output = finish(advance.read, advance.row, s, queries)
        advance.commit(state)
    return output.to(query.dtype)


class Advance(NamedTuple):
    """A token taken, the state not yet told: a row that "raise" refuses leaves it as it was.

    Attributes:
        read: ``(B, H, 1, c)``. row: ``(B, H, 1)`` or ``None``, the logarithm of its scale.
        after: what :meth:`AttentionState._replace` takes.
    """

    read: Tensor
    row: Tensor | None
    after: tuple[Tensor, Tensor | None, Tensor, None, Tensor | None, bool]

    def commit(self, state: AttentionState) -> None:
        """Advance the state."""
        state._replace(*self.after)


def advanced(
    queries: Queries, ready: Keys, key_mask: Tensor | None, s: Settings, state: AttentionState
) -> Advance:
    """Write one key and value, then read, by torch operations; no window."""
    groups = ready.value.shape[1]
    features, written = queries.features, ready.features
    if key_mask is not None:
        written = written.hide(key_mask[:, None, :, None])
    if ready.beta is None:
        require_scale(written.log is not None, state._scale)
    parts = (*features, *ready.features, ready.value, ready.beta, ready.log_decay, state._memory)
    tracked = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parts)
    memory, scale = state._parts(ready.value.dtype)
    lost = None if tracked else state._lost
    # What inference mode made, only inference mode may overwrite.
    usable = torch.is_inference_mode_enabled() or not memory.is_inference()
    in_place = state._owned and lost is not None and s.undefined != "raise" and usable
    if lost is None and not tracked:
        lost = torch.zeros_like(memory)
    grouped = features.map(lambda t: t.unflatten(1, (groups, -1)))
    log_decay = None if ready.log_decay is None else ready.log_decay[:, :, 0]
    row: Tensor | None = None
    if ready.beta is not None:
        read, memory, lost = delta.token(
            grouped.tensor, written.tensor, ready.value, ready.beta, log_decay, memory, lost, s.has_z,
            in_place,
        )  # fmt: skip
    else:
        read, row, memory, scale, lost = additive.token(
            grouped, written, ready.value, log_decay, memory, scale, lost, in_place
        )
    length = state._length + (1 if key_mask is None else key_mask[:, 0].long())
    row = queries.log_row if row is None else row.flatten(1, 2)
    return Advance(read.flatten(1, 2), row, (memory, scale, length, None, lost, not tracked))


def prepared_token(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, s: Settings
) -> tuple[Queries, Keys]:
    """Features of one query and one key, and what belongs to the key."""
    dtype = s.accumulate(query.dtype)
    ready = Keys(key, value, key_mask, s, dtype)
    return prepare_queries(query, s, key.shape[1], dtype, ready.features.log is not None), ready


def read(
    query: Tensor,
    feature_map: FeatureMap | str,
    state: AttentionState,
    *,
    normalize: str | None = None,
    eps: float = 0.0,
    undefined: str = "nan",
) -> Tensor:
    """Read a state without writing: every query sees all of its keys (cross-attention decoding).

    Args:
        query: ``(B, H, N, d)``.
        state: of G key heads, made without a window.
        feature_map, normalize, eps, undefined: as in :func:`reassoc.linear_attention`; ``normalize``
            defaults to the state's own.

    Returns:
        ``(B, H, N, e)`` in the query's dtype.

    Raises:
        ValueError: a state with a window: which of its keys a query sees depends on the position.
    """
    check_tensor("query", query, ("B", "H", "N", "d"))
    batch, heads, _, dim = query.shape
    if not isinstance(state, AttentionState):
        raise TypeError(f"state must be an AttentionState, got {type(state).__name__}")
    if state.origin.window is not None:
        raise ValueError(
            f"read: the state has window={state.origin.window}; what a query sees then depends on its "
            "position, which only step and linear_attention know"
        )
    normalize = state.origin.normalize if normalize is None else normalize
    s = settings(feature_map, dim, normalize=normalize, eps=eps, undefined=undefined)
    groups, columns = state._memory.shape[1], state._memory.shape[-1]
    key_heads(heads, groups, s.map)
    origin = replace(s.origin, rule=state.origin.rule)  # how the state came about does not matter to a read
    check_state(state, origin, (batch, groups, s.map.feature_dim, columns), query.device)
    with torch.autocast(query.device.type, enabled=False):
        dtype = s.accumulate(query.dtype)
        queries = prepare_queries(query, s, groups, dtype, state._scale is not None)
        memory, scale = state._parts(dtype)
        grouped = queries.features.map(lambda t: t.unflatten(1, (groups, -1)))
        found, row = read_state(grouped, memory, scale)
        output = finish(found.flatten(1, 2), None if row is None else row.flatten(1, 2), s, queries)
    return output.to(query.dtype)
