"""One token at a time: the decode step of the torch backend, written for few operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._affine import accumulate


def token(
    query: Tensor,  # (B, G, P, 1, r)
    key: Tensor,  # (B, G, 1, r)
    value: Tensor,  # (B, G, 1, c)
    beta: Tensor,  # (B, G, 1)
    log_decay: Tensor | None,  # (B, G, 1 or r)
    memory: Tensor,  # (B, G, r, c)
    lost: Tensor | None,  # (B, G, r, c): rounding that earlier steps lost; None where gradients are wanted
    has_z: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write one key and value, then read: reads ``(B, G, P, 1, c)`` and the new state.

    With ``in_place`` memory and ``lost`` are overwritten. What rounding loses is kept for S too, though a
    write corrects what is there: with a small beta the corrections themselves would be lost.
    """
    old = None if log_decay is None else log_decay[..., None]
    before = memory if old is None else memory * old.exp()
    u = beta[..., None] * (value - key @ before)
    if has_z:
        u = torch.cat([u[..., :-1], value[..., -1:]], dim=-1)
    into = (memory, lost) if in_place and lost is not None else None
    memory, lost = accumulate(memory, old, key.mT * u, lost, into)
    return (query.flatten(2, 3) @ memory).unflatten(2, query.shape[2:4]), memory, lost
