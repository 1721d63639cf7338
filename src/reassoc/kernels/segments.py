"""Walking a sequence in segments of many chunks, which is what keeps memory linear in its length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SEGMENT = 1024  # positions: long enough to amortize Python, short enough to stay in cache


def walk(function: Callable[..., Any], alone: bool, *inputs: Any) -> Any:
    """Call ``function``; where gradients are wanted and it is one of many, keep only its inputs."""
    if alone or not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def pieces(x: Tensor | None, size: int, axis: int) -> Iterator[Tensor | None]:
    """Consecutive pieces of up to ``size`` positions; ``None`` for ever.

    They come from one split: slices would each send back a gradient as long as the sequence.
    """
    return itertools.repeat(None) if x is None else iter(x.split(size, dim=axis))
