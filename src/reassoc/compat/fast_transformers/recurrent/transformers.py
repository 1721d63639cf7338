"""Encoders and decoders one token at a time; equal to the batch ones under a triangular mask."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._layer import Stack, TransformerLayer, all_real
from ..events import EventDispatcher
from ..masking import BaseMask
from ._utils import check_state


class RecurrentTransformerEncoderLayer(TransformerLayer):
    """One step of :class:`TransformerEncoderLayer`.

    Args:
        attention: called with ``(x, x, x, state)``, returns output and state.
        d_model, d_ff, dropout, activation, event_dispatcher: see the base.
    """

    attention: nn.Module

    def __init__(
        self,
        attention: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str | EventDispatcher = "",
    ) -> None:
        super().__init__({"attention": attention}, d_model, d_ff, dropout, activation, event_dispatcher)

    def forward(self, x: Tensor, state: Any = None, memory: Any = None) -> tuple[Tensor, Any]:
        """``x (N, d_model)`` and the state (``memory`` is its earlier name), to output and next state."""
        new, state = self.attention(x, x, x, check_state(state, memory))
        return self.norm2(self._transformed(self.norm1(x + self.dropout(new)))), state


class RecurrentTransformerEncoder(Stack):
    """Recurrent encoder layers, each with a state of its own. Arguments: see the base."""

    def forward(
        self, x: Tensor, state: list[Any] | None = None, memory: list[Any] | None = None
    ) -> tuple[Tensor, list[Any]]:
        """``x (N, d_model)`` and a list of states, changed in place, to output and that list."""
        state = check_state(state, memory)
        state = [None] * len(self.layers) if state is None else state
        for i, layer in enumerate(self.layers):
            x, state[i] = layer(x, state[i])
            self._tell(x)
        return self._normed(x), state


class RecurrentTransformerDecoderLayer(TransformerLayer):
    """One step of :class:`TransformerDecoderLayer`.

    Args:
        self_attention: called with ``(x, x, x, state=)``.
        cross_attention: called with ``(x, memory, memory, memory_length_mask, state=)``.
        d_model, d_ff, dropout, activation, event_dispatcher: see the base.
    """

    self_attention: nn.Module
    cross_attention: nn.Module

    def __init__(
        self,
        self_attention: nn.Module,
        cross_attention: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str | EventDispatcher = "",
    ) -> None:
        attentions = {"self_attention": self_attention, "cross_attention": cross_attention}
        super().__init__(attentions, d_model, d_ff, dropout, activation, event_dispatcher)

    def forward(
        self,
        x: Tensor,  # (N, d_model)
        memory: Tensor,  # (N, S, d_model)
        memory_length_mask: BaseMask | None = None,
        state: list[Any] | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """Output ``(N, d_model)``, and the states of both attentions."""
        if memory_length_mask is None:
            memory_length_mask = all_real(x, memory.shape[1])
        of_self, of_cross = state or [None, None]
        new, of_self = self.self_attention(x, x, x, state=of_self)
        x = self.norm1(x + self.dropout(new))
        new, of_cross = self.cross_attention(x, memory, memory, memory_length_mask, state=of_cross)
        x = self.norm2(x + self.dropout(new))
        return self.norm3(self._transformed(x)), [of_self, of_cross]


class RecurrentTransformerDecoder(Stack):
    """Recurrent decoder layers, each with states of its own. Arguments: see the base."""

    def forward(
        self,
        x: Tensor,  # (N, d_model)
        memory: Tensor,  # (N, S, d_model)
        memory_length_mask: BaseMask | None = None,
        state: list[Any] | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """Output ``(N, d_model)``, and the list of states, changed in place."""
        state = [None] * len(self.layers) if state is None else state
        for i, layer in enumerate(self.layers):
            x, state[i] = layer(x, memory, memory_length_mask=memory_length_mask, state=state[i])
            self._tell(x)
        return self._normed(x), state
