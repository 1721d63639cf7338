"""Reading chunks where keys differ in scale by any number of powers of ten, feature by feature.

Exponential features, and decays per feature. Query i of a chunk needs
``A_ij = sum_f q_if k_jf exp(row_if + col_jf)`` for the keys j it may see; each is finite, but the
two exponentials cannot be taken apart at any one origin when ``col`` spans more than the range of
floating point: an origin at the largest key of the chunk underflows the keys before it, which are
all that an earlier query sees. So:

- every query has its own scale ``c_i``, the largest logarithm it can see, and nothing later enters;
- a chunk whose span is harmless takes one product with one origin;
- the others are halved recursively: the keys of a first half and the queries of a second half have a
  common origin (the half's maximum) at which neither side can overflow. All halves of one size go
  in one batched product; the work is the triangle's own, only the exponentials are more.
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
    zero = value.new_zeros(*value.shape[:-1], 1)  # (B, G, n, C, 1): the logarithm of bounded features
    row = zero[:, :, :, None] if query.log is None else query.log
    col = zero if key.log is None else key.log
    since = zero if log_decay is None else log_decay.cumsum(-2)  # start of the chunk through query i
    edge_col = between = None
    if edge is not None:
        edge_col = zero if edge.chunks.key.log is None else edge.chunks.key.log
        if edge.log_after is not None and edge.log_between is not None:
            edge_col, between = edge_col + edge.log_after, edge.log_between[:, :, :, None]

    # The largest logarithm visible to query i, per feature. Bounded features keep their own level.
    if key.log is None:
        seen, scale = zero, None
    else:
        seen = running_max(col.detach(), log_decay)
        if before.scale is not None:
            seen = torch.maximum(seen, before.scale[:, :, :, None] + since.detach())
        if edge_col is not None:
            suffix = edge_col.detach().flip(-2).cummax(-2).values.flip(-2)
            none = torch.full_like(suffix[..., :1, :], -torch.inf)
            suffix = torch.cat([suffix[..., 1:, :], none], dim=-2) + since.detach()
            seen = torch.maximum(seen, suffix if between is None else suffix + between.detach())
        scale = (row.detach() + seen[:, :, :, None]).amax(-1)
        scale = torch.where(scale == -torch.inf, 0.0, scale)
        row = row - scale[..., None]

    state_row = row + since[:, :, :, None]
    if before.scale is not None:
        state_row = state_row + before.scale[:, :, :, None, None]
    left = _times(query.mantissa, _exp(state_row))
    left = left.expand(*left.shape[:-1], before.memory.shape[-2])
    reads = (left.flatten(3, 4) @ before.memory).unflatten(3, left.shape[3:5])

    # One product with decays counted from the start of the chunk, unless they reach too far for that.
    near = since.clamp(min=-2 * SPREAD)
    far = near.detach().amin(dim=(-2, -1)) < -SPREAD
    own, spread = _product(query.mantissa, row + near[:, :, :, None], key, col - near, value, seen - near)
    exact = Triangle(query.mantissa, row, key.mantissa, col, value, log_decay)
    reads = reads + _mend(own.tril().flatten(3, 4) @ value, exact, far | (spread > SPREAD))
    if edge is not None and edge_col is not None:
        older_row, floor = row + since[:, :, :, None], seen - since
        if between is not None:
            older_row, floor = older_row + between[:, :, :, None], floor - between
        floor = torch.where(seen == -torch.inf, -torch.inf, floor)
        old = edge.chunks
        own, spread = _product(query.mantissa, older_row, old.key, edge_col, old.value, floor)
        # Reversed in time, a strict upper triangle is a strict lower one.
        exact = Triangle(query.mantissa, older_row, old.key.mantissa, edge_col, old.value, None)
        exact = exact.map(lambda t: t.flip(-2))
        fast = own.triu(1).flatten(3, 4) @ old.value
        reads = reads + _mend(fast, exact, spread > SPREAD, edge=True)
    return reads, scale


class Triangle(NamedTuple):
    """The queries and keys of chunks: query, row ``(B, G, n, P, C, r or 1)``, key, col, value,
    log_decay ``(B, G, n, C, .)``; ``row`` and ``col`` are logarithms without the decays inside.
    """  # noqa: D205

    query: Tensor | None
    row: Tensor
    key: Tensor | None
    col: Tensor
    value: Tensor
    log_decay: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Triangle:
        """Apply a function of one tensor to every part."""
        return Triangle(*(None if t is None else function(t) for t in self))  # type: ignore[arg-type]


def _product(
    query: Tensor | None,
    row: Tensor,
    key: Features,
    col: Tensor,
    value: Tensor,
    floor: Tensor,  # (B, G, n, C, r or 1): what each query can see, at the origin of `col`
) -> tuple[Tensor, Tensor]:
    """All weights of a chunk at one origin ``(B, G, n, P, C, C)``, and the spread it had to bridge."""
    origin = col.detach().amax(-2, keepdim=True)
    origin = torch.where(origin == -torch.inf, 0.0, origin)
    floor = torch.where(floor.detach() == -torch.inf, origin, floor.detach())
    left = _times(query, _exp(row + origin[:, :, :, None]))
    right = _times(key.mantissa, (col - origin).exp())
    left, right = _same_width(left, right)
    weight = (left.flatten(3, 4) @ right.mT).unflatten(3, left.shape[3:5])
    return weight, (origin - floor).amax(dim=(-2, -1))


def _mend(fast: Tensor, exact: Triangle, wide: Tensor, edge: bool = False) -> Tensor:
    """Recompute by halves the chunks ``wide`` (B, G, n) for which one product cannot be right."""
    groups = exact.query.shape[3] if exact.query is not None else exact.row.shape[3]
    length = exact.value.shape[3]
    fast = fast.unflatten(3, (groups, length))  # (B, G, n, P, C, c)
    index = wide.flatten().nonzero()[:, 0]
    if index.numel() == 0:
        return fast
    shape = exact.value.shape[:3]
    picked = exact.map(lambda t: t.expand(*shape, *t.shape[3:]).flatten(0, 2)[index])
    reads = by_halves(picked, groups, diagonal=not edge)
    reads = reads.flip(-2) if edge else reads
    mended: Tensor = fast.flatten(0, 2).index_copy(0, index, reads).unflatten(0, shape)
    return mended


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
