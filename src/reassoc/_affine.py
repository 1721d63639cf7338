"""The affine map of the state, ``S -> M S + B``, on bare tensors: how two runs of tokens meet.

Chunks, pieces, steps and windows all go through :func:`advance`; :mod:`reassoc._summary` gives it a face.
Exponential features keep ``S = exp(scale) * scaled`` with one scale per feature, the running maximum of the
logarithms written, so that no input norm overflows or drowns the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor


def advance(
    S: Tensor,  # (..., r, c) what was written before, scaled by exp(-scale)
    scale: Tensor | None,  # (..., r) or None
    log_decay: Tensor | None,  # (..., r) or (..., 1): M of the run that follows, as a logarithm
    written: Tensor,  # (..., r, c) what that run writes, scaled by exp(-written_scale)
    written_scale: Tensor | None,  # (..., r) or None
) -> tuple[Tensor, Tensor | None]:
    """``M S + B``, the one place where two runs meet. Scales carry no gradient: the product does."""
    scale, old, new = meet(scale, log_decay, written_scale)
    S = S if old is None else S * old.exp()
    return S + (written if new is None else written * new.exp()), scale


def meet(
    scale: Tensor | None, log_decay: Tensor | None, written_scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The scale of the sum, and as logarithms ``(..., r or 1, 1)`` the factors of the old and of the written.

    ``None`` means a factor of one.
    """
    if scale is None or written_scale is None:
        return None, None if log_decay is None else log_decay[..., None], None
    kept, missed = scale, None
    if log_decay is not None:
        kept = scale + log_decay
        with torch.no_grad():  # what rounding takes from the sum (Knuth): the state is multiplied by that
            part = kept - scale
            missed = ((scale - (kept - part)) + (log_decay - part)).nan_to_num(0.0, 0.0, 0.0)
    new_scale = torch.maximum(kept.detach(), written_scale)
    origin = torch.where(new_scale == -torch.inf, 0.0, new_scale)
    old = kept - origin if missed is None else kept - origin + missed
    return new_scale, old[..., None], (written_scale - origin)[..., None]


def add_compensated(S: Tensor, written: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
    """``S + written`` and the rounding it lost, to be given with the next (Kahan 1965).

    Token by token a float32 sum of a million small terms would lose them to rounding.
    """
    term = written - lost
    total = S + term
    return total, (total - S) - term


def accumulate(
    memory: Tensor,
    log_keep: Tensor | None,  # what the memory is multiplied by, as a logarithm; None: one
    written: Tensor,
    lost: Tensor | None,
    into: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """``exp(log_keep) memory + written`` and what rounding took, written into two tensors if given.

    Without ``lost`` (where gradients are wanted) it is a plain sum.
    """
    if lost is None:
        return (memory if log_keep is None else memory * log_keep.exp()) + written, None
    if log_keep is not None:
        # Near one, the product would lose as much with each token as a sum does: what fades is a term.
        keep, near = log_keep.exp(), log_keep > -0.7
        written = written + torch.where(near, torch.expm1(log_keep), 0.0) * memory
        memory, lost = memory * torch.where(near, 1.0, keep), lost * keep
    total, left = add_compensated(memory, written, lost)
    return (total, left) if into is None else (into[0].copy_(total), into[1].copy_(left))


def add_decays(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Logarithm of the product of two diagonals, ``None`` meaning one."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
