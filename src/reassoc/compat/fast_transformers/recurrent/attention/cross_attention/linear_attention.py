"""Recurrent linear cross-attention: a memory becomes a state once, each step reads it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...... import linear_attention, read
from ....attention._linear import PARAMETERS, LinearBase, visible
from ....attention_registry import RecurrentCrossAttentionRegistry
from ....masking import BaseMask
from ..._utils import LinearState, whole_state


class RecurrentCrossLinearAttention(LinearBase):
    """One query of :class:`LinearAttention` to a memory. Arguments: see the base."""

    def forward(
        self,
        query: Tensor,  # (N, H, E)
        keys: Tensor | None,  # (N, S, H, E); not looked at with a state
        values: Tensor | None,  # (N, S, H, D); not looked at with a state
        key_lengths: BaseMask,
        state: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Output ``(N, H, D)``, and ``[S (N, H, D, C), Z (N, H, C)]``: see :class:`LinearState`."""
        if state is not None:
            q, _, phi, options = self._posed(query, query[:0])
            output = read(q[:, :, None], phi, whole_state(state, phi, transposed=True), **options)
            return output[:, :, 0], state
        assert keys is not None and values is not None
        self._begin(query.device)
        q, k, phi, options = self._posed(query, keys)
        output, whole = linear_attention(
            q[:, :, None], k.transpose(1, 2), values.transpose(1, 2), phi,
            key_mask=visible(key_lengths, *keys.shape[:2]), return_state=True, **options,
        )  # fmt: skip
        return output[:, :, 0], LinearState(whole, transposed=True)


RecurrentCrossAttentionRegistry.register("linear", RecurrentCrossLinearAttention, PARAMETERS)
