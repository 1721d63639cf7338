"""performer-pytorch 1.1.4's public names, on this library's operator.

Every attention and model class also takes ``legacy``, see :class:`FastAttention`. State dicts have the
original's names, so a checkpoint of either loads in the other. Those of copies made before 1.0.9, scBERT's
among them, load as well and bring the arithmetic of their time (``FastAttention.older``); such a model is
saved with the older names again, which keep it.
"""

from .attention import Attention, CrossAttention, SelfAttention
from .autoregressive_wrapper import AutoregressiveWrapper, repetition_penalty_fn, top_k, top_p
from .fast_attention import FastAttention
from .kernels import (
    causal_linear_attention,
    causal_linear_attention_noncuda,
    gaussian_orthogonal_random_matrix,
    generalized_kernel,
    linear_attention,
    orthogonal_matrix_chunk,
    softmax_kernel,
)
from .language_model import PerformerLM
from .layers import (
    Always,
    Chunk,
    FeedForward,
    PreLayerNorm,
    PreScaleNorm,
    PreShiftTokens,
    ReZero,
    find_modules,
    get_module_device,
    shift,
)
from .performer import Performer
from .performer_enc_dec import PerformerEncDec
from .positions import (
    AbsolutePositionalEmbedding,
    FixedPositionalEmbedding,
    apply_rotary_pos_emb,
    rotate_every_two,
)
from .redraw import ProjectionUpdater
from .reversible import ReversibleSequence, SequentialSequence, route_args

__all__ = [
    "AbsolutePositionalEmbedding",
    "Always",
    "Attention",
    "AutoregressiveWrapper",
    "Chunk",
    "CrossAttention",
    "FastAttention",
    "FeedForward",
    "FixedPositionalEmbedding",
    "Performer",
    "PerformerEncDec",
    "PerformerLM",
    "PreLayerNorm",
    "PreScaleNorm",
    "PreShiftTokens",
    "ProjectionUpdater",
    "ReZero",
    "ReversibleSequence",
    "SelfAttention",
    "SequentialSequence",
    "apply_rotary_pos_emb",
    "causal_linear_attention",
    "causal_linear_attention_noncuda",
    "find_modules",
    "gaussian_orthogonal_random_matrix",
    "generalized_kernel",
    "get_module_device",
    "linear_attention",
    "orthogonal_matrix_chunk",
    "repetition_penalty_fn",
    "rotate_every_two",
    "route_args",
    "shift",
    "softmax_kernel",
    "top_k",
    "top_p",
]
