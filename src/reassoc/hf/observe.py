"""Watching softmax attention in a converted model: what calibration and transfer learn from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

from ._interface import OBSERVERS
from ._layer import KernelLayer

Observer = Callable[[KernelLayer, Tensor, Tensor, Tensor, "Tensor | None", Tensor], None]


@contextlib.contextmanager
def softmax_teacher(observe: Observer | None = None) -> Iterator[None]:
    """Converted layers answer with softmax attention within the block: the model is its own teacher.

    Args:
        observe: called for every converted layer that runs, with the layer, its query ``(B, H, N, d)``, key
            ``(B, G, N, d)`` and value ``(B, G, N, e)``, the mask of real keys bool ``(B, N)`` or ``None``,
            and softmax's output ``(B, H, N, e)``.
    """
    OBSERVERS.append(observe)
    try:
        yield
    finally:
        OBSERVERS.pop()
