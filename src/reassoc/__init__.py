"""reassoc: kernel (linear) attention for PyTorch that can be trusted."""

from . import feature_maps, rules
from ._attention import linear_attention
from ._citation import citation
from ._hybrid import hybrid_attention, hybrid_step
from ._hybrid_state import HybridState
from ._state import AttentionState
from ._stream import read, step
from ._summarize import summarize
from ._summary import Summary, compose
from ._weights import attention_matrix
from .kernels import backends

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "HybridState",
    "Summary",
    "attention_matrix",
    "backends",
    "citation",
    "compose",
    "feature_maps",
    "hybrid_attention",
    "hybrid_step",
    "linear_attention",
    "read",
    "rules",
    "step",
    "summarize",
]
