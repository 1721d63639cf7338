"""Recurrent softmax cross-attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ....attention._linear import visible
from ....attention._softmax import PARAMETERS, SoftmaxBase
from ....attention_registry import RecurrentCrossAttentionRegistry
from ....masking import BaseMask


class RecurrentCrossFullAttention(SoftmaxBase):
    """One query of :class:`FullAttention` to a memory. Arguments: see the base."""

    def forward(
        self,
        query: Tensor,  # (N, H, E)
        keys: Tensor,  # (N, S, H, E); not looked at with a state
        values: Tensor,  # (N, S, H, D); not looked at with a state
        key_lengths: BaseMask,
        state: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Output ``(N, H, D)``, and ``[keys, values]``."""
        if state is not None:
            keys, values = state
        real = visible(key_lengths, *keys.shape[:2])
        scores = torch.einsum("nhe,nshe->nsh", query * self._scale(query.shape[-1]), keys)
        weights = self._weights(scores, None if real is None else ~real[..., None], 1)
        return torch.einsum("nsh,nshd->nhd", weights, values).contiguous(), [keys, values]


RecurrentCrossAttentionRegistry.register("full", RecurrentCrossFullAttention, PARAMETERS)
