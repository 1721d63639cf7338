"""The specification of the delta family: the recurrence, one token after another, in float64.

Shares no code with the fast paths. It is meant to be read, and to be compared with.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..answer import Answer
from .problem import Problem


def delta(p: Problem) -> Answer:
    """Answer a call of the delta family; see :class:`.problem.Problem`."""
    bounds = [0, p.key.shape[2]] if p.cu_seqlens is None else p.cu_seqlens.tolist()
    first = p.start()
    queries, keys, values, betas = p.query.unbind(2), p.key.unbind(2), p.value.unbind(2), p.beta.unbind(2)
    gates = None if p.log_decay is None else p.log_decay.unbind(2)
    masks = None if p.key_mask is None else p.key_mask.unbind(1)
    reads: list[Tensor] = []
    states: list[Tensor] = []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        S = first if p.cu_seqlens is None else first[n : n + 1]  # (B, G, r, c)
        for t in range(start, stop):
            after = write(S, keys[t], values[t], betas[t], None if gates is None else gates[t], p.has_z)
            S = after if masks is None else torch.where(masks[t][:, None, None, None], after, S)
            if queries:
                reads.append(read(S, queries[t]))
        states.append(S)
    memory = torch.cat(states) if states else first
    if not reads:  # an empty read, but differentiable like any other
        return Answer(p.query[..., :1] * p.value.sum((0, 1, 2)), memory=memory)
    return Answer(torch.stack(reads, dim=2), memory=memory)


def write(
    S: Tensor,  # (B, G, r, c)
    k: Tensor,  # (B, G, r)
    v: Tensor,  # (B, G, c)
    beta: Tensor,  # (B, G)
    gate: Tensor | None,  # (B, G, 1 or r), a logarithm
    has_z: bool,
) -> Tensor:
    """The state after one token: decay first, then the delta write; z, the last column, only adds."""
    S = S if gate is None else gate.exp()[..., None] * S
    held = torch.einsum("bgr,bgrc->bgc", k, S)  # what the state has for this key
    u = beta[..., None] * (v - held)
    if has_z:
        u = torch.cat([u[..., :-1], v[..., -1:]], dim=-1)
    return S + k[..., :, None] * u[..., None, :]


def read(S: Tensor, q: Tensor) -> Tensor:
    """``(B, H, c)``: what the queries ``(B, H, r)`` find; head h reads key head ``h // (H // G)``."""
    found = torch.einsum("bgpr,bgrc->bgpc", q.unflatten(1, (S.shape[1], -1)), S)
    return found.flatten(1, 2)
