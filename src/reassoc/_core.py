"""From checked tokens to unnormalized reads and the state after them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _fused as fused
from . import kernels
from ._layout import interleave
from ._prepare import Keys, Queries, Settings, prepare_queries
from ._problem import pose
from ._state import AttentionState, empty_tail, state_dtype
from ._summary import Tail
from .kernels.answer import Answer


class Tokens(NamedTuple):
    """Queries ``(B, H, N, d)``, keys ``(B, G, M, d)``, values ``(B, G, M, e)``, mask, packing."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    boundaries: Tensor | None = None

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return self.query.shape[0] if self.boundaries is None else self.boundaries.shape[0] - 1


def solve(
    tokens: Tokens, s: Settings, causal: bool, state: AttentionState | None, keep: bool
) -> tuple[Queries, Answer, Tail | None]:
    """Queries, unnormalized reads with the memory after, and the tail: through features, as a problem."""
    query, key, value, mask, boundaries = tokens
    dtype = s.accumulate(query.dtype)
    ready = Keys(key, value, mask, s, dtype)
    queries = prepare_queries(query, s, key.shape[1], dtype, ready.features.log is not None)
    cu_keys, tail, memory, scale = boundaries, None, None, None
    if s.window is None:
        memory, scale = (None, None) if state is None else state._parts(dtype)
    elif state is not None or keep:  # with a window everything that is carried is in the tail
        cu_keys, tail = _prepend_tail(ready, state, s.window - 1, boundaries, tokens.sequences)
    problem = pose(
        queries.features, ready, s, cu_queries=boundaries, cu_keys=cu_keys, memory=memory, scale=scale,
        causal=causal, window=s.window,
    )  # fmt: skip
    return queries, kernels.solve(problem, s.backend), tail


def whole(s: Settings, state: AttentionState | None, keep: bool) -> bool:
    """Whether the native library takes the call as it is: it carries no window from one to the next."""
    return s.backend == "native" and (s.window is None or (state is None and not keep))


def unnormalized(
    tokens: Tokens, s: Settings, state: AttentionState | None, keep: bool, *, causal: bool = True
) -> tuple[Tensor, Tensor | None, AttentionState | None]:
    """Reads ``(B, H, N, c)``, the logarithm of their scale ``(B, H, N)``, and the state after."""
    tail: Tail | None = None
    if whole(s, state, keep):
        before = (None, None) if state is None else state._parts(s.accumulate(tokens.query.dtype))
        answer = fused.reads(*tokens[:3], s, key_mask=tokens.mask, before=before, causal=causal)
        row = answer.log_row
    else:
        queries, answer, tail = solve(tokens, s, causal, state, keep)
        row = queries.log_row if answer.log_row is None else answer.log_row
    after = state_after(tokens, s, state, answer.memory, answer.scale, tail) if keep else None
    return answer.read, row, after


def state_after(
    tokens: Tokens,
    s: Settings,
    before: AttentionState | None,
    memory: Tensor | None,  # None with a window: the tail is the state
    scale: Tensor | None,
    tail: Tail | None,
) -> AttentionState:
    """The state that a call leaves behind."""
    query, key, value = tokens[:3]
    kept = state_dtype(query.dtype)
    if memory is None:
        shape = (tokens.sequences, key.shape[1], s.map.feature_dim, value.shape[-1] + s.has_z)
        memory = query.new_zeros(shape, dtype=kept)
        exponential = tail is not None and tail.log is not None
        scale = memory.new_full(shape[:-1], -torch.inf) if exponential else None
    seen = _count(tokens)
    if before is not None:
        seen = seen + before.length
    if tail is not None:
        tail = tail.map(lambda t: t.to(kept) if t.is_floating_point() else t)
    scale = None if scale is None else scale.to(kept)
    return AttentionState(memory.to(kept), scale, seen, s.origin, tail)


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


def _count(tokens: Tokens) -> Tensor:
    """Real keys of every sequence, int64 ``(sequences,)``."""
    mask, cu_seqlens = tokens.mask, tokens.boundaries
    if cu_seqlens is None:
        if mask is None:
            keys = tokens.key.shape[2]
            return torch.full((tokens.sequences,), keys, dtype=torch.int64, device=tokens.key.device)
        return mask.sum(-1)
    if mask is None:
        return cu_seqlens.diff().long()
    total = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask[0].cumsum(0)])
    return total[cu_seqlens.long()].diff()
