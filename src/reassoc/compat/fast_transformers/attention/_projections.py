"""Projections of attention layers, batch and recurrent alike."""

from __future__ import annotations

from torch import nn

from ..events import EventDispatcher


class ProjectionLayer(nn.Module):
    """Projections to heads and back, around any attention.

    Args:
        attention: what the projections enter; see forward of the layer for how it is called.
        d_model: size of inputs and outputs. n_heads: H.
        d_keys: E, size of a head's queries and keys; default ``d_model // n_heads``.
        d_values: D, size of a head's values; default the same.
        event_dispatcher: name or object.
    """

    def __init__(
        self,
        attention: nn.Module,
        d_model: int,
        n_heads: int,
        d_keys: int | None = None,
        d_values: int | None = None,
        event_dispatcher: str | EventDispatcher = "",
    ) -> None:
        super().__init__()
        d_keys, d_values = d_keys or d_model // n_heads, d_values or d_model // n_heads
        self.inner_attention = attention
        self.query_projection = nn.Linear(d_model, d_keys * n_heads)
        self.key_projection = nn.Linear(d_model, d_keys * n_heads)
        self.value_projection = nn.Linear(d_model, d_values * n_heads)
        self.out_projection = nn.Linear(d_values * n_heads, d_model)
        self.n_heads = n_heads
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)
