"""Recurrent linear self-attention: the state does not grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...... import AttentionState, step
from ....attention._linear import PARAMETERS, LinearBase
from ....attention_registry import RecurrentAttentionRegistry
from ..._utils import LinearState, check_state, whole_state


class RecurrentLinearAttention(LinearBase):
    """One step of :class:`CausalLinearAttention`. Arguments: see the base."""

    def forward(
        self,
        query: Tensor,  # (N, H, E)
        key: Tensor,  # (N, H, E)
        value: Tensor,  # (N, H, D)
        state: Sequence[Tensor] | None = None,
        memory: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, LinearState]:
        """Output ``(N, H, D)``, and ``[S (N, H, C, D), Z (N, H, C)]``: see :class:`LinearState`.

        Raises:
            ValueError: a state of another batch size.
        """
        state = check_state(state, memory)
        if state is None:
            self._begin(query.device)
        elif len(state[0]) != query.shape[0]:
            raise ValueError(
                f"state is of a batch of {len(state[0])}, query of {query.shape[0]}: a batch keeps its size "
                "from step to step"
            )
        q, k, phi, options = self._posed(query, key)
        if state is None:
            accumulate = torch.promote_types(q.dtype, torch.float32)
            whole = AttentionState.zeros(phi, *value.shape, dtype=accumulate, device=q.device)
        else:
            whole = whole_state(state, phi)
        output = step(q[:, :, None], k[:, :, None], value[:, :, None], phi, whole, **options)
        return output[:, :, 0], LinearState(whole)


for _name in ("linear", "causal-linear"):
    RecurrentAttentionRegistry.register(_name, RecurrentLinearAttention, PARAMETERS)
