"""One token at a time: the decode step of the torch backend, written for few operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._affine import accumulate, meet
from ..._features import Features
from .chunked import read_state


def token(
    query: Features,  # (B, G, P, 1, r or 1)
    key: Features,  # (B, G, 1, r or 1)
    value: Tensor,  # (B, G, 1, c)
    log_decay: Tensor | None,  # (B, G, 1 or r)
    memory: Tensor,  # (B, G, r, c)
    scale: Tensor | None,  # (B, G, r)
    lost: Tensor | None,  # (B, G, r, c): rounding that earlier steps lost; None where gradients are wanted
    in_place: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Write one key and value, then read: reads ``(B, G, P, 1, c)``, their scale, and the new state.

    With ``in_place`` memory and ``lost`` are overwritten.
    """
    written_scale: Tensor | None = None
    weight = None if key.mantissa is None else key.mantissa[:, :, 0]
    if key.log is not None and scale is not None:
        level = key.log[:, :, 0].expand_as(scale)
        written_scale = level.detach()
        size = (level - torch.where(written_scale == -torch.inf, 0.0, written_scale)).exp()
        weight = size if weight is None else weight * size
    assert weight is not None
    scale, old, new = meet(scale, log_decay, written_scale)
    written = (weight if new is None else weight * new[..., 0].exp())[..., None] * value
    into = (memory, lost) if in_place and lost is not None else None
    memory, lost = accumulate(memory, old, written, lost, into)
    read, row = read_state(query, memory, scale)
    return read, row, memory, scale, lost
