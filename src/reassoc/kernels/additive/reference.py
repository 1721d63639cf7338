"""The specification of the additive family: every weight written out, quadratic, float64.

Shares no code with the fast paths. Logarithms of weights are formed for each triple (query, key,
feature), brought to the row's own maximum, and summed; every decay is a sum of the gates between
key and query. It is meant to be read, and to be compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..answer import Answer
from .problem import Problem

BLOCK = 1 << 22  # largest number of (query, key, feature) triples to hold at once


def additive(problem: Problem) -> Answer:
    """Answer a call of the additive family; see :class:`.problem.Problem`."""
    if problem.cu_queries is None or problem.cu_keys is None:
        return _one(problem)
    parts = []
    queries, keys = problem.cu_queries.tolist(), problem.cu_keys.tolist()
    for n in range(len(queries) - 1):

        def of_query(t: Tensor, n: int = n) -> Tensor:
            return t[:, :, queries[n] : queries[n + 1]]

        def of_key(t: Tensor, n: int = n) -> Tensor:
            return t[:, :, keys[n] : keys[n + 1]]

        parts.append(
            _one(
                problem._replace(
                    query=problem.query.map(of_query),
                    key=problem.key.map(of_key),
                    value=of_key(problem.value),
                    log_decay=None if problem.log_decay is None else of_key(problem.log_decay),
                    key_mask=None if problem.key_mask is None else problem.key_mask[:, keys[n] : keys[n + 1]],
                    memory=None if problem.memory is None else problem.memory[n : n + 1],
                    scale=None if problem.scale is None else problem.scale[n : n + 1],
                )
            )
        )
    if not parts:
        empty = _one(problem)
        states = [None if s is None else s[:0] for s in (empty.memory, empty.scale)]
        return Answer(empty.read, empty.log_row, *states)
    reads, rows, memories, scales = zip(*parts, strict=True)
    return Answer(
        torch.cat(reads, dim=2),
        None if rows[0] is None else torch.cat(rows, dim=2),
        None if memories[0] is None else torch.cat(memories),
        None if scales[0] is None else torch.cat(scales),
    )


def weights(problem: Problem, rows: slice = slice(None)) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weights of keys, and of the state's features, for the query rows ``rows``.

    Returns:
        ``(B, H, n, M)`` weights of keys; ``(B, H, n, r)`` weights of the rows of the state, ``None``
        where there is no state; ``(B, H, n)`` the scale: the true weights are ``exp(scale)`` times
        these (``None``: zero).
    """
    p = problem
    B, G, M, _ = p.value.shape
    H, N = p.query.tensor.shape[1:3]
    index = torch.arange(N, device=p.value.device)[rows]

    def per_query_head(t: Tensor) -> Tensor:
        return t.repeat_interleave(H // G, dim=1)

    place = index + (M - N) if p.causal else torch.full_like(index, M - 1)  # last position visible
    position = torch.arange(M, device=p.value.device)
    visible = position <= place[:, None]
    if p.window is not None:
        visible = visible & (position > place[:, None] - p.window)
    visible = visible.expand(B, 1, *visible.shape)
    if p.key_mask is not None:
        visible = visible & p.key_mask[:, None, None, :]

    # decay from after key j through the row's place, and from the very start: (B, H, n, M (+1), 1 or r)
    between = from_start = None
    if p.log_decay is not None:
        gates = per_query_head(p.log_decay)
        if p.key_mask is not None:
            gates = gates.masked_fill(~p.key_mask[:, None, :, None], 0.0)
        reached = (position <= place[:, None])[None, None, :, :, None]
        gates = torch.where(reached, gates[:, :, None], 0.0)  # (B, H, n, M, .)
        from_here_on = gates.flip(3).cumsum(3).flip(3)
        from_start = from_here_on[:, :, :, :1].squeeze(3) if M else gates.sum(3)
        between = torch.cat([from_here_on[:, :, :, 1:], torch.zeros_like(from_here_on[:, :, :, :1])], 3)

    def cut_rows(t: Tensor | None) -> Tensor | None:
        return None if t is None else t[:, :, rows]

    q, lq = cut_rows(p.query.mantissa), cut_rows(p.query.log)
    k = None if p.key.mantissa is None else per_query_head(p.key.mantissa)
    lk = None if p.key.log is None else per_query_head(p.key.log)
    state_log = None
    if p.memory is not None:
        state_log = p.value.new_zeros(1) if lq is None else lq
        if p.scale is not None:
            state_log = state_log + per_query_head(p.scale)[:, :, None]
        if from_start is not None:
            state_log = state_log + from_start

    if not p.exponential and (between is None or between.shape[-1] == 1):
        assert q is not None and k is not None
        pairs = q @ k.mT
        if between is not None:
            pairs = pairs * between.squeeze(-1).exp()
        pairs = torch.where(visible, pairs, 0.0)
        state = None if state_log is None else q * state_log.exp()
        return pairs, state, None

    log = p.value.new_zeros(1) if lq is None else lq[:, :, :, None]
    if lk is not None:
        log = log + lk[:, :, None]
    if between is not None:
        log = log + between
    log = torch.where(visible[..., None], log, -torch.inf)  # (B, H, n, M, r or 1)
    scale = None
    if p.exponential:
        largest = log.detach().flatten(3).amax(3) if M else log.new_full((*log.shape[:3],), -torch.inf)
        if state_log is not None:
            largest = torch.maximum(largest, state_log.detach().amax(-1))
        scale = torch.where(largest == -torch.inf, 0.0, largest)
        log = log - scale[..., None, None]
        state_log = None if state_log is None else state_log - scale[..., None]
    weight = log.exp()
    if q is not None:
        weight = q[:, :, :, None] * weight
    if k is not None:
        weight = weight * k[:, :, None]
    weight = torch.where(visible[..., None], weight, 0.0)  # a hidden key may hold anything
    state = None
    if state_log is not None:
        state = state_log.exp() if q is None else q * state_log.exp()
    return weight.sum(-1), state, scale


def _one(p: Problem) -> Answer:
    """One batch of sequences that all have the same length."""
    B, G, M, _ = p.value.shape
    H, N = p.query.tensor.shape[1:3]
    value = p.value if p.key_mask is None else p.value.masked_fill(~p.key_mask[:, None, :, None], 0.0)
    value = value.repeat_interleave(H // G, dim=1)
    memory = None if p.memory is None else p.memory.repeat_interleave(H // G, dim=1)
    step = max(1, BLOCK // max(1, B * H * M * p.width))
    reads, scales = [], []
    for start in range(0, max(N, 1), step):
        pairs, state, scale = weights(p, slice(start, start + step))
        read = pairs @ value
        if state is not None and memory is not None:
            read = read + state @ memory
        reads.append(read)
        scales.append(scale)
    read = torch.cat(reads, dim=2)
    row = torch.cat([s for s in scales if s is not None], 2) if p.exponential else None
    if p.window is not None:
        return Answer(read, row, None, None)
    return Answer(read, row, *_final_state(p))


def _final_state(p: Problem) -> tuple[Tensor, Tensor | None]:
    """Every key's write, decayed to the end, added up."""
    B, G, M, _ = p.value.shape
    value, decay, width = p.value, p.log_decay, p.width
    hidden = None if p.key_mask is None else ~p.key_mask[:, None, :, None]
    log = p.value.new_zeros(B, G, M, 1) if p.key.log is None else p.key.log
    before = p.value.new_zeros(B, G, 1)
    if decay is not None:
        gates = decay if hidden is None else decay.masked_fill(hidden, 0.0)
        to_end = gates.flip(2).cumsum(2).flip(2)
        before = gates.sum(2)
        log = log + torch.cat([to_end[:, :, 1:], torch.zeros_like(to_end[:, :, :1])], 2)
    if hidden is not None:
        log, value = log.masked_fill(hidden, -torch.inf), value.masked_fill(hidden, 0.0)
    if p.scale is not None:
        before = before + p.scale
    scale = None
    if p.exponential:
        tokens = log.detach().amax(2) if M else log.new_full((B, G, 1), -torch.inf)
        scale = tokens.expand(B, G, width)
        if p.memory is not None:
            scale = torch.maximum(scale, before.detach())
        origin = torch.where(scale == -torch.inf, 0.0, scale)
        log, before = log - origin[:, :, None], before - origin
    feature = log.exp() if p.key.mantissa is None else p.key.mantissa * log.exp()
    if hidden is not None:
        feature = feature.masked_fill(hidden, 0.0)
    memory = torch.einsum("bgmr,bgmc->bgrc", feature.expand(B, G, M, width), value)
    if p.memory is not None:
        memory = memory + before.exp()[..., None] * p.memory
    return memory, scale
