"""Features and attention as performer-pytorch computes them, epsilons and stabilizers included."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._operator import attend

FEATURE_EPS = 1e-4  # added to every softmax feature
KERNEL_EPS = 1e-3  # added to every generalized feature
KEY_EPS = 1e-6  # added to the summed key features of a causal call
RELU = nn.ReLU()  # what generalized attention takes by default


def softmax_kernel(
    data: Tensor,  # (B, H, N, d)
    *,
    projection_matrix: Tensor,  # (m, d)
    is_query: bool,
    normalize_data: bool = True,
    eps: float = FEATURE_EPS,
    device: torch.device | str | None = None,
) -> Tensor:  # (B, H, N, m)
    """``m^-1/2 (exp(u - |x|^2/2 - max u) + eps)`` with ``u = W x`` and x the data times ``d^-1/4``.

    The maximum is a query's own, or that over all keys of a head; no gradient passes through it.
    ``device`` is there for old calls; features are made where the data is.
    """
    scale = data.shape[-1] ** -0.25 if normalize_data else 1.0
    u = project(data, projection_matrix, scale)
    top = u.detach().amax(-1 if is_query else (-1, -2), keepdim=True)
    return _stabilized(data, u, top, scale, eps)


def older_softmax_kernel(
    data: Tensor,  # (B, H, N, d)
    projection_matrix: Tensor,  # (m, d)
    is_query: bool,
) -> Tensor:  # (B, H, N, m)
    """:func:`softmax_kernel` before 1.1.1: one maximum over all keys of a call, gradients through both."""
    scale = data.shape[-1] ** -0.25
    u = project(data, projection_matrix, scale)
    return _stabilized(data, u, u.amax(-1, keepdim=True) if is_query else u.max(), scale, FEATURE_EPS)


def _stabilized(data: Tensor, u: Tensor, top: Tensor, scale: float, eps: float) -> Tensor:
    offset = data.square().sum(-1, keepdim=True) * (scale * scale / 2) + top
    features: Tensor = (torch.exp(u - offset) + eps) * u.shape[-1] ** -0.5
    return features


def generalized_kernel(
    data: Tensor,  # (B, H, N, d)
    *,
    projection_matrix: Tensor | None,  # (m, d)
    kernel_fn: Callable[[Tensor], Tensor] = RELU,
    kernel_epsilon: float = KERNEL_EPS,
    normalize_data: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:  # (B, H, N, m), without projections (B, H, N, d)
    """``f(W x) + kernel_epsilon`` with x the data times ``d^-1/4``; without a matrix ``f(x)``."""
    scale = data.shape[-1] ** -0.25 if normalize_data else 1.0
    u = data * scale if projection_matrix is None else project(data, projection_matrix, scale)
    features: Tensor = kernel_fn(u) + kernel_epsilon
    return features


def project(data: Tensor, matrix: Tensor, scale: float) -> Tensor:
    """``(..., d) -> (..., m)``; the scale goes into the small matrix, not through the data."""
    return data @ (matrix.to(data.dtype) * scale).mT


def orthogonal_matrix_chunk(cols: int, device: torch.device | str | None = None) -> Tensor:
    """``(d, d)`` orthogonal rows, the signs LAPACK's: see :func:`reassoc.feature_maps.orthogonalize`."""
    q: Tensor = torch.linalg.qr(torch.randn(cols, cols, device=device).cpu()).Q
    return q.mT.to(device)


def orthogonal_rows(rows: int, columns: int, device: torch.device | str | None = None) -> Tensor:
    """``(rows, columns)`` of norm 1, orthogonal in blocks of ``columns``."""
    blocks = [orthogonal_matrix_chunk(columns, device) for _ in range(-(-rows // columns))]
    return torch.cat(blocks)[:rows]


def gaussian_orthogonal_random_matrix(
    nb_rows: int, nb_columns: int, scaling: int = 0, device: torch.device | str | None = None
) -> Tensor:  # (nb_rows, nb_columns)
    """Rows orthogonal in blocks; the same draw of torch's global generator gives the original's matrix.

    Args:
        nb_rows: m. nb_columns: d.
        scaling: 0 gives rows the norms of Gaussian vectors drawn apart, 1 the norm sqrt(d).

    Raises:
        ValueError: another scaling, or no rows.
    """
    check_scaling(scaling)
    if nb_rows < 1:
        raise ValueError(f"nb_rows must be at least 1, got {nb_rows}")
    directions = orthogonal_rows(nb_rows, nb_columns, device)
    if scaling == 1:
        return directions * math.sqrt(nb_columns)
    lengths: Tensor = torch.randn(nb_rows, nb_columns, device=device).norm(dim=1, keepdim=True)
    return directions * lengths


def check_scaling(scaling: int) -> None:
    """0 or 1."""
    if scaling not in (0, 1):
        raise ValueError(
            f"ortho_scaling must be 0 (norms of Gaussian vectors) or 1 (all sqrt(d)), got {scaling!r}"
        )


def linear_attention(
    q: Tensor,  # (B, H, N, r)
    k: Tensor,  # (B, H, M, r)
    v: Tensor,  # (B, H, M, e)
) -> Tensor:  # (B, H, N, e)
    """``q.S / q.z`` of given features, every query reading every key."""
    return attend(q, k, v)


def causal_linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float = KEY_EPS) -> Tensor:
    """Query i reads keys 0..i; ``eps`` is added to every entry of z, not of S."""
    return attend(q, k, v, causal=True, key_eps=eps)


def causal_linear_attention_noncuda(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 128, eps: float = KEY_EPS
) -> Tensor:
    """As :func:`causal_linear_attention`; ``chunk_size`` is there for old calls and changes nothing."""
    return causal_linear_attention(q, k, v, eps)
