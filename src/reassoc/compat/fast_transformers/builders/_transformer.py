"""What builders of all transformers share: parameters by name, and layers from them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..._mode import MODES
from ..events import EventDispatcher
from .attention_builders import BaseAttentionBuilder
from .base import BaseBuilder

ACTIVATIONS = ("relu", "gelu")


class BaseTransformerBuilder(BaseBuilder):
    """What all transformers have; a parameter of an attention may be set here as well.

    Attributes:
        n_layers, n_heads: numbers of layers, and of heads in each.
        query_dimensions, value_dimensions: sizes of a head's queries and keys, and of its values; the model
            has size ``n_heads * value_dimensions``.
        feed_forward_dimensions: size within the linear layers.
        dropout: rate. activation: ``"relu"`` or ``"gelu"``. final_normalization: a norm after the last layer.
        event_dispatcher: name or object. legacy: see :mod:`reassoc.compat`.
    """

    n_layers: int = 4
    n_heads: int = 4
    query_dimensions: int = 64
    value_dimensions: int = 64
    feed_forward_dimensions: int = 1024
    dropout: float = 0.1
    event_dispatcher: str | EventDispatcher = ""

    def __init__(self) -> None:
        self._activation = "relu"
        self._final_norm = True
        self._legacy: str | None = None

    @property
    def activation(self) -> str:
        """``"relu"`` or ``"gelu"``."""
        return self._activation

    @activation.setter
    def activation(self, value: str) -> None:
        if value not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {value!r}")
        self._activation = value

    @property
    def final_normalization(self) -> bool:
        """Whether a norm follows the last layer."""
        return self._final_norm

    @final_normalization.setter
    def final_normalization(self, value: Any) -> None:
        self._final_norm = bool(value)

    @property
    def legacy(self) -> str | None:
        """``None`` or ``"exact"``; handed to attentions that have such a parameter."""
        return self._legacy

    @legacy.setter
    def legacy(self, value: str | None) -> None:
        if value not in MODES:
            raise ValueError(f"legacy must be one of {MODES}, got {value!r}")
        self._legacy = value

    def _attention_builders(self) -> list[BaseAttentionBuilder]:
        """Those that parameters of attentions are handed to."""
        return []

    def __setattr__(self, key: str, value: Any) -> None:
        if key.startswith("_"):
            super().__setattr__(key, value)
            return
        own = hasattr(self, key)
        if own:
            super().__setattr__(key, value)
        try:  # a name may be a parameter here and there
            for builder in self._attention_builders():
                setattr(builder, key, value)
        except (AttributeError, ValueError):
            if not own:
                raise

    def _layer_options(self) -> dict[str, Any]:
        return {
            "d_keys": self.query_dimensions,
            "d_values": self.value_dimensions,
            "event_dispatcher": self.event_dispatcher,
        }

    def _build(self, stack: Any, layer: Any, attentions: list[tuple[Any, BaseAttentionBuilder, str]]) -> Any:
        """``stack`` of ``layer`` around attentions: class of the projections, builder and type of each."""
        size = self.value_dimensions * self.n_heads
        for _, builder, _ in attentions:
            builder.event_dispatcher = self.event_dispatcher
        layers = [
            layer(
                *(
                    projections(builder.get(kind), size, self.n_heads, **self._layer_options())
                    for projections, builder, kind in attentions
                ),
                size,
                self.feed_forward_dimensions,
                self.dropout,
                self.activation,
                event_dispatcher=self.event_dispatcher,
            )
            for _ in range(self.n_layers)
        ]
        norm = nn.LayerNorm(size) if self.final_normalization else None
        return stack(layers, norm, event_dispatcher=self.event_dispatcher)

    def get(self) -> Any:
        """The model."""
        raise NotImplementedError(f"{type(self).__name__} must define get()")
