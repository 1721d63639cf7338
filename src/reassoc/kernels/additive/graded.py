"""Reading chunks where keys differ in scale by any number of powers of ten, feature by feature.

Exponential features, and decays per feature. Query i of a chunk needs
``A_ij = sum_f q_if k_jf exp(row_if + col_jf)`` for the keys j it may see; each is finite, but the
two exponentials cannot be taken apart at any one origin when ``col`` spans more than the range of
floating point: an origin at the largest key of the chunk underflows the keys before it, which are
all that an earlier query sees. So:

- a chunk in which every query sees, of every feature, at least e^-SPREAD of the largest, takes one
  product at one origin: the scale is taken out again exactly, whatever key it came from;
- in the others every query has its own scale, the largest logarithm it can see, and the triangle is
  halved recursively: the keys of a first half and the queries of a second half have a common origin
  (the half's maximum) at which neither side can overflow. All halves of one size go in one batched
  product; the work is the triangle's own, only the exponentials are more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._features import Features
from .chunks import Before, KeyChunks, decay_after, running_max
from .windows import Edge

# Largest spread of exponents, in nats, that one product may bridge: e^40 leaves room in float32 for
# features of 1e18 on the large side, and on the small side keeps keys down to e^-40 of the largest.
SPREAD = 40.0


class Logs(NamedTuple):
    """Logarithms of a segment, zero for bounded features; w is 1 or r.

    Attributes:
        row: ``(B, G, n, P, C, w)``: of queries. col: ``(B, G, n, C, w)``: of keys.
        since: ``(B, G, n, C, w)``: decay from the start of the chunk through each position.
        edge: ``(B, G, n, C, w)``: of the edge's keys, decayed to the start of the chunk, or ``None``.
    """

    row: Tensor
    col: Tensor
    since: Tensor
    edge: Tensor | None


def read(
    query: Features,  # (B, G, n, P, C, r or 1)
    chunks: KeyChunks,
    before: Before,
    edge: Edge | None,
) -> tuple[Tensor, Tensor | None]:
    """Reads ``(B, G, n, P, C, c)`` and their scale ``(B, G, n, P, C)`` (``None``: zero).

    The true reads are ``exp(scale) * read``. The scale carries no gradient.
    """
    key, value, log_decay = chunks
    zero = value.new_zeros(*value.shape[:-1], 1)
    logs = Logs(
        zero[:, :, :, None] if query.log is None else query.log,
        zero if key.log is None else key.log,
        zero if log_decay is None else log_decay.cumsum(-2),
        None if edge is None else _edge_logs(edge, zero),
    )
    reads, scale, wide = _by_one_product(query, chunks, before, edge, logs)
    index = wide.flatten().nonzero()[:, 0]
    if index.numel() == 0:
        return reads, scale

    def pick(x: Tensor) -> Tensor:
        return x.expand(*value.shape[:3], *x.shape[3:]).flatten(0, 2)[index][:, None, None]

    def maybe(x: Tensor | None) -> Tensor | None:
        return None if x is None else pick(x)

    some = KeyChunks(key.map(pick), pick(value), maybe(log_decay))
    exact, exact_scale = _by_halving(
        query.map(pick), some, Before(pick(before.memory), maybe(before.scale)),
        None if edge is None else edge.chunks.key.map(pick),
        None if edge is None else pick(edge.chunks.value),
        Logs(pick(logs.row), pick(logs.col), pick(logs.since), maybe(logs.edge)),
    )  # fmt: skip
    reads = _put(reads, index, exact)
    if scale is not None and exact_scale is not None:
        scale = _put(scale, index, exact_scale)
    return reads, scale


def _edge_logs(edge: Edge, zero: Tensor) -> Tensor:
    log = zero if edge.chunks.key.log is None else edge.chunks.key.log
    if edge.log_after is not None and edge.log_between is not None:
        log = log + edge.log_after + edge.log_between[:, :, :, None]
    return log


def _put(x: Tensor, index: Tensor, new: Tensor) -> Tensor:
    put: Tensor = x.flatten(0, 2).index_copy(0, index, new.flatten(0, 2)).unflatten(0, x.shape[:3])
    return put


def _largest(x: Tensor) -> Tensor:
    """Maximum over the positions of each chunk, kept as an axis of one; no gradient."""
    return x.detach().amax(-2, keepdim=True)


def _by_one_product(
    query: Features, chunks: KeyChunks, before: Before, edge: Edge | None, logs: Logs
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Reads, scale, and bool ``(B, G, n)``: the chunks for which they are not to be used."""
    exponential = chunks.key.log is not None
    # Decays too long to count from the start of the chunk make it wide; the bound keeps them finite.
    since = logs.since.clamp(min=-2 * SPREAD)
    wide = since.detach().amin((-2, -1)) < -SPREAD
    row, col = logs.row + since[:, :, :, None], logs.col - since
    origin = _largest(col)
    if exponential:
        # Visible to every query of the chunk: the first key, and everything before the chunk.
        floor = col.detach()[..., :1, :]
        if before.scale is not None:
            origin = torch.maximum(origin, before.scale[:, :, :, None])
            floor = torch.maximum(floor, before.scale[:, :, :, None])
        if logs.edge is not None:
            origin = torch.maximum(origin, _largest(logs.edge))
        # A feature that nothing has, anywhere in sight, spans nothing.
        spread = torch.where(origin == -torch.inf, 0.0, origin - floor)
        # Written so that a NaN key is wide: halving then keeps it from the queries before it.
        wide = wide | ~(spread.amax((-2, -1)) <= SPREAD)
        origin = torch.where(origin == -torch.inf, 0.0, origin)
    row = row + origin[:, :, :, None]
    scale: Tensor | None = None
    if exponential:
        scale = row.detach().amax(-1)
        scale = torch.where(scale == -torch.inf, 0.0, scale)  # an empty query reads nothing
        row = row - scale[..., None]
    left = _times(query.mantissa, row.exp())
    left = left.expand(*left.shape[:-1], before.memory.shape[-2])
    shape = left.shape[3:5]
    left = left.flatten(3, 4)

    def triangle(key: Features, log: Tensor) -> Tensor:
        right = _times(key.mantissa, (log - origin).exp())
        weight: Tensor = (left @ right.expand(*right.shape[:-1], left.shape[-1]).mT).unflatten(3, shape)
        return weight

    reads = triangle(chunks.key, col).tril().flatten(3, 4) @ chunks.value
    # The state's own scale is brought to the origin: r numbers a chunk instead of C r.
    level = -origin if before.scale is None else before.scale[:, :, :, None] - origin
    reads = reads + left @ (before.memory * level.mT.exp())
    if edge is not None and logs.edge is not None:
        older = triangle(edge.chunks.key, logs.edge)
        reads = reads + older.triu(1).flatten(3, 4) @ edge.chunks.value
    return reads.unflatten(3, shape), scale, wide


