"""What all softmax attention here shares."""

from __future__ import annotations

from math import sqrt

from torch import Tensor, nn

from ..._mode import check_mode
from ..attention_registry import EventDispatcherInstance, Float, Optional
from ..attention_registry.spec import LEGACY
from ..events import AttentionEvent, EventDispatcher

PARAMETERS = [
    ("softmax_temp", Optional(Float)),
    ("attention_dropout", Optional(Float, 0.1)),
    ("event_dispatcher", Optional(EventDispatcherInstance, "")),
    ("legacy", LEGACY),
]


class SoftmaxBase(nn.Module):
    """Base of softmax attention.

    Args:
        softmax_temp: factor of the scores; default ``1 / sqrt(E)``.
        attention_dropout: rate at which weights are dropped in training.
        event_dispatcher: name or object; told the weights, which are made only if somebody listens.
        legacy: ``"exact"``: a query that sees no key gives NaN, otherwise zero.
    """

    def __init__(
        self,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
        legacy: str | None = None,
    ) -> None:
        super().__init__()
        self.legacy = check_mode("fast_transformers", legacy)
        self.softmax_temp = softmax_temp
        self.dropout = nn.Dropout(attention_dropout)
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def _scale(self, size: int) -> float:
        return self.softmax_temp or 1 / sqrt(size)

    def _weights(self, scores: Tensor, hidden: Tensor | None, dim: int) -> Tensor:
        """Softmax over ``dim`` of scores of what is not hidden, dropped out, and told to listeners."""
        if hidden is not None:
            scores = scores.masked_fill(hidden, -float("inf"))
        weights: Tensor = scores.softmax(dim)
        if hidden is not None and self.legacy is None:
            weights = weights.masked_fill(hidden, 0.0)
        weights = self.dropout(weights)
        self.event_dispatcher.dispatch(AttentionEvent(self, weights))
        return weights
