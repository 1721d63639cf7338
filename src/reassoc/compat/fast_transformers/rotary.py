"""Rotary positions: not of pytorch-fast-transformers itself, but of MoLFormer, which is built on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...nn.rotary import rotate
from .attention import AttentionLayer
from .builders import TransformerEncoderBuilder


class RotaryEmbedding(nn.Module):
    """Angles of ``E / 2`` pairs of coordinates, by frequencies that a checkpoint holds.

    Args:
        size: E, even. base: of the frequencies.
    """

    inv_freq: Tensor

    def __init__(self, size: int, base: float = 10000.0) -> None:
        super().__init__()
        if size % 2:
            raise ValueError(f"rotary positions need heads of even size, got {size}")
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, size, 2).float() / size))

    def forward(self, x: Tensor) -> Tensor:
        """``(N, L, H, E)``: position i turned by i times the frequencies."""
        # The product in float32, as in MoLFormer: weights were trained with what that gives.
        positions = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        angles = torch.outer(positions, self.inv_freq)[:, None]
        return rotate(x, (angles.cos(), angles.sin()))


class RotaryAttentionLayer(AttentionLayer):
    """:class:`AttentionLayer` that turns queries and keys by their positions, before any feature map.

    Module tree and buffers are those of MoLFormer's ``RotateAttentionLayer``.

    Source: Su et al. 2021; Ross et al. 2022 (MoLFormer), section 2.
    """

    def __init__(
        self, attention: nn.Module, d_model: int, n_heads: int, d_keys: int | None = None, **options: Any
    ) -> None:
        super().__init__(attention, d_model, n_heads, d_keys, **options)
        self.rotaryemb = RotaryEmbedding(d_keys or d_model // n_heads)

    def _placed(self, x: Tensor) -> Tensor:
        turned: Tensor = self.rotaryemb(x)
        return turned


class RotaryEncoderBuilder(TransformerEncoderBuilder):
    """``TransformerEncoderBuilder`` with rotary positions: MoLFormer's ``RotateEncoderBuilder``."""

    def _get_attention_layer_class(self) -> Any:
        return RotaryAttentionLayer