def _by_halving(
    query: Features,
    chunks: KeyChunks,
    before: Before,
    edge_key: Features | None,
    edge_value: Tensor | None,
    logs: Logs,
) -> tuple[Tensor, Tensor | None]:
    """The same whatever the logarithms, minus infinity among the decays included."""
    key, value, log_decay = chunks
    row, since = logs.row, logs.since[:, :, :, None]
    scale: Tensor | None = None
    if key.log is not None:
        seen = running_max(logs.col.detach(), log_decay)
        if before.scale is not None:
            seen = torch.maximum(seen, before.scale[:, :, :, None] + logs.since.detach())
        if logs.edge is not None:
            suffix = logs.edge.detach().flip(-2).cummax(-2).values.flip(-2)
            none = torch.full_like(suffix[..., :1, :], -torch.inf)
            seen = torch.maximum(seen, torch.cat([suffix[..., 1:, :], none], -2) + logs.since.detach())
        scale = (row.detach() + seen[:, :, :, None]).amax(-1)
        scale = torch.where(scale == -torch.inf, 0.0, scale)
        row = row - scale[..., None]
    state_row = row + since
    if before.scale is not None:
        state_row = state_row + before.scale[:, :, :, None, None]
    left = _times(query.mantissa, _exp(state_row))
    left = left.expand(*left.shape[:-1], before.memory.shape[-2])
    reads = (left.flatten(3, 4) @ before.memory).unflatten(3, left.shape[3:5])
    own = Triangle(query.mantissa, row, key.mantissa, logs.col, value, log_decay)
    own = own.map(lambda t: t.flatten(0, 2))
    groups = left.shape[3]
    reads = reads + by_halves(own, groups, diagonal=True)[:, None, None]
    if edge_key is not None and logs.edge is not None and edge_value is not None:
        # Reversed in time, a strict upper triangle is a strict lower one.
        old = Triangle(query.mantissa, row + since, edge_key.mantissa, logs.edge, edge_value, None)
        old = old.map(lambda t: t.flatten(0, 2).flip(-2))
        reads = reads + by_halves(old, groups, diagonal=False).flip(-2)[:, None, None]
    return reads, scale


