"""States of recurrent modules: what is handed out, and what is taken back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .... import AttentionState
from .... import feature_maps as maps


def check_state(state: Any = None, memory: Any = None) -> Any:
    """The state, under its present or its earlier name."""
    if memory is not None:
        warnings.warn(
            "memory= is the earlier name of state=, and deprecated: use state=",
            DeprecationWarning,
            stacklevel=3,
        )
    return memory if state is None else state


class LinearState(list[Tensor]):
    """``[S, Z]``: sums of keys times values and of keys; with logarithmic features ``[S, Z, log_scale]``.

    Where there is a ``log_scale (N, H, C)``, the true sums are ``exp(log_scale)`` times these, feature by
    feature. The entries are views of what the next step changes in place when no gradient is needed, as
    in the original. A plain list of such tensors (picked, moved or saved ones) serves as well.

    Attributes:
        whole: the state behind the views.
    """

    def __init__(self, whole: AttentionState, transposed: bool = False) -> None:
        total, z = whole.S, whole.z
        assert z is not None
        scale = [] if whole.log_scale is None else [whole.log_scale]
        super().__init__([total.mT if transposed else total, z, *scale])
        self.whole = whole
        self._given = tuple(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # copies and pickles are of the numbers

    @property
    def untouched(self) -> bool:
        """Whether the entries are still those handed out."""
        return len(self) == len(self._given) and all(a is b for a, b in zip(self, self._given, strict=True))


def whole_state(
    state: Sequence[Tensor], feature_map: maps.FeatureMap, transposed: bool = False
) -> AttentionState:
    """The state of which ``[S, Z]`` or ``[S, Z, log_scale]`` are the parts; ``feature_map`` made it."""
    if isinstance(state, LinearState) and state.untouched:
        return state.whole
    total, z, *scale = state
    memory = torch.cat([total.mT if transposed else total, z[..., None]], dim=-1)
    batch, heads, _, columns = memory.shape
    like = AttentionState.zeros(
        feature_map, batch, heads, columns - 1, dtype=memory.dtype, device=memory.device
    )
    return AttentionState(memory, scale[0] if scale else None, like.length, like.origin)
