"""Attention of one token to a memory that stays the same from step to step."""

from .attention_layer import RecurrentCrossAttentionLayer
from .full_attention import RecurrentCrossFullAttention
from .linear_attention import RecurrentCrossLinearAttention

__all__ = ["RecurrentCrossAttentionLayer", "RecurrentCrossFullAttention", "RecurrentCrossLinearAttention"]
