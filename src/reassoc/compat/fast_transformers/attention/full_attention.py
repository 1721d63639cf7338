"""Softmax attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..attention_registry import AttentionRegistry
from ..masking import BaseMask
from ._linear import visible
from ._softmax import PARAMETERS, SoftmaxBase


class FullAttention(SoftmaxBase):
    """Softmax attention with any mask. Arguments: see the base."""

    def forward(
        self,
        queries: Tensor,  # (N, L, H, E)
        keys: Tensor,  # (N, S, H, E)
        values: Tensor,  # (N, S, H, D)
        attn_mask: BaseMask,
        query_lengths: BaseMask,
        key_lengths: BaseMask,
    ) -> Tensor:  # (N, L, H, D)
        """Attention."""
        scale = self._scale(queries.shape[-1])
        real = visible(key_lengths, *keys.shape[:2])
        kept = None if attn_mask.all_ones else attn_mask.bool_matrix
        if real is not None:
            real = real[:, None, None]
            kept = real if kept is None else real & kept
        if self.legacy is None and self.event_dispatcher._silent:
            q, k, v = (t.transpose(1, 2) for t in (queries, keys, values))
            rate = self.dropout.p if self.training else 0.0
            output = scaled_dot_product_attention(q, k, v, attn_mask=kept, dropout_p=rate, scale=scale)
            return output.transpose(1, 2).contiguous()
        scores = torch.einsum("nlhe,nshe->nhls", queries * scale, keys)
        weights = self._weights(scores, None if kept is None else ~kept, -1)
        return torch.einsum("nhls,nshd->nlhd", weights, values).contiguous()


AttentionRegistry.register("full", FullAttention, PARAMETERS)
