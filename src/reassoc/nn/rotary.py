"""Rotary position encoding: positions as rotations, so that products depend on distances."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates pairs of coordinates (i, i + size / 2) by ``position * base ** (-2 i / size)`` radians.

    Args:
        size: of the vectors, even. base: of the angles.

    Raises:
        ValueError: an odd size.

    Source: Su et al. 2024 (RoFormer).
    """

    papers = ("su2024",)

    def __init__(self, size: int, base: float = 10000.0) -> None:
        super().__init__()
        if size % 2:
            raise ValueError(f"rotary positions need vectors of even size, got {size}")
        self.size, self.base = size, base

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions ``(..., N)``: each ``(..., 1, N, size / 2)``, for all heads.

        The angles are formed in float64: in float32 positions beyond some ten thousand lose them.
        """
        steps = torch.arange(0, self.size, 2, device=positions.device, dtype=torch.float64) / self.size
        angles = positions[..., None].double() * self.base**-steps
        return angles.cos()[..., None, :, :], angles.sin()[..., None, :, :]

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return f"size={self.size}, base={self.base:g}"


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """``(B, H, N, size)`` turned by what :class:`Rotary` gave; dtype kept."""
    cos, sin = (part.to(x.dtype) for part in angles)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
