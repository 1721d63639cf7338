"""The original's softmax attention to all keys, its features made a few at a time and kept nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._operator import hide_values
from .kernels import FEATURE_EPS

_FEATURES = 1 << 18  # a megabyte of them at a time, so that they stay in the cache
_LEAST = -80.0  # exp of it is nothing beside the epsilon; further down exp is twenty times as slow


def stabilized_attention(
    query: Tensor,  # (B, H, N, d)
    key: Tensor,  # (B, H, M, d)
    value: Tensor,  # (B, H, M, e)
    matrix: Tensor,  # (m, d), in the dtype of the sums
    older: bool = False,
) -> Tensor:  # (B, H, N, e)
    """``linear_attention`` of ``softmax_kernel`` features, with gradients; ``older`` ones have none."""
    out: Tensor = _Stabilized.apply(query, key, value, matrix, older)  # type: ignore[no-untyped-call]
    return out


class StabilizedMemory:
    """Keys summed up as ``linear_attention`` sums the original's ``softmax_kernel``.

    With e = exp(u - |x|^2/2 - max u) and phi = e + eps, ``sum_j phi_j v_j`` is a sum with e and the epsilon
    times the sum of values: keys are seen once, their maximum growing on the way.

    Args:
        matrix: ``(m, d)``, in the dtype of the sums. batch, heads, columns: B, H and e.
        older: one maximum over all heads and sequences, as in ``older_softmax_kernel``.
    """

    def __init__(self, matrix: Tensor, batch: int, heads: int, columns: int, older: bool) -> None:
        self._older = older
        self.exponentials = Exponentials(matrix)
        self._S = matrix.new_zeros(batch, heads, matrix.shape[0], columns)
        self._z = matrix.new_zeros(batch, heads, matrix.shape[0])
        self._values, self._count = matrix.new_zeros(batch, heads, columns), 0
        self.top = matrix.new_full((batch, heads), -torch.inf)

    def add(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> None:
        """Keys ``(B, H, M, d)``, values ``(B, H, M, e)``, mask ``(B, M)`` of the values."""
        value = hide_values(value, key_mask).to(self._S.dtype)
        self._values += value.sum(2)
        self._count += value.shape[2]
        for i in heads_of(key):
            S, z, top = self._S[i], self._z[i], self.top[i]
            for k, v in self.exponentials.parts(key[i], value[i]):
                u, half = self.exponentials.projected(k)
                highest = torch.maximum(top, u.amax())
                features = u.sub_(half.add_(highest)).clamp_(min=_LEAST).exp_()
                shrink = (top - highest).exp_()
                S.mul_(shrink).addmm_(features.mT, v)
                z.mul_(shrink).add_(features.sum(0))
                top = highest
            self.top[i] = top

    def sums(self) -> tuple[Tensor, Tensor]:
        """``sum_j phi_j v_j`` ``(B, H, m, e)`` and ``sum_j phi_j`` ``(B, H, m)``, times the root of m."""
        S, z = self._S, self._z
        if self._older:
            shrink = (self.top - self.top.max()).exp()[..., None]
            S, z = S * shrink[..., None], z * shrink
        return S + FEATURE_EPS * self._values[:, :, None], z + FEATURE_EPS * self._count

    def read(self, query: Tensor) -> Tensor:
        """``(B, H, N, d) -> (B, H, N, e)``, laid out as ``(B, N, H, e)``."""
        S, z = self.sums()
        floor, floor_z = FEATURE_EPS * S.sum(2), FEATURE_EPS * z.sum(2, keepdim=True)
        batch, heads, length, _ = query.shape
        output = S.new_empty(batch, length, heads, S.shape[-1]).transpose(1, 2)
        for i in heads_of(query):
            for q, into in self.exponentials.parts(query[i], output[i]):
                features = self.exponentials(q)
                sums = torch.addmv(floor_z[i], features, z[i])
                torch.div(torch.addmm(floor[i], features, S[i]), sums[:, None], out=into)
        return output.to(query.dtype)


class Exponentials:
    """``exp(u - |x|^2/2 - max u)`` with ``u = W x`` and x the input times ``d^-1/4``, of one head at a time.

    Args:
        matrix: W ``(m, d)``.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.scale = matrix.shape[1] ** -0.25
        self.matrix = (matrix * self.scale).mT.contiguous()
        self._rows = max(1, _FEATURES // matrix.shape[0])
        self._work = self.matrix.new_empty(self._rows, matrix.shape[0])

    def parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """``(n, ..)`` each, in parts of one size whose features fit."""
        length = tensors[0].shape[0]
        size = -(-length // max(1, -(-length // self._rows)))
        return zip(*(t.split(max(1, size)) for t in tensors), strict=True)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``W x`` ``(n, m)``, until the next call, and ``|x|^2 / 2`` ``(n, 1)``."""
        x = x.to(self.matrix.dtype)
        u = torch.mm(x, self.matrix, out=self._work[: x.shape[0]])
        # Not of squares summed up: that would be one more pass.
        return u, torch.linalg.vector_norm(x, dim=1, keepdim=True).square_().mul_(self.scale**2 / 2)

    def __call__(self, x: Tensor, top: Tensor | None = None) -> Tensor:
        """``(n, d) -> (n, m)``, until the next call; ``top``: a maximum other than each row's own."""
        u, half = self.projected(x)
        return u.sub_(half.add_(u.amax(1, keepdim=True) if top is None else top)).clamp_(min=_LEAST).exp_()

    def backward(self, x: Tensor, d_u: Tensor) -> Tensor:
        """The gradient ``(n, d)`` of the input; none passes through the maximum."""
        return torch.addmm(x * d_u.sum(1, keepdim=True), d_u, self.matrix.mT, beta=-(self.scale**2))


def heads_of(x: Tensor) -> Iterator[tuple[int, int]]:
    """Every sequence and head of ``(B, H, ..)``."""
    return product(range(x.shape[0]), range(x.shape[1]))


class _Stabilized(torch.autograd.Function):
    """Features are made again in the backward pass, which costs less than to write and read them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, matrix: Tensor, older: bool) -> Tensor:
        memory = StabilizedMemory(matrix, value.shape[0], value.shape[1], value.shape[3], older)
        memory.add(key, value, None)
        output = memory.read(query)
        ctx.exponentials = memory.exponentials
        ctx.save_for_backward(query, key, value, output, *memory.sums(), memory.top)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, S, z, top = ctx.saved_tensors
        exponentials, wide = ctx.exponentials, S.dtype
        d_query, d_key, d_value = (torch.empty_like(t) for t in (query, key, value))
        for i in heads_of(query):
            d_S, d_z, floor_z = torch.zeros_like(S[i]), torch.zeros_like(z[i]), FEATURE_EPS * z[i].sum()
            for q, o, d_o, d_q in exponentials.parts(query[i], output[i], d_output[i], d_query[i]):
                features = exponentials(q)
                d_read = d_o.to(wide) / torch.addmv(floor_z, features, z[i])[:, None]
                d_sum = -(d_read * o).sum(1)
                # Of phi = e + eps the second part is the same for every feature.
                d_S.addmm_(features.mT, d_read).add_(d_read.sum(0), alpha=FEATURE_EPS)
                d_z.addmv_(features.mT, d_sum).add_(d_sum.sum(), alpha=FEATURE_EPS)
                d_u = torch.addr(d_read @ S[i].mT, d_sum, z[i]).mul_(features)
                d_q.copy_(exponentials.backward(q.to(wide), d_u))
            floor = FEATURE_EPS * d_S.sum(0)
            for k, v, d_k, d_v in exponentials.parts(key[i], value[i], d_key[i], d_value[i]):
                features = exponentials(k, top[i])
                d_v.copy_(torch.addmm(floor, features, d_S))
                d_u = torch.addmm(d_z, v.to(wide), d_S.mT).mul_(features)
                d_k.copy_(exponentials.backward(k.to(wide), d_u))
        return d_query, d_key, d_value, None, None
