"""Kernel attention in pretrained transformers models: convert, calibrate, distill, generate."""

from ._layer import KernelLayer
from .cache import KernelCacheLayer, cache_bytes
from .calibrate import calibrate
from .convert import convert, kernel_layers
from .distill import Training, transfer, tune
from .observe import softmax_teacher
from .text import blocks, examples, lines, padded

__all__ = [
    "KernelCacheLayer",
    "KernelLayer",
    "Training",
    "blocks",
    "cache_bytes",
    "calibrate",
    "convert",
    "examples",
    "kernel_layers",
    "lines",
    "padded",
    "softmax_teacher",
    "transfer",
    "tune",
]
