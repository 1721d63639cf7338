"""Attention of one token to itself and the tokens before."""

from .attention_layer import RecurrentAttentionLayer
from .full_attention import RecurrentFullAttention
from .linear_attention import RecurrentLinearAttention

__all__ = ["RecurrentAttentionLayer", "RecurrentFullAttention", "RecurrentLinearAttention"]
