"""Models from parameters by name; see :mod:`.transformer_builders` for what may be set."""

from .. import attention as _attention  # noqa: F401  makes itself known to the builders
from ..recurrent import attention as _recurrent  # noqa: F401  likewise
from .attention_builders import AttentionBuilder, RecurrentAttentionBuilder, RecurrentCrossAttentionBuilder
from .transformer_builders import (
    RecurrentDecoderBuilder,
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)

__all__ = [
    "AttentionBuilder",
    "RecurrentAttentionBuilder",
    "RecurrentCrossAttentionBuilder",
    "RecurrentDecoderBuilder",
    "RecurrentEncoderBuilder",
    "TransformerDecoderBuilder",
    "TransformerEncoderBuilder",
]
