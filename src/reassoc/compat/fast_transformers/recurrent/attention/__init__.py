"""Attention one token at a time: to the tokens before, and to a memory that stays."""

from .cross_attention import (
    RecurrentCrossAttentionLayer,
    RecurrentCrossFullAttention,
    RecurrentCrossLinearAttention,
)
from .self_attention import RecurrentAttentionLayer, RecurrentFullAttention, RecurrentLinearAttention

__all__ = [
    "RecurrentAttentionLayer",
    "RecurrentCrossAttentionLayer",
    "RecurrentCrossFullAttention",
    "RecurrentCrossLinearAttention",
    "RecurrentFullAttention",
    "RecurrentLinearAttention",
]
