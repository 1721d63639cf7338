"""The layer around an attention: projections into heads and out of them."""

from __future__ import annotations

from torch import Tensor

from ..events import QKVEvent
from ..masking import BaseMask
from ._projections import ProjectionLayer


class AttentionLayer(ProjectionLayer):
    """Projects, tells a :class:`QKVEvent`, attends, projects back. Arguments: see the base."""

    def forward(
        self,
        queries: Tensor,  # (N, L, d_model)
        keys: Tensor,  # (N, S, d_model)
        values: Tensor,  # (N, S, d_model)
        attn_mask: BaseMask,
        query_lengths: BaseMask,
        key_lengths: BaseMask,
    ) -> Tensor:  # (N, L, d_model)
        """Attention with the masks passed on."""
        shape = (self.n_heads, -1)
        q = self._placed(self.query_projection(queries).unflatten(-1, shape))
        k = self._placed(self.key_projection(keys).unflatten(-1, shape))
        v = self.value_projection(values).unflatten(-1, shape)
        self.event_dispatcher.dispatch(QKVEvent(self, q, k, v))
        new = self.inner_attention(q, k, v, attn_mask, query_lengths, key_lengths)
        output: Tensor = self.out_projection(new.reshape(*queries.shape[:2], -1))
        return output

    def _placed(self, x: Tensor) -> Tensor:
        """Queries ``(N, L, H, E)`` or keys with their positions, where a derived layer has any."""
        return x
