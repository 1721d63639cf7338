"""What layers carry from token to token: attention states, caches, and what convolutions still need."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from .._state import AttentionState
from .cache import KeyValueCache
from .rotated import RotatedState


class Memory(Protocol):
    """What one attention remembers: an AttentionState, a pair of them, or a cache of keys and values."""

    @property
    def length(self) -> Tensor:
        """int64 ``(B,)``: real keys seen."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def detach(self) -> Memory:
        """Cut off from the gradient."""

    def clone(self) -> Memory:
        """A copy that steps do not touch."""

    def reorder(self, index: Tensor) -> Memory:
        """Pick sequences."""

    def _pack(self) -> tuple[dict[str, Tensor], str]: ...

    @classmethod
    def _unpack(cls, tensors: Mapping[str, Tensor], origin: str) -> Memory: ...


_MEMORIES: dict[str, type[Memory]] = {
    "linear": AttentionState,
    "rotated": RotatedState,
    "softmax": KeyValueCache,
}


class MixerState:
    """What one attention layer carries on.

    Attributes:
        memory: what attention remembers. recent: ``(B, kernel - 1, channels)``, the inputs that a
            short convolution still needs, or ``None``.
    """

    def __init__(self, memory: Memory, recent: Tensor | None = None) -> None:
        self.memory, self.recent = memory, recent

    def _map(self, memory: Callable[[Memory], Memory], tensor: Callable[[Tensor], Tensor]) -> MixerState:
        return MixerState(memory(self.memory), None if self.recent is None else tensor(self.recent))

    def detach(self) -> MixerState:
        """The same numbers, cut off from the gradient."""
        return self._map(lambda m: m.detach(), Tensor.detach)

    def clone(self) -> MixerState:
        """A copy that steps do not touch."""
        return self._map(lambda m: m.clone(), torch.clone)

    def reorder(self, index: Tensor) -> MixerState:
        """Pick sequences, int64 ``(B',)``."""
        return self._map(lambda m: m.reorder(index), lambda t: t.index_select(0, index.to(t.device)))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        recent = 0 if self.recent is None else self.recent.numel() * self.recent.element_size()
        return self.memory.nbytes + recent


class ModelState:
    """What a language model carries on, one :class:`MixerState` a layer: context without its tokens.

    ``model.step`` and ``model.generate`` advance one in place; everything else returns a new one.
    """

    def __init__(self, layers: list[MixerState]) -> None:
        self.layers = layers

    @property
    def length(self) -> Tensor:
        """int64 ``(B,)``: real tokens seen."""
        return self.layers[0].memory.length

    @property
    def nbytes(self) -> int:
        """Bytes held: with linear attention it does not grow with what was seen."""
        return sum(layer.nbytes for layer in self.layers)

    def detach(self) -> ModelState:
        """The same numbers, cut off from the gradient: carries context between training segments."""
        return ModelState([layer.detach() for layer in self.layers])

    def clone(self) -> ModelState:
        """A copy that later steps do not touch."""
        return ModelState([layer.clone() for layer in self.layers])

    def reorder(self, index: Tensor) -> ModelState:
        """Pick sequences, int64 ``(B',)``: beam search, or dropping finished sequences."""
        return ModelState([layer.reorder(index) for layer in self.layers])

    def tensors(self) -> tuple[dict[str, Tensor], str]:
        """All numbers by name, for a safetensors file, and JSON that says what they are.

        A snapshot: later steps do not touch it. What rounding took from decode steps is left out, as
        :meth:`reassoc.AttentionState.save` does; states of whole segments lose nothing.
        """
        found: dict[str, Tensor] = {}
        about = []
        for number, layer in enumerate(self.layers):
            tensors, origin = layer.memory.detach()._pack()  # the next step then copies before it writes
            found |= {f"{number}.memory.{name}": tensor.contiguous() for name, tensor in tensors.items()}
            if layer.recent is not None:
                found[f"{number}.recent"] = layer.recent.detach().contiguous()
            kind = next(name for name, cls in _MEMORIES.items() if type(layer.memory) is cls)
            about.append({"kind": kind, "origin": origin})
        return found, json.dumps(about)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], about: str) -> ModelState:
        """What :meth:`tensors` gave.

        Raises:
            ValueError: it is not that.
        """
        try:
            layers = []
            for number, layer in enumerate(json.loads(about)):
                prefix = f"{number}.memory."
                own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
                memory = _MEMORIES[layer["kind"]]._unpack(own, layer["origin"])
                layers.append(MixerState(memory, tensors.get(f"{number}.recent")))
            if not layers:
                raise ValueError("no layers")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"these tensors are not a model state: {error!r}") from error
        return cls(layers)
