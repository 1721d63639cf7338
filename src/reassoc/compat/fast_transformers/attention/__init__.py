"""Attention, and the layer that projects into it and out of it."""

from typing import Any

from ._elsewhere import CLASSES, refuse
from .attention_layer import AttentionLayer
from .causal_linear_attention import CausalLinearAttention
from .conditional_full_attention import ConditionalFullAttention
from .full_attention import FullAttention
from .linear_attention import LinearAttention

__all__ = [
    "AttentionLayer",
    "CausalLinearAttention",
    "ConditionalFullAttention",
    "FullAttention",
    "LinearAttention",
]


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        raise ImportError(refuse(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
