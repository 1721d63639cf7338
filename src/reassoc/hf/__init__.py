"""Kernel attention in pretrained transformers models: convert, calibrate, distill, generate."""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("reassoc.hf needs transformers: pip install 'reassoc[hf]'") from error

from ._layer import KernelLayer
from .cache import KernelCacheLayer, cache_bytes
from .calibrate import calibrate
from .convert import convert, kernel_layers
from .evaluate import agreement, embeddings, perplexity, recall
from .observe import softmax_teacher
from .text import blocks, examples, lines, padded
from .training import Training
from .transfer import transfer
from .tune import distill, tune

__all__ = [
    "KernelCacheLayer",
    "KernelLayer",
    "Training",
    "agreement",
    "blocks",
    "cache_bytes",
    "calibrate",
    "convert",
    "distill",
    "embeddings",
    "examples",
    "kernel_layers",
    "lines",
    "padded",
    "perplexity",
    "recall",
    "softmax_teacher",
    "transfer",
    "tune",
]
