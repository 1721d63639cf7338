"""Positions: learned, sinusoidal, rotary and axial."""

from __future__ import annotations

import math
from importlib import import_module

import torch
from torch import Tensor, nn


class AbsolutePositionalEmbedding(nn.Module):
    """A learned vector for each position.

    Args:
        dim: size of a token. max_seq_len: number of positions.
    """

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(max_seq_len, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, N, dim) -> (N, dim)``."""
        return self.emb.weight[: x.shape[1]]


class FixedPositionalEmbedding(nn.Module):
    """Sines and then cosines of the position times dim / 2 frequencies, in a buffer ``emb``.

    Args:
        dim: size of a token, or of a head. max_seq_len: number of positions.

    Source: Vaswani et al. 2017, section 3.5.
    """

    emb: Tensor

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        frequency = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        angle = torch.arange(max_seq_len).float()[:, None] * frequency
        self.register_buffer("emb", torch.cat([angle.sin(), angle.cos()], dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        """``(B, N, ..) -> (1, N, dim)`` with the dtype and device of x."""
        return self.emb[None, : x.shape[1]].to(x)


def rotate_every_two(x: Tensor) -> Tensor:
    """Each pair (a, b) of neighbours becomes (-b, a); ``(..., d) -> (..., d)``, d even."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([-second, first], dim=-1).flatten(-2)


def apply_rotary_pos_emb(
    q: Tensor,  # (B, H, N, d)
    k: Tensor,  # (B, H, N, d)
    sinu_pos: Tensor,  # (1, N, d): sines, then cosines
) -> tuple[Tensor, Tensor]:
    """Both turned by :func:`rotate`."""
    return rotate(q, sinu_pos), rotate(k, sinu_pos)


def rotate(
    x: Tensor,  # (B, H, N, d)
    sinu_pos: Tensor,  # (1, N, d): sines, then cosines
) -> Tensor:
    """Turn each pair of neighbouring coordinates by an angle that grows with the position.

    Raises:
        ValueError: heads of an odd size, which have no pairs.

    Source: Su et al. 2021, section 3.2.
    """
    if x.shape[-1] % 2:
        raise ValueError(
            f"rotary positions turn pairs of coordinates: dim_head must be even, got {x.shape[-1]}; "
            "use rotary_position_emb=False"
        )
    sines, cosines = (t.repeat_interleave(2, dim=-1) for t in sinu_pos[0].chunk(2, dim=-1))
    return x * cosines + rotate_every_two(x) * sines


def axial_positional_embedding(dim: int, max_seq_len: int, shape: tuple[int, ...] | None) -> nn.Module:
    """The module of the package ``axial-positional-embedding``; default shape ``(max_seq_len / 64, 64)``.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        package = import_module("axial_positional_embedding")
    except ImportError as error:
        raise ImportError(
            "axial_position_emb=True needs a package: pip install axial-positional-embedding"
        ) from error
    module: nn.Module = package.AxialPositionalEmbedding(dim, shape or (math.ceil(max_seq_len / 64), 64))
    return module
