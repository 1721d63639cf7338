"""Linear attention in which query i sees keys 0..i."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .... import linear_attention
from ..attention_registry import AttentionRegistry
from ..masking import BaseMask
from ._linear import PARAMETERS, LinearBase, visible


class CausalLinearAttention(LinearBase):
    """As :class:`LinearAttention`, over real keys 0..i. Arguments: see the base.

    With another number S of keys than of queries, query i sees keys 0..i as far as there are any: keys from
    L on are left out, or queries from S on see all. Both modes agree in this.
    """

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
            RuntimeError: ``attn_mask`` is not triangular.
        """
        self._begin(queries.device)
        if not attn_mask.lower_triangular:
            raise RuntimeError(
                "CausalLinearAttention takes a triangular attn_mask only: give it "
                "TriangularCausalMask(length), or use LinearAttention"
            )
        q, k, phi, options = self._posed(queries, keys)
        mask = visible(key_lengths, *keys.shape[:2])
        length, count = q.shape[1], k.shape[1]
        if length < count:
            k, values = k[:, :length], values[:, :length]
            mask = None if mask is None else mask[:, :length]
        elif length > count:
            more = length - count
            if mask is None:
                mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
            k, values = (pad(t, (0, 0, 0, 0, 0, more)) for t in (k, values))
            mask = pad(mask, (0, more))
        output: Tensor = linear_attention(
            q.transpose(1, 2), k.transpose(1, 2), values.transpose(1, 2), phi,
            key_mask=mask, causal=True, **options,
        )  # fmt: skip
        return output.transpose(1, 2).contiguous()


AttentionRegistry.register("causal-linear", CausalLinearAttention, PARAMETERS)
