"""Tokens split into heads: what attention is given, and how a head is normalized."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Heads(NamedTuple):
    """What one call of attention is given.

    Attributes:
        query: ``(B, H, N, d)``. key: ``(B, G, M, d)``. value: ``(B, G, M, e)``.
        source: ``(B, M, width)``, the tokens that keys and values were made from; gates are, too.
        angles: of :class:`Rotary`, where there is one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    source: Tensor
    angles: tuple[Tensor, Tensor] | None


class HeadNorm(nn.RMSNorm):
    """Normalization of a head by its root mean square, in the dtype of its weights; dtype kept.

    Under autocast a head is in half precision, and torch would warn that it mixes dtypes.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, N, size)``, every vector by itself."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)
