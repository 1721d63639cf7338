"""The cache of softmax attention: every key and value seen, so it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class KeyValueCache:
    """All keys and values seen.

    Attributes:
        key: ``(B, G, n, d)``. value: ``(B, G, n, e)``.
        mask: bool ``(B, n)``, True = real, or ``None``: all are.
    """

    def __init__(self, key: Tensor, value: Tensor, mask: Tensor | None = None) -> None:
        self.key, self.value, self.mask = key, value, mask

    @property
    def length(self) -> Tensor:
        """int64 ``(B,)``: real keys seen."""
        if self.mask is not None:
            return self.mask.sum(-1)
        return torch.full((self.key.shape[0],), self.key.shape[2], device=self.key.device)

    @property
    def nbytes(self) -> int:
        """Bytes held: grows with every token."""
        return sum(t.numel() * t.element_size() for t in self._pack()[0].values())

    def append(self, key: Tensor, value: Tensor, mask: Tensor | None) -> KeyValueCache:
        """A cache with more keys and values behind these.

        Raises:
            ValueError: other sizes than those of the keys and values seen.
        """
        for name, old, new in (("keys", self.key, key), ("values", self.value, value)):
            if (*old.shape[:2], old.shape[3]) != (*new.shape[:2], new.shape[3]):
                raise ValueError(
                    f"state holds {name} {tuple(old.shape)}, this call has {tuple(new.shape)}: it was made "
                    "by another model, or for another batch"
                )
        if mask is not None or self.mask is not None:
            old, new = (
                t.new_ones(t.shape[0], t.shape[2], dtype=torch.bool) if m is None else m
                for t, m in ((self.key, self.mask), (key, mask))
            )
            mask = torch.cat([old, new], dim=1)
        keys, values = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        return KeyValueCache(keys, values, mask)

    def _map(self, function: Callable[[Tensor], Tensor]) -> KeyValueCache:
        mask = None if self.mask is None else function(self.mask)
        return KeyValueCache(function(self.key), function(self.value), mask)

    def detach(self) -> KeyValueCache:
        """The same numbers, cut off from the gradient."""
        return self._map(Tensor.detach)

    def clone(self) -> KeyValueCache:
        """A copy."""
        return self._map(torch.clone)

    def reorder(self, index: Tensor) -> KeyValueCache:
        """Pick sequences."""
        return self._map(lambda t: t.index_select(0, index.to(t.device)))

    def _pack(self) -> tuple[dict[str, Tensor], str]:
        parts = {"key": self.key, "value": self.value, "mask": self.mask}
        return {name: part.detach() for name, part in parts.items() if part is not None}, ""

    @classmethod
    def _unpack(cls, tensors: Mapping[str, Tensor], origin: str) -> KeyValueCache:
        return cls(tensors["key"], tensors["value"], tensors.get("mask"))
