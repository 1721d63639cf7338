"""Recurrent softmax self-attention: the state is all keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from ....attention._softmax import PARAMETERS, SoftmaxBase
from ....attention_registry import RecurrentAttentionRegistry
from ..._utils import check_state


class RecurrentFullAttention(SoftmaxBase):
    """One step of :class:`FullAttention`. Arguments: see the base; the modes agree."""

    def forward(
        self,
        query: Tensor,  # (N, H, E)
        key: Tensor,  # (N, H, E)
        value: Tensor,  # (N, H, D)
        state: list[Tensor] | None = None,
        memory: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Output ``(N, H, D)``, and ``[keys (N, H, S, E), values (N, H, S, D)]``, this token's included."""
        state = check_state(state, memory)
        keys, values = key[:, :, None], value[:, :, None]
        if state is not None:
            keys, values = torch.cat([state[0], keys], 2), torch.cat([state[1], values], 2)
        scores = torch.einsum("nhe,nhse->nhs", query * self._scale(query.shape[-1]), keys)
        output = torch.einsum("nhs,nhsd->nhd", self._weights(scores, None, -1), values)
        return output.contiguous(), [keys, values]


RecurrentAttentionRegistry.register("full", RecurrentFullAttention, PARAMETERS)
