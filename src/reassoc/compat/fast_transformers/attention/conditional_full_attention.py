"""Softmax attention for short sequences, another for long ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..attention_registry import AttentionRegistry, Int, Optional
from ..events import EventDispatcher
from ..masking import BaseMask
from ._softmax import PARAMETERS
from .full_attention import FullAttention


class ConditionalFullAttention(nn.Module):
    """Full attention up to ``length_limit`` queries and keys, ``other_attention`` beyond.

    Args:
        other_attention: the other; by name ``"conditional-full:linear"``.
        length_limit: the longest for softmax.
        softmax_temp, attention_dropout, event_dispatcher, legacy: as for :class:`FullAttention`.
    """

    def __init__(
        self,
        other_attention: nn.Module,
        length_limit: int = 512,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
        legacy: str | None = None,
    ) -> None:
        super().__init__()
        self.full_attention = FullAttention(softmax_temp, attention_dropout, event_dispatcher, legacy)
        self.other_attention = other_attention
        self.length_limit = length_limit
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def forward(
        self,
        queries: Tensor,  # (N, L, H, E)
        keys: Tensor,  # (N, S, H, E)
        values: Tensor,  # (N, S, H, D)
        attn_mask: BaseMask,
        query_lengths: BaseMask,
        key_lengths: BaseMask,
    ) -> Any:  # (N, L, H, D)
        """Attention of either kind."""
        long = max(queries.shape[1], values.shape[1]) > self.length_limit
        attention = self.other_attention if long else self.full_attention
        return attention(queries, keys, values, attn_mask, query_lengths, key_lengths)


AttentionRegistry.register(
    "conditional-full", ConditionalFullAttention, [("length_limit", Optional(Int, 512)), *PARAMETERS]
)
