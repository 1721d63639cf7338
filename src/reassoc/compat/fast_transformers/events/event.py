"""Events: who sent it, and what there is to see."""

from __future__ import annotations

from torch import Tensor, nn


class Event:
    """Something that happened in the module ``source``."""

    def __init__(self, source: nn.Module) -> None:
        self.source = source


class AttentionEvent(Event):
    """Weights of softmax attention, ``(N, H, L, S)``; of a recurrent step ``(N, H, S)`` or ``(N, S, H)``."""

    def __init__(self, source: nn.Module, attention_matrix: Tensor) -> None:
        super().__init__(source)
        self.attention_matrix = attention_matrix


class QKVEvent(Event):
    """Queries ``(N, L, H, E)``, keys ``(N, S, H, E)`` and values ``(N, S, H, D)`` that enter attention."""

    def __init__(self, source: nn.Module, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        super().__init__(source)
        self.queries, self.keys, self.values = queries, keys, values


class IntermediateOutput(Event):
    """What comes out of each layer of a stack, ``(N, L, d_model)``, or ``(N, d_model)`` in a recurrent one.

    Not in release 0.4.0 but in the repository after it, which many installed from.
    """

    def __init__(self, source: nn.Module, x: Tensor) -> None:
        super().__init__(source)
        self.x = x
