"""What all linear attention here shares: feature map, mode, epsilon, and when the map is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .... import feature_maps as maps
from ..._mode import check_mode
from ..attention_registry import Callable as CallableSpec
from ..attention_registry import EventDispatcherInstance, Int, Optional
from ..attention_registry.spec import LEGACY
from ..events import EventDispatcher
from ..feature_maps import RandomFourierFeatures, elu_feature_map
from ..feature_maps._operator import draws_itself, posed
from ..masking import BaseMask

PARAMETERS = [
    ("query_dimensions", Int),
    ("feature_map", Optional(CallableSpec)),
    ("event_dispatcher", Optional(EventDispatcherInstance, "")),
    ("legacy", LEGACY),
]
ORIGINAL_EPS = 1e-6


class Posed(NamedTuple):
    """A call of the operator: queries and keys in the layout of the input, its map, and its options."""

    queries: Tensor
    keys: Tensor
    map: maps.FeatureMap
    options: dict[str, Any]


class LinearBase(nn.Module):
    """Base of linear attention.

    Args:
        query_dimensions: size of queries and keys.
        feature_map: makes a map for that size; default elu(x) + 1.
        eps: added to the denominator. ``None``: 1e-6 with ``legacy="exact"``, and nothing otherwise.
        event_dispatcher: name or object; linear attention has nothing to tell.
        legacy: see :mod:`reassoc.compat`.
    """

    def __init__(
        self,
        query_dimensions: int,
        feature_map: Callable[[int], Any] | None = None,
        eps: float | None = None,
        event_dispatcher: str | EventDispatcher = "",
        legacy: str | None = None,
    ) -> None:
        super().__init__()
        self.legacy = check_mode("fast_transformers", legacy)
        self.feature_map = (feature_map or elu_feature_map)(query_dimensions)
        if legacy is not None and isinstance(self.feature_map, RandomFourierFeatures):
            self.feature_map.legacy = legacy
        if eps is None:
            eps = 0.0 if legacy is None else ORIGINAL_EPS
        self.eps = eps
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)
        self._begun = False

    def _begin(self, device: torch.device) -> None:
        """A new batch, or sequence: time to draw, perhaps.

        A user's map is called in training, and in evaluation once, if its buffers hold nothing yet.
        """
        phi = self.feature_map
        if self.legacy is not None or self.training or draws_itself(phi):
            phi.new_feature_map(device)
        elif not self._begun:
            buffers = phi.buffers() if isinstance(phi, nn.Module) else ()
            if not any(bool(buffer.any()) for buffer in buffers):
                phi.new_feature_map(device)
        self._begun = True

    def _posed(self, queries: Tensor, keys: Tensor) -> Posed:
        options = {"eps": self.eps, "undefined": "zero" if self.legacy is None else "nan"}
        return Posed(*posed(self.feature_map, queries, keys, self.legacy), options)


def visible(lengths: BaseMask, batch: int, keys: int) -> Tensor | None:
    """Bool ``(N, S)`` of real keys, or ``None``: all are.

    Raises:
        ValueError: a mask of another size.
    """
    if lengths.shape[-1] != keys or lengths.shape[0] not in (1, batch):
        raise ValueError(
            f"key_lengths must have shape {(batch, keys)}, got {tuple(lengths.shape)}; give LengthMask its "
            "max_len where no sequence is that long"
        )
    return None if lengths.all_ones else lengths.bool_matrix.expand(batch, keys)
