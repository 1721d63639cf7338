"""One step of training, as every experiment takes it: AdamW, warm-up then cosine, clipped gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

LAST = 0.1  # share of the learning rate at the end of a run


def optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only: gains, biases and gate offsets have no reason to be small."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in wanted if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in wanted if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def schedule(step: int, steps: int, warmup: int) -> float:
    """The share of the learning rate at a step: linear warm-up, then half a cosine down to :data:`LAST`.

    Args:
        step: 0 to steps - 1. steps: of the whole run. warmup: steps until the full rate; 0 for none.
    """
    if step < warmup:
        return (step + 1) / warmup
    half = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return LAST + (1 - LAST) * half


def update(model: nn.Module, adam: torch.optim.Optimizer, loss: Tensor, *, lr: float, clip: float) -> float:
    """One step down the gradient of a loss.

    Args:
        loss: a scalar that depends on the model. lr: of this step. clip: largest norm of all gradients
            together; a larger one is scaled down to it.

    Returns:
        The norm before clipping. Where that is not finite the model is left as it was: it has diverged,
        which the caller records as a result.
    """
    adam.zero_grad(set_to_none=True)
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
    if math.isfinite(norm):
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
    return norm
