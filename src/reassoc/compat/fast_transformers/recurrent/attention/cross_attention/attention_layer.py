"""Projections around recurrent cross-attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....attention._projections import ProjectionLayer
from ....masking import BaseMask


class RecurrentCrossAttentionLayer(ProjectionLayer):
    """Projects the query at every step, keys and values at the first only. Arguments: see the base."""

    def forward(
        self,
        query: Tensor,  # (N, d_model)
        keys: Tensor | None,  # (N, S, d_model); not looked at with a state
        values: Tensor | None,  # (N, S, d_model); not looked at with a state
        key_lengths: BaseMask,
        state: Any = None,
    ) -> tuple[Tensor, Any]:
        """Output ``(N, d_model)`` and the state, which holds what is needed of keys and values."""
        shape = (self.n_heads, -1)
        k = v = None
        if state is None:
            k = self.key_projection(keys).unflatten(-1, shape)
            v = self.value_projection(values).unflatten(-1, shape)
        q = self.query_projection(query).unflatten(-1, shape)
        new, state = self.inner_attention(q, k, v, key_lengths, state=state)
        return self.out_projection(new.flatten(1)), state
