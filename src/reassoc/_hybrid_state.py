"""The state of hybrid attention: a kernel state for what is far, keys and values for what is near."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._state import AttentionState, check_order


@dataclass(frozen=True)
class HybridOrigin:
    """Which exact part a hybrid state was made with; the kernel's part is in its memory's own origin."""

    window: int
    sinks: int
    span: int | None
    scale: float

    def require(self, other: HybridOrigin) -> None:
        """Raise ``ValueError`` naming the first difference."""
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            if mine != theirs:
                raise ValueError(
                    f"state: the state was made with {name}={mine!r}, this call has {theirs!r}; use the "
                    "same settings throughout, or start from a new state"
                )


@dataclass(eq=False)
class HybridState:
    """Everything that later queries need: its size depends on ``window`` and ``sinks``, not on the length.

    Made by :func:`reassoc.hybrid_attention` with ``return_state=True``. Only :func:`reassoc.hybrid_step`
    changes one; everything else returns a new state, so a kept state is a snapshot.

    Attributes:
        memory: the kernel's state over the keys that have left the window; ``None`` without a map.
        key, value: ``(B, G, window, d or e)``, the last positions. mask: bool ``(B, window)``, which of
            them are keys of the window: real, and not among the first.
        first_key, first_value: ``(B, G, sinks, d or e)``. first_mask: bool ``(B, sinks)``, which are filled.
        length: int64 ``(B,)``: real keys seen.
    """

    memory: AttentionState | None
    key: Tensor
    value: Tensor
    mask: Tensor
    first_key: Tensor
    first_value: Tensor
    first_mask: Tensor
    length: Tensor
    origin: HybridOrigin

    def _tensors(self) -> dict[str, Tensor]:
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}

    def _map(self, function: Callable[[Tensor], Tensor], memory: AttentionState | None) -> HybridState:
        moved = {name: function(part) for name, part in self._tensors().items()}
        return replace(self, memory=memory, **moved)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Bytes held: does not grow with the number of tokens seen."""
        far = 0 if self.memory is None else self.memory.nbytes
        return far + sum(t.numel() * t.element_size() for t in self._tensors().values())

    def __repr__(self) -> str:
        return f"HybridState(length={self.length.tolist()}, origin={self.origin}, memory={self.memory})"

    def clone(self) -> HybridState:
        """A copy that later steps on either do not touch."""
        return self._map(torch.clone, self.memory and self.memory.clone())

    __copy__ = clone

    def detach(self) -> HybridState:
        """The same numbers, cut off from the gradient."""
        return self._map(Tensor.detach, self.memory and self.memory.detach())

    def to(self, device: torch.device | str) -> HybridState:
        """Move to a device."""
        return self._map(lambda t: t.to(device), self.memory and self.memory.to(device))

    def reorder(self, index: Tensor) -> HybridState:
        """Pick sequences, ``index`` int32 or int64 ``(B',)``: beam search, or dropping finished sequences."""
        check_order(index)
        memory = self.memory and self.memory.reorder(index)
        return self._map(lambda t: t.index_select(0, index.to(t.device)), memory)


def check_hybrid_state(state: Any, origin: HybridOrigin, key: Tensor, value: Tensor) -> None:
    """The state belongs to this call."""
    if not isinstance(state, HybridState):
        raise TypeError(
            f"state must be a HybridState, got {type(state).__name__}; start with return_state=True"
        )
    state.origin.require(origin)
    for name, mine, new in (("keys", state.key, key), ("values", state.value, value)):
        expected = (*new.shape[:2], origin.window, new.shape[3])
        if tuple(mine.shape) != expected or mine.dtype != new.dtype or mine.device != new.device:
            raise ValueError(
                f"state holds {name} {tuple(mine.shape)} {mine.dtype} on {mine.device}; this call needs "
                f"{expected} {new.dtype} on {new.device}"
            )
