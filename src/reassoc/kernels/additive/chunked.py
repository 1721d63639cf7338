"""The torch backend: chunks, O(N) memory forward and backward, any device that torch has.

The sequence is walked in segments of many chunks, each one batch of matrix products; between
segments only the state is kept. Backward recomputes a segment from the state before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..._features import Features
from ..answer import Answer
from ..packed import packed
from ..segments import SEGMENT, pieces, walk
from . import graded, plain
from .chunks import KeyChunks, cut, decay_after, scan, write
from .problem import Problem
from .windows import chunk_size, split


def additive(problem: Problem) -> Answer:
    """Answer a call of the additive family; see :class:`.problem.Problem`."""
    if problem.cu_queries is not None:
        assert problem.cu_keys is not None
        return packed(problem, problem.cu_queries, problem.cu_keys, additive)
    problem = _mask(problem)
    return _causal(problem) if problem.causal else _bidirectional(problem)


def _mask(p: Problem) -> Problem:
    """Hidden keys become zero features of a zero value, and do not decay."""
    if p.key_mask is None:
        return p
    visible = p.key_mask[:, None, :, None]
    log_decay = None if p.log_decay is None else p.log_decay.masked_fill(~visible, 0.0)
    value = p.value.masked_fill(~visible, 0.0)
    return p._replace(key=p.key.hide(visible), value=value, log_decay=log_decay, key_mask=None)


def _graded(p: Problem) -> bool:
    return p.exponential or (p.log_decay is not None and p.log_decay.shape[-1] > 1)


def _start(p: Problem) -> tuple[Tensor, Tensor | None]:
    """The state before the first key."""
    if p.memory is not None:
        return p.memory, p.scale
    batch, heads, _, columns = p.value.shape
    memory = p.value.new_zeros(batch, heads, p.width, columns)
    scale = p.value.new_full((batch, heads, p.width), -torch.inf) if p.exponential else None
    return memory, scale


def _causal(p: Problem) -> Answer:
    keys, window = p.value.shape[-2], p.window
    length = p.query.tensor.shape[2]
    if length == 0:
        return _nothing_to_read(p)
    if window is not None and length == 1:
        return _one_row(p, window)
    if window is not None:
        window = min(window, keys)  # a wider one hides nothing, and a power of two is not needed
        if window == keys and length == keys:
            window = None
    chunk = chunk_size(window, length)
    # A window is recomputed at the start of each segment: at least as long, it at most doubles the work.
    segment = SEGMENT if window is None else -(-max(SEGMENT, window) // chunk) * chunk
    query = p.query.map(lambda t: t.unflatten(1, (p.value.shape[1], -1)))
    memory, scale = _start(p)
    alone = length <= segment
    queries = [pieces(t, segment, 3) for t in query]
    runs = [
        _key_pieces(t, segment, length, window, -torch.inf if name == "log" else 0.0)
        for name, t in (("mantissa", p.key.mantissa), ("log", p.key.log), ("", p.value), ("", p.log_decay))
    ]
    reads, rows = [], []
    for mantissa, log, key_mantissa, key_log, value, log_decay in zip(*queries, *runs, strict=False):
        read, row, memory, scale = walk(
            _segment, alone, Features(mantissa, log), Features(key_mantissa, key_log), value, log_decay,
            memory, scale, chunk, window, _graded(p),
        )  # fmt: skip
        reads.append(read)
        rows.append(row)
    log_row = None if rows[0] is None else torch.cat(rows, dim=3).flatten(1, 2)
    read = torch.cat(reads, dim=3).flatten(1, 2)
    if p.window is not None:
        return Answer(read, log_row, None, None)
    return Answer(read, log_row, memory, scale)


def _key_pieces(
    x: Tensor | None, segment: int, length: int, window: int | None, fill: float
) -> Iterator[Tensor | None]:
    """The keys of each segment, with the ``window`` positions before it, ``fill`` where there are none."""
    if x is None or window is None:
        yield from pieces(x, segment, 2)
        return
    short = window + length - x.shape[2]  # positions missing in front of the first segment's window
    last = length % segment or segment
    x = torch.nn.functional.pad(x, (0, 0, short, segment - last), value=fill)
    overlapping = x.unfold(2, window + segment, segment).unbind(2)  # (B, G, w, window + segment) each
    for index, piece in enumerate(overlapping):
        whole = piece.mT
        yield whole if index + 1 < len(overlapping) else whole[:, :, : window + last]


def _segment(
    query: Features,  # (B, G, P, L, r)
    key: Features,  # (B, G, L, r), with a window (B, G, W + L, r)
    value: Tensor,
    log_decay: Tensor | None,
    memory: Tensor,
    scale: Tensor | None,
    chunk: int,
    window: int | None,
    is_graded: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Reads ``(B, G, P, L, c)``, their scale ``(B, G, P, L)``, and the state after the segment."""
    length = query.tensor.shape[-2]
    cut_query = query.map(lambda t: cut(t, chunk).transpose(2, 3))
    size = chunk if window is None else window + length + (-length % chunk)
    chunks = KeyChunks(
        Features(
            None if key.mantissa is None else cut(key.mantissa, size),
            None if key.log is None else cut(key.log, size, -torch.inf),
        ),
        cut(value, size),
        None if log_decay is None else cut(log_decay, size),
    )
    edge = None
    if window is None:
        before, memory, scale = scan(write(chunks), memory, scale)
    else:
        chunks, before, edge = split(chunks, window, chunk)
    row: Tensor | None = None
    if is_graded:
        read, row = graded.read(cut_query, chunks, before, edge)
    else:
        read = plain.read(cut_query.tensor, chunks, before, edge)
    read = read.transpose(2, 3).flatten(3, 4)[:, :, :, :length]
    if row is not None:
        row = row.transpose(2, 3).flatten(3, 4)[:, :, :, :length]
    return read, row, memory, scale


