"""Linear attention in which every query sees every real key."""

from __future__ import annotations

from torch import Tensor

from .... import linear_attention
from ..attention_registry import AttentionRegistry
from ..masking import BaseMask
from ._linear import PARAMETERS, LinearBase, visible


class LinearAttention(LinearBase):
    """``sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j)`` over real keys. Arguments: see the base."""

    def forward(
        self,
        queries: Tensor,  # (N, L, H, E)
        keys: Tensor,  # (N, S, H, E)
        values: Tensor,  # (N, S, H, D)
        attn_mask: BaseMask,
        query_lengths: BaseMask,
        key_lengths: BaseMask,
    ) -> Tensor:  # (N, L, H, D)
        """Attention.

        Raises:
            RuntimeError: ``attn_mask`` hides something.
        """
        self._begin(queries.device)
        if not attn_mask.all_ones:
            raise RuntimeError(
                "LinearAttention takes no attn_mask that hides something: one sum over keys serves all "
                "queries. Use key_lengths for padding, CausalLinearAttention for a triangular mask"
            )
        q, k, phi, options = self._posed(queries, keys)
        output: Tensor = linear_attention(
            q.transpose(1, 2), k.transpose(1, 2), values.transpose(1, 2), phi,
            key_mask=visible(key_lengths, *keys.shape[:2]), **options,
        )  # fmt: skip
        return output.transpose(1, 2).contiguous()


AttentionRegistry.register("linear", LinearAttention, PARAMETERS)
