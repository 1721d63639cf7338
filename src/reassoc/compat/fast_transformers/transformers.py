"""Encoders and decoders around any attention; batch first."""

from __future__ import annotations

from torch import Tensor, nn

from ._layer import Stack, TransformerLayer, all_real
from .events import EventDispatcher
from .masking import BaseMask, FullMask


class TransformerEncoderLayer(TransformerLayer):
    """Self-attention and two linear layers.

    Args:
        attention: called with ``(x, x, x, attn_mask=, query_lengths=, key_lengths=)``.
        d_model, d_ff, dropout, activation, event_dispatcher: see the base.
    """

    attention: nn.Module

    def __init__(
        self,
        attention: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str | EventDispatcher = "",
    ) -> None:
        super().__init__({"attention": attention}, d_model, d_ff, dropout, activation, event_dispatcher)

    def forward(
        self,
        x: Tensor,  # (N, L, d_model)
        attn_mask: BaseMask | None = None,
        length_mask: BaseMask | None = None,
    ) -> Tensor:  # (N, L, d_model)
        """The layer; without masks everything is real and seen."""
        attn_mask, length_mask = _self_masks(x, attn_mask, length_mask)
        new = self.attention(x, x, x, attn_mask=attn_mask, query_lengths=length_mask, key_lengths=length_mask)
        output: Tensor = self.norm2(self._transformed(self.norm1(x + self.dropout(new))))
        return output


class TransformerEncoder(Stack):
    """Encoder layers. Arguments: see the base."""

    def forward(
        self,
        x: Tensor,  # (N, L, d_model)
        attn_mask: BaseMask | None = None,
        length_mask: BaseMask | None = None,
    ) -> Tensor:  # (N, L, d_model)
        """All layers, with the same masks."""
        attn_mask, length_mask = _self_masks(x, attn_mask, length_mask)
        for layer in self.layers:
            x = layer(x, attn_mask=attn_mask, length_mask=length_mask)
            self._tell(x)
        return self._normed(x)


class TransformerDecoderLayer(TransformerLayer):
    """Self-attention, attention to a memory, and two linear layers.

    Args:
        self_attention, cross_attention: called as the encoder layer's.
        d_model, d_ff, dropout, activation, event_dispatcher: see the base.
    """

    self_attention: nn.Module
    cross_attention: nn.Module

    def __init__(
        self,
        self_attention: nn.Module,
        cross_attention: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str | EventDispatcher = "",
    ) -> None:
        attentions = {"self_attention": self_attention, "cross_attention": cross_attention}
        super().__init__(attentions, d_model, d_ff, dropout, activation, event_dispatcher)

    def forward(
        self,
        x: Tensor,  # (N, L, d_model)
        memory: Tensor,  # (N, S, d_model)
        x_mask: BaseMask | None = None,
        x_length_mask: BaseMask | None = None,
        memory_mask: BaseMask | None = None,
        memory_length_mask: BaseMask | None = None,
    ) -> Tensor:  # (N, L, d_model)
        """The layer; without masks everything is real and seen, later tokens too."""
        x_mask, x_length_mask = _self_masks(x, x_mask, x_length_mask)
        memory_mask, memory_length_mask = _cross_masks(x, memory, memory_mask, memory_length_mask)
        new = self.self_attention(
            x, x, x, attn_mask=x_mask, query_lengths=x_length_mask, key_lengths=x_length_mask
        )
        x = self.norm1(x + self.dropout(new))
        new = self.cross_attention(
            x, memory, memory, attn_mask=memory_mask, query_lengths=x_length_mask,
            key_lengths=memory_length_mask,
        )  # fmt: skip
        output: Tensor = self.norm3(self._transformed(self.norm2(x + self.dropout(new))))
        return output


class TransformerDecoder(Stack):
    """Decoder layers. Arguments: see the base."""

    def forward(
        self,
        x: Tensor,  # (N, L, d_model)
        memory: Tensor,  # (N, S, d_model)
        x_mask: BaseMask | None = None,
        x_length_mask: BaseMask | None = None,
        memory_mask: BaseMask | None = None,
        memory_length_mask: BaseMask | None = None,
    ) -> Tensor:  # (N, L, d_model)
        """All layers, with the same memory and masks."""
        x_mask, x_length_mask = _self_masks(x, x_mask, x_length_mask)
        memory_mask, memory_length_mask = _cross_masks(x, memory, memory_mask, memory_length_mask)
        for layer in self.layers:
            x = layer(
                x, memory, x_mask=x_mask, x_length_mask=x_length_mask, memory_mask=memory_mask,
                memory_length_mask=memory_length_mask,
            )  # fmt: skip
            self._tell(x)
        return self._normed(x)


def _self_masks(x: Tensor, mask: BaseMask | None, lengths: BaseMask | None) -> tuple[BaseMask, BaseMask]:
    length = x.shape[1]
    mask = FullMask(length, device=x.device) if mask is None else mask
    return mask, all_real(x, length) if lengths is None else lengths


def _cross_masks(
    x: Tensor, memory: Tensor, mask: BaseMask | None, lengths: BaseMask | None
) -> tuple[BaseMask, BaseMask]:
    count = memory.shape[1]
    mask = FullMask(x.shape[1], count, device=x.device) if mask is None else mask
    return mask, all_real(x, count) if lengths is None else lengths
