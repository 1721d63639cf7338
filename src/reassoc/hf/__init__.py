"""Kernel attention in pretrained transformers models: convert, calibrate, distill, generate."""

from ._layer import KernelLayer
from .cache import KernelCacheLayer, cache_bytes
from .convert import convert, kernel_layers

__all__ = ["KernelCacheLayer", "KernelLayer", "cache_bytes", "convert", "kernel_layers"]
