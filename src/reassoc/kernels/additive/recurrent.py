"""One token at a time: the decode step of the torch backend, written for few operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._affine import advance
from ..._features import Features
from .chunked import read_state


def token(
    query: Features,  # (B, G, P, 1, r or 1)
    key: Features,  # (B, G, 1, r or 1)
    value: Tensor,  # (B, G, 1, c)
    log_decay: Tensor | None,  # (B, G, 1 or r)
    memory: Tensor,  # (B, G, r, c)
    scale: Tensor | None,  # (B, G, r)
    in_place: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Write one key and value, then read: reads ``(B, G, P, 1, c)``, their scale, and the new state.

    With ``in_place`` the memory is overwritten where the arithmetic allows it.
    """
    if scale is None:
        assert key.mantissa is not None
        if log_decay is not None:
            decay = log_decay.exp()[..., None]
            memory = memory.mul_(decay) if in_place else memory * decay
        if in_place:
            memory.addcmul_(key.mantissa.mT, value)
        else:
            memory = torch.addcmul(memory, key.mantissa.mT, value)
    else:
        level = value.new_zeros(1) if key.log is None else key.log[:, :, 0]
        level = level.expand_as(scale)
        written_scale = level.detach()
        weight = (level - torch.where(written_scale == -torch.inf, 0.0, written_scale)).exp()
        if key.mantissa is not None:
            weight = weight * key.mantissa[:, :, 0]
        memory, scale = advance(memory, scale, log_decay, weight[..., None] * value, written_scale)
    read, row = read_state(query, memory, scale)
    return read, row, memory, scale
