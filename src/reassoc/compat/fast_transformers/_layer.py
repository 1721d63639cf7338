"""What the layers and the stacks of transformers share, batch and recurrent alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from .events import EventDispatcher, IntermediateOutput
from .masking import LengthMask


class TransformerLayer(nn.Module):
    """Attention, one or two kinds, then a network of two linear layers; a norm after each sum.

    Args:
        attentions: by the names that they have in the module. Registered first: optimizers count parameters.
        d_model: size of inputs and outputs. d_ff: size within; default ``4 * d_model``.
        dropout: rate. activation: ``"relu"``, or anything else for GELU.
        event_dispatcher: name or object.
    """

    norm3: nn.LayerNorm

    def __init__(
        self,
        attentions: dict[str, nn.Module],
        d_model: int,
        d_ff: int | None,
        dropout: float,
        activation: str,
        event_dispatcher: str | EventDispatcher,
    ) -> None:
        super().__init__()
        d_ff = d_ff or 4 * d_model
        for name, attention in attentions.items():
            self.add_module(name, attention)
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        if len(attentions) == 2:
            self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = functional.relu if activation == "relu" else functional.gelu
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def _transformed(self, x: Tensor) -> Tensor:
        """``x`` and what the two linear layers make of it."""
        y = self.dropout(self.activation(self.linear1(x)))
        result: Tensor = x + self.dropout(self.linear2(y))
        return result


class Stack(nn.Module):
    """Layers one after the other, and perhaps a norm.

    Args:
        layers: layers with one interface.
        norm_layer: applied to the last output, or ``None``.
        event_dispatcher: name or object.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        norm_layer: nn.Module | None = None,
        event_dispatcher: str | EventDispatcher = "",
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm_layer
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def _tell(self, x: Tensor) -> None:
        """Tell whoever listens what a layer gave."""
        self.event_dispatcher.dispatch(IntermediateOutput(self, x))

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


def all_real(x: Tensor, length: int) -> LengthMask:
    """The length mask of a batch without padding."""
    return LengthMask(x.new_full((x.shape[0],), length, dtype=torch.int64), length)