def _bidirectional(p: Problem) -> Answer:
    """Every query reads the final state."""
    keys, length = p.value.shape[-2], p.query.tensor.shape[2]
    memory, scale = _start(p)
    step = 4 * SEGMENT

    def gather(
        key: Features, value: Tensor, log_decay: Tensor | None, memory: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        def whole(t: Tensor) -> Tensor:
            return t[:, :, None]

        decay = None if log_decay is None else whole(log_decay)
        written = write(KeyChunks(key.map(whole), whole(value), decay))
        return scan(written, memory, scale)[1:]

    parts = zip(*(pieces(t, step, 2) for t in (*p.key, p.value, p.log_decay)), strict=False)
    for mantissa, log, value, log_decay in parts if keys else ():
        memory, scale = walk(gather, keys <= step, Features(mantissa, log), value, log_decay, memory, scale)
    if length == 0:
        return _nothing_to_read(p)._replace(memory=memory, scale=scale)
    query = p.query.map(lambda t: t.unflatten(1, (p.value.shape[1], -1)))
    reads, rows = [], []
    for mantissa, log in zip(*(pieces(t, step, 3) for t in query), strict=False):
        read, row = walk(read_state, length <= step, Features(mantissa, log), memory, scale)
        reads.append(read)
        rows.append(row)
    log_row = None if rows[0] is None else torch.cat(rows, dim=3).flatten(1, 2)
    return Answer(torch.cat(reads, dim=3).flatten(1, 2), log_row, memory, scale)


def _one_row(p: Problem, window: int) -> Answer:
    """A single query with a window, a decode step: weights of the keys themselves, no state."""
    key, value, log_decay = (
        p.key.map(lambda t: t[:, :, -window:]),
        p.value[:, :, -window:],
        None if p.log_decay is None else p.log_decay[:, :, -window:],
    )
    log, right = key.log, key.mantissa
    if log_decay is not None:
        after = decay_after(log_decay)
        log = after if log is None else log + after
    query = p.query.map(lambda t: t.unflatten(1, (value.shape[1], -1)).squeeze(3))
    left = query.mantissa
    row: Tensor | None = None
    if log is not None:
        origin = log.detach().amax(-2, keepdim=True) if p.exponential else log.new_zeros(1)
        origin = torch.where(origin == -torch.inf, 0.0, origin)
        weight = (log - origin).exp()
        right = weight if right is None else right * weight
    if query.log is not None:
        level = query.log + origin
        row = level.detach().amax(-1)
        row = torch.where(row == -torch.inf, 0.0, row)
        weight = (level - row[..., None]).exp()
        left = weight if left is None else left * weight
    assert left is not None
    assert right is not None
    width = max(left.shape[-1], right.shape[-1])
    weights = left.expand(*left.shape[:-1], width) @ right.expand(*right.shape[:-1], width).mT
    read = (weights @ value)[:, :, :, None].flatten(1, 2)
    return Answer(read, None if row is None else row[..., None].flatten(1, 2), None, None)


def read_state(
    query: Features,  # (B, G, P, N, r or 1)
    memory: Tensor,  # (B, G, r, c)
    scale: Tensor | None,  # (B, G, r)
) -> tuple[Tensor, Tensor | None]:
    """Reads ``(B, G, P, N, c)`` and their scale ``(B, G, P, N)`` (``None``: zero) from one state."""
    row: Tensor | None = None
    left = query.mantissa
    if scale is not None:
        log = scale[:, :, None, None] if query.log is None else query.log + scale[:, :, None, None]
        row = log.detach().amax(-1)
        row = torch.where(row == -torch.inf, 0.0, row)
        weight = (log - row[..., None]).exp()
        left = weight if left is None else left * weight
        row = row.expand(left.shape[:-1])
    assert left is not None
    return (left.flatten(2, 3) @ memory).unflatten(2, left.shape[2:4]), row


def _nothing_to_read(p: Problem) -> Answer:
    """The answer for no queries; the state passes through. Empty, but differentiable like any other."""
    memory, scale = _start(p)
    row = p.query.tensor[..., 0].detach() if p.exponential else None
    read = p.query.tensor[..., :1] * (p.value.sum((0, 1, 2)) + p.key.tensor.sum())
    if p.window is not None:
        return Answer(read, row, None, None)
    return Answer(read, row, memory, scale)
