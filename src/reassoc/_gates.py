"""The gates of a rule, checked against the keys and in the form that kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

from .rules import Rule


def check_beta(rule: Rule, key: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The writing strengths ``(B, G, M)`` of a delta rule, ``None`` for the others."""
    beta = rule.beta
    if beta is None:
        return None
    if beta.shape != key.shape[:3]:
        raise ValueError(f"beta must have shape (B, G, M) = {tuple(key.shape[:3])}, got {tuple(beta.shape)}")
    if beta.device != key.device:
        raise TypeError(f"beta must be on {key.device}, got {beta.device}")
    return beta.to(dtype)


def expand_decay(rule: Rule, key: Tensor, features: int, dtype: torch.dtype) -> Tensor | None:
    """The gates as ``(B, G, M, 1 or r)``."""
    gate = rule.log_decay
    if gate is None:
        return None
    batch, heads, length, _ = key.shape
    shapes = {1: (heads,), 3: (batch, heads, length), 4: (batch, heads, length, features)}
    if tuple(gate.shape) != shapes[gate.ndim]:
        raise ValueError(
            f"log_decay must have shape (G,) = {(heads,)}, (B, G, M) = {(batch, heads, length)} or "
            f"(B, G, M, r) = {(batch, heads, length, features)}, got {tuple(gate.shape)}"
        )
    if gate.device != key.device:
        raise TypeError(f"log_decay must be on {key.device}, got {gate.device}")
    if gate.ndim == 1:
        gate = gate[None, :, None].expand(batch, heads, length)
    return (gate if gate.ndim == 4 else gate[..., None]).to(dtype)