class Triangle(NamedTuple):
    """Queries and keys of K chunks: query, row ``(K, P, C, w)``; key, col, value, log_decay ``(K, C, w)``.

    ``row`` and ``col`` are logarithms without the decays inside the chunk.
    """

    query: Tensor | None
    row: Tensor
    key: Tensor | None
    col: Tensor
    value: Tensor
    log_decay: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Triangle:
        """Apply a function of one tensor to every part."""
        return Triangle(*(None if t is None else function(t) for t in self))  # type: ignore[arg-type]


def by_halves(triangle: Triangle, groups: int, diagonal: bool) -> Tensor:
    """``(K, P, C, c)``: the lower triangle of K chunks (axes B, G, n in one), whatever the logarithms."""
    query, row, key, col, value, log_decay = triangle
    count, length = value.shape[:2]
    row = row.expand(count, groups, length, row.shape[-1])
    reads = value.new_zeros(count, groups, length, value.shape[-1])
    if diagonal:
        own = _times(query, _times(None if key is None else key[:, None], _exp(row + col[:, None])))
        reads = own.sum(-1, keepdim=True) * value[:, None]
    half = length // 2
    while half:
        blocks = (-1, 2, half)
        late_row = row.unflatten(2, blocks)[:, :, :, 1]
        early_col = col.unflatten(1, blocks)[:, :, 0]
        if log_decay is not None:
            gates = log_decay.unflatten(1, blocks)
            early_col = early_col + decay_after(gates[:, :, 0])
            late_row = late_row + gates[:, :, 1].cumsum(-2)[:, None]
        origin = early_col.detach().amax(-2, keepdim=True)
        origin = torch.where(origin == -torch.inf, 0.0, origin)
        late = None if query is None else query.unflatten(2, blocks)[:, :, :, 1]
        early = None if key is None else key.unflatten(1, blocks)[:, :, 0]
        left, right = _same_width(
            _times(late, _exp(late_row + origin[:, None])), _times(early, (early_col - origin).exp())
        )
        new = left @ right.mT[:, None] @ value.unflatten(1, blocks)[:, None, :, 0]
        reads = reads + torch.stack([torch.zeros_like(new), new], dim=3).flatten(2, 4)
        half //= 2
    return reads


def _exp(log: Tensor) -> Tensor:
    """The exponential of a logarithm that is at most SPREAD wherever it meets a visible key.

    Where the feature of every visible key is exactly zero the logarithm is arbitrary; the bound keeps
    zero times it zero.
    """
    return log.clamp(max=SPREAD + 1.0).exp()


def _times(mantissa: Tensor | None, weight: Tensor) -> Tensor:
    return weight if mantissa is None else mantissa * weight


def _same_width(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """One logarithm may serve all features of one side; the product runs over all of them."""
    width = max(left.shape[-1], right.shape[-1])
    return left.expand(*left.shape[:-1], width), right.expand(*right.shape[:-1], width)
