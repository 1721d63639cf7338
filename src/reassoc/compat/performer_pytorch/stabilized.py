"""The original's softmax attention to all keys, on the operator: no feature goes through memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._core import Tokens, unnormalized
from ..._prepare import settings
from ..._state import AttentionState
from .._operator import hide_values
from .kernels import FEATURE_EPS
from .maps import Projections

_LEAST = -80.0  # exp of it is nothing beside the epsilon; further down numbers are slow to compute with


class StabilizedMemory:
    """Keys summed up as ``linear_attention`` sums the original's ``softmax_kernel``.

    With e = exp(u - |x|^2/2 - max u) and phi = e + eps, ``sum_j phi_j v_j`` is a sum with e and the epsilon
    times the sum of values. The operator sums exp(u), for values times exp(-|x|^2/2), at a scale that is the
    maximum over the keys of each feature's u; and a read comes with the maximum of the query's. As in the
    original no gradient passes through a maximum, but does with ``older``; keys are then given at once.

    Args:
        matrix: ``(m, d)``, in the dtype of the sums.
        older: one maximum over all heads and sequences, as in ``older_softmax_kernel``.
    """

    def __init__(self, matrix: Tensor, older: bool) -> None:
        self._phi, self._older, self._dtype = Projections(matrix), older, matrix.dtype
        self._state: AttentionState | None = None
        self._values: Tensor | None = None
        self._count = 0
        self._top: Tensor | None = None
        self._sums: Tensor | None = None

    def add(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> None:
        """Keys ``(B, H, M, d)``, values ``(B, H, M, e)``, mask ``(B, M)`` of the values."""
        k, v = key.to(self._dtype), hide_values(value, key_mask).to(self._dtype)
        self._values = v.sum(2) if self._values is None else self._values + v.sum(2)
        self._count += v.shape[2]
        factor = _common_factor(k)
        tokens = Tokens(k[:, :, :0], k, torch.cat([v * factor, factor], dim=-1))
        s = settings(self._phi, k.shape[-1], normalize="none", like=k)
        _, _, state = unnormalized(tokens, s, self._state, True, causal=False)
        assert state is not None and state.log_scale is not None
        self._state, scale = state, state.log_scale
        if self._older and k.requires_grad:
            place = scale.argmax().view(1)  # of (B H) heads of m features
            row = self._phi.rows.index_select(0, place % scale.shape[-1])
            self._top = (k.flatten(0, 1).index_select(0, place // scale.shape[-1])[0] @ row[0]).amax()

    def _summed(self) -> Tensor:
        """``sum_j phi_j v_j`` and, last, ``sum_j phi_j``: ``(B, H, m, e + 1)``, times the root of m."""
        state = self._state
        assert state is not None and state.log_scale is not None and self._values is not None
        top = self._top
        if top is None:
            top = state.log_scale.amax() if self._older else state.log_scale.amax(-1, keepdim=True)
        rest = FEATURE_EPS * pad(self._values, (0, 1), value=self._count)
        return torch.addcmul(rest[:, :, None], state.S, (state.log_scale - top).exp()[..., None])

    def read(self, query: Tensor) -> Tensor:
        """``(B, H, N, d) -> (B, H, N, e)``."""
        sums = self._sums = self._summed() if self._sums is None else self._sums
        q = query.to(self._dtype)
        s = settings(self._phi, q.shape[-1], like=q)
        # At one scale for all features the operator's maximum is that of u.
        scale = torch.zeros_like(sums[..., 0])
        length = torch.full_like(sums[:, 0, 0, 0], self._count, dtype=torch.int64)
        state = AttentionState(sums, scale, length, s.origin)
        found, _, _ = unnormalized(Tokens(q, q[:, :, :0], sums[:, :, :0, :-1]), s, state, False, causal=False)
        factor = _common_factor(q)
        if self._older and q.requires_grad:
            top = self._phi.largest(q)
            factor = factor * (top.detach() - top).exp()
        found = torch.addcmul(FEATURE_EPS * sums.sum(2, keepdim=True), found, factor)
        return (found[..., :-1] / found[..., -1:]).to(query.dtype)


def _common_factor(x: Tensor) -> Tensor:
    """``exp(-|x|^2/2)``, ``(..., 1)``, with x the input times ``d^-1/4``."""
    half = x.square().sum(-1, keepdim=True) * (x.shape[-1] ** -0.5 / 2)
    factor: Tensor = (-half).clamp(min=_LEAST).exp()
    return factor
