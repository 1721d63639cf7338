"""FAVOR+ attention from queries, keys and values: the operator, or the original's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ... import linear_attention
from ...feature_maps import FeatureMap, orthogonalize
from .._mode import check_mode
from .._operator import attend, hide_values
from .kernels import (
    KERNEL_EPS,
    KEY_EPS,
    RELU,
    check_scaling,
    gaussian_orthogonal_random_matrix,
    older_softmax_kernel,
    softmax_kernel,
)
from .maps import ProjectedFeatures, SoftmaxFeatures
from .pieces import SHORT, OperatorMemory
from .stabilized import StabilizedMemory

_LONG, _MANY = 128, 1 << 18  # tokens, and features in all, from which on a state of the keys is quicker


class FastAttention(nn.Module):
    """Linear attention over ``projection_matrix``.

    Args:
        dim_heads: size d of queries and keys.
        nb_features: number m of projections, default ``int(d ln d)``, at least 1.
        ortho_scaling: 0 draws rows with the norms of Gaussian vectors, 1 gives all the norm sqrt(d).
        causal: query i sees keys 0..i.
        generalized_attention: features ``kernel_fn(W x)`` instead of softmax's.
        kernel_fn: that function.
        no_projection: softmax of each query over its numbers, and of each number over the keys (causal:
            exponentials of keys); ``projection_matrix`` is then not used.
        legacy: ``None``: exact for the kernel, no epsilons, masks hide keys, undefined rows are zero.
            ``"exact"``: the original's features, epsilons and stabilizers; a mask empties values only.

    Attributes:
        projection_matrix: buffer ``(m, d)``.
        older: with ``legacy="exact"``, stabilize softmax features as releases before 1.1.1 did, scBERT's copy
            among them: by one maximum over all keys of a call. A ``Performer`` sets it where it loads
            what was saved before 1.0.9; files of 1.0.9 to 1.1.0 do not tell: set it after loading.

    Raises:
        ValueError: an unknown ``legacy`` or ``ortho_scaling``, or sizes below 1.
    """

    projection_matrix: Tensor

    def __init__(
        self,
        dim_heads: int,
        nb_features: int | None = None,
        ortho_scaling: int = 0,
        causal: bool = False,
        generalized_attention: bool = False,
        kernel_fn: Callable[[Tensor], Tensor] = RELU,
        no_projection: bool = False,
        *,
        legacy: str | None = None,
    ) -> None:
        super().__init__()
        self.legacy = check_mode("performer_pytorch", legacy)
        check_scaling(ortho_scaling)
        for name, number in (("dim_heads", dim_heads), ("nb_features", nb_features)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.dim_heads = dim_heads
        self.nb_features = nb_features or max(1, int(dim_heads * math.log(dim_heads)))
        self.ortho_scaling = ortho_scaling
        self.causal = causal
        self.generalized_attention = generalized_attention
        self.kernel_fn = kernel_fn
        self.no_projection = no_projection
        self.older = False
        self.register_buffer("projection_matrix", self.create_projection())

    def create_projection(self, device: torch.device | str | None = None) -> Tensor:
        """A new matrix ``(m, d)`` from torch's generator: Haar distributed, or the original's recipe."""
        rows, columns = self.nb_features, self.dim_heads
        if self.legacy == "exact":
            return gaussian_orthogonal_random_matrix(rows, columns, self.ortho_scaling, device)
        norms = "sqrt_dim" if self.ortho_scaling else "chi"
        return orthogonalize(torch.randn(rows, columns, device=device), norms)

    @torch.no_grad()
    def redraw_projection_matrix(self, device: torch.device | str | None = None) -> None:
        """Draw ``projection_matrix`` anew, in place."""
        self.projection_matrix.copy_(self.create_projection(device))

    def forward(
        self,
        q: Tensor,  # (B, H, N, d)
        k: Tensor,  # (B, H, M, d)
        v: Tensor,  # (B, H, M, e)
        key_mask: Tensor | None = None,  # bool (B, M), True = real
    ) -> Tensor:  # (B, H, N, e)
        """The attention of each query; ``key_mask`` as ``legacy`` says. A batch or heads of 1 serve all.

        Raises:
            TypeError: not floating point. ValueError, RuntimeError: shapes that do not fit, or no keys for
                exact softmax features, which are relative to their maximum.
        """
        for name, t in (("q", q), ("k", k), ("v", v)):
            if not t.is_floating_point():
                raise TypeError(f"{name} must be floating point, got {t.dtype}")
        both = torch.broadcast_shapes(q.shape[:2], k.shape[:2], v.shape[:2])
        q, k, v = (t.expand(*both, -1, -1) for t in (q, k, v))
        key_mask = None if key_mask is None else key_mask.expand(both[0], -1)
        with torch.autocast(q.device.type, enabled=False):
            if self.legacy == "exact":
                return self._exact(q, k, hide_values(v, key_mask))
            return self._clean(q, k, v, key_mask)

    def memory(
        self, sequences: int, length: int, dtype: torch.dtype
    ) -> OperatorMemory | StabilizedMemory | None:
        """What sums up keys and is then read, for B times H ``sequences`` of ``length`` tokens of ``dtype``.

        ``None`` where all tokens are taken at once: for gradients, in causal attention, in that without
        projections, and where pieces are not quicker.
        """
        if torch.is_grad_enabled() or self.causal or self.no_projection:
            return None
        if length <= SHORT or not self._many(sequences, length):
            return None
        if self.legacy != "exact":
            return OperatorMemory(self._map(dtype), "zero", hides_keys=True)
        if self.generalized_attention:
            return OperatorMemory(self._map(dtype), "nan", hides_keys=False)
        return self._stabilized(dtype)

    def _clean(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        dtype = q.dtype
        if self.no_projection and not self.causal:
            # Each number of a key is divided by its sum over the keys: the same as taking that from queries.
            q, k, v = (t.to(state_dtype(dtype)) for t in (q, k, v))
            seen = k if key_mask is None else k.masked_fill(~key_mask[:, None, :, None], -torch.inf)
            total = seen.logsumexp(-2, keepdim=True)
            q = q - total.masked_fill(total.isinf(), 0.0)
        phi = "exp" if self.no_projection else self._map(dtype)
        out = linear_attention(q, k, v, phi, causal=self.causal, key_mask=key_mask, undefined="zero")
        return out.to(dtype)

    def _exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype, matrix = q.dtype, self.projection_matrix
        relative = not (self.no_projection or self.generalized_attention)
        if relative and not k.shape[2]:
            raise ValueError('there are no keys, and legacy="exact" is relative to the largest of them')
        if relative and not self.causal and self._many(v.shape[0] * v.shape[1], max(q.shape[2], k.shape[2])):
            memory = self._stabilized(dtype)
            memory.add(k, v, None)
            return memory.read(q)
        q, k, v = (t.to(state_dtype(dtype)) for t in (q, k, v))
        if self.no_projection:
            q, k = q.softmax(-1), k.exp() if self.causal else k.softmax(-2)
        elif self.generalized_attention:
            phi = self._map(dtype)
            q, k = phi.query(q), phi.key(k)
        elif self.older:
            q, k = older_softmax_kernel(q, matrix, is_query=True), older_softmax_kernel(k, matrix, False)
        else:
            q = softmax_kernel(q, projection_matrix=matrix, is_query=True)
            k = softmax_kernel(k, projection_matrix=matrix, is_query=False)
        return attend(q, k, v, causal=self.causal, key_eps=KEY_EPS if self.causal else 0.0).to(dtype)

    def _stabilized(self, dtype: torch.dtype) -> StabilizedMemory:
        return StabilizedMemory(self.projection_matrix.to(state_dtype(dtype)), self.older)

    def _many(self, sequences: int, length: int) -> bool:
        """Whether a state of the keys is quicker than features that are kept: on a CPU, if they are many."""
        enough = length >= _LONG and sequences * length * self.nb_features >= _MANY
        return enough and self.projection_matrix.device.type == "cpu"

    def _map(self, dtype: torch.dtype) -> FeatureMap:
        """The feature map over the buffer as it is now: quickly made, and never out of date."""
        matrix = self.projection_matrix.to(state_dtype(dtype))
        if self.generalized_attention:
            return ProjectedFeatures(matrix, self.kernel_fn, KERNEL_EPS if self.legacy == "exact" else 0.0)
        return SoftmaxFeatures(matrix)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
