"""The torch backend: chunks solved as triangular systems, O(N) memory forward and backward.

Inside a chunk the writes ``u_i = beta_i (v_i - S_{i-1}^T k_i)`` of its C tokens depend on each other
through a unit lower triangle (the WY form of a product of Householder-like factors; Yang et al. 2024,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3):

    (I + tril(beta A, -1)) U = beta (V - (gamma k) S)     A_ij = k_i^T exp(D_ij) k_j
    read_i = (gamma_i q_i) S + sum_{j <= i} (q_i^T exp(D_ij) k_j) u_j
    S <- gamma_C S + sum_j exp(D_Cj) k_j u_j^T

with S the state before the chunk, D_ij the gates after j through i, gamma_i those from the start through i.
All systems of a segment are solved at once; only the last line walks from chunk to chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..additive.chunks import CHUNK, cut, decay_after
from ..answer import Answer
from ..packed import packed
from ..segments import SEGMENT, pieces, walk
from .pairs import pairs
from .problem import Problem


def delta(problem: Problem) -> Answer:
    """Answer a call of the delta family; see :class:`.problem.Problem`."""
    if problem.cu_seqlens is not None:
        return packed(problem, problem.cu_seqlens, problem.cu_seqlens, delta)
    p = problem.hide_masked()
    memory, keys = p.start(), p.key.shape[2]
    asked = p.query.shape[2] > 0
    query = p.query.unflatten(1, (p.key.shape[1], -1)) if asked else None
    runs = [pieces(t, SEGMENT, 2) for t in (p.key, p.value, p.beta, p.log_decay)]
    reads = []
    for parts in zip(pieces(query, SEGMENT, 3), *runs, strict=False) if keys else ():
        read, memory = walk(_segment, keys <= SEGMENT, *parts, memory, p.has_z, CHUNK)
        reads.append(read)
    if not asked:  # an empty read, but differentiable like any other
        return Answer(p.query[..., :1] * p.value.sum((0, 1, 2)), memory=memory)
    return Answer(torch.cat(reads, dim=3).flatten(1, 2), memory=memory)


def _segment(
    query: Tensor | None,  # (B, G, P, L, r)
    key: Tensor,  # (B, G, L, r)
    value: Tensor,  # (B, G, L, c)
    beta: Tensor,  # (B, G, L)
    log_decay: Tensor | None,  # (B, G, L, 1 or r)
    memory: Tensor,  # (B, G, r, c)
    has_z: bool,
    chunk: int,
) -> tuple[Tensor | None, Tensor]:
    """Reads ``(B, G, P, L, c)`` (``None`` without queries) and the state after the segment."""
    length = key.shape[2]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    k, v, b = cut(key, chunk), cut(value, chunk), cut(beta[..., None], chunk)
    gates = None if log_decay is None else cut(log_decay, chunk)
    rows = k[:, :, :, None]
    if query is not None:
        q = cut(query, chunk).transpose(2, 3)
        rows = torch.cat([rows, q], dim=3)
    weights = pairs(rows, k, gates)  # keys with keys, then queries with keys
    since = k.new_ones(1).expand(*k.shape[:-1], 1) if gates is None else gates.cumsum(-2).exp()
    late = k if gates is None else k * decay_after(gates).exp()
    total = None if gates is None else gates.sum(-2).exp()[..., None]

    # U = free - reach @ S, whatever the state before the chunk turns out to be.
    right = b * torch.cat([k * since, v[..., :-1] if has_z else v], dim=-1)
    system = b * weights[:, :, :, 0].tril(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    reach, free = solved.split([k.shape[-1], right.shape[-1] - k.shape[-1]], dim=-1)

    before, written = [], []
    for index in range(k.shape[2]):
        before.append(memory)
        u = free[:, :, index] - reach[:, :, index] @ (memory[..., :-1] if has_z else memory)
        if has_z:
            u = torch.cat([u, v[:, :, index, :, -1:]], dim=-1)
        written.append(u)
        kept = memory if total is None else total[:, :, index] * memory
        memory = kept + late[:, :, index].mT @ u
    if query is None:
        return None, memory
    found = (q * since[:, :, :, None]).flatten(3, 4) @ torch.stack(before, dim=2)
    found = found + weights[:, :, :, 1:].tril().flatten(3, 4) @ torch.stack(written, dim=2)
    if chunk > 1 and not bool(found.isfinite().all()):
        # Zero times infinity: a token that overflows would reach the rows before it in its chunk. One
        # by one no token can.
        return _segment(query, key, value, beta, log_decay, before[0], has_z, 1)
    return found.unflatten(3, (-1, chunk)).transpose(2, 3).flatten(3, 4)[:, :, :, :length], memory
