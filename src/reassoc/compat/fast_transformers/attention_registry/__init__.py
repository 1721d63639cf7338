"""Attention by name: what the builders can build, and which parameters each takes."""

from .registry import AttentionRegistry, RecurrentAttentionRegistry, RecurrentCrossAttentionRegistry, Registry
from .spec import Bool, Callable, Choice, EventDispatcherInstance, Float, Int, Optional, Spec

__all__ = [
    "AttentionRegistry",
    "Bool",
    "Callable",
    "Choice",
    "EventDispatcherInstance",
    "Float",
    "Int",
    "Optional",
    "RecurrentAttentionRegistry",
    "RecurrentCrossAttentionRegistry",
    "Registry",
    "Spec",
]
