"""Projections around recurrent self-attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....attention._projections import ProjectionLayer
from ..._utils import check_state


class RecurrentAttentionLayer(ProjectionLayer):
    """One step of :class:`AttentionLayer`. Arguments: see the base."""

    def forward(
        self,
        query: Tensor,  # (N, d_model)
        key: Tensor,  # (N, d_model)
        value: Tensor,  # (N, d_model)
        state: Any = None,
        memory: Any = None,
    ) -> tuple[Tensor, Any]:
        """Output ``(N, d_model)`` and the next state; ``memory`` is the earlier name of ``state``."""
        shape = (self.n_heads, -1)
        new, state = self.inner_attention(
            self.query_projection(query).unflatten(-1, shape),
            self.key_projection(key).unflatten(-1, shape),
            self.value_projection(value).unflatten(-1, shape),
            check_state(state, memory),
        )
        return self.out_projection(new.flatten(1)), state
