"""Attention to all keys where no gradient is wanted: keys are summed up, then read, a few at a time.

What is made of a piece (keys, values, features) stays in the cache, and nothing grows with the length.
"""

from __future__ import annotations

from torch import Tensor

from ... import AttentionState, linear_attention
from ...feature_maps import FeatureMap
from .._operator import hide_values

SHORT = 512  # tokens: not worth pieces
_TOKENS = 2048  # of a piece, all sequences together


def spans(batch: int, length: int) -> list[slice]:
    """The pieces of ``length`` positions; short sequences stay whole."""
    size = max(SHORT, _TOKENS // max(1, batch))
    return [slice(start, min(start + size, length)) for start in range(0, max(1, length), size)]


class OperatorMemory:
    """Keys summed up by the operator.

    Args:
        phi: the feature map. undefined: see :func:`reassoc.linear_attention`.
        hides_keys: whether a mask hides keys, or values only.
    """

    def __init__(self, phi: FeatureMap, undefined: str, hides_keys: bool) -> None:
        self._phi, self._undefined, self._hides_keys = phi, undefined, hides_keys
        self._state: AttentionState | None = None

    def add(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> None:
        """Keys ``(B, H, M, d)``, values ``(B, H, M, e)``, mask ``(B, M)``."""
        if not self._hides_keys:
            value, key_mask = hide_values(value, key_mask), None
        self._none = key[:, :, :0], value[:, :, :0]
        _, self._state = linear_attention(
            self._none[0], key, value, self._phi, key_mask=key_mask, state=self._state, return_state=True
        )

    def read(self, query: Tensor) -> Tensor:
        """``(B, H, N, d) -> (B, H, N, e)``."""
        return linear_attention(
            query, *self._none, self._phi, undefined=self._undefined, state=self._state, return_state=False
        )
