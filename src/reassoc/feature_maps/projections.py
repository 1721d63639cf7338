"""Random matrices: blocks of Haar-distributed orthogonal rows with independent norms."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

NORMS = ("chi", "sqrt_dim")


def orthogonalize(
    matrix: Tensor,  # (..., m, d)
    norms: str = "chi",
) -> Tensor:
    """Make rows orthogonal in blocks of d, keeping Gram-Schmidt's order and signs.

    Row i keeps a positive inner product with the row it came from: LAPACK's own choice of signs is
    biased, and estimates made with it are too. For Gaussian rows the result is Haar distributed.

    Args:
        matrix: ``(..., m, d)``, floating point; the last block may have fewer than d rows.
        norms: ``"chi"`` keeps each row's own norm, which for Gaussian rows is chi(d) and independent
            of all directions: estimates stay unbiased. ``"sqrt_dim"`` gives every row norm sqrt(d):
            estimates of the regularised softmax kernel (SMREG), not of softmax.

    Returns:
        ``(..., m, d)``, computed in float64 and returned in the input's dtype.

    Raises:
        ValueError: unknown ``norms``.

    Source: Yu et al. 2016; Choromanski et al. 2021, section 2.4; Mezzadri 2007 for the signs.
    """
    _check_norms(norms)
    exact = matrix.to(torch.float64)
    blocks = []
    for block in exact.split(matrix.shape[-1], dim=-2):
        q, r = torch.linalg.qr(block.mT)
        signs = r.diagonal(dim1=-2, dim2=-1).sign()
        blocks.append((q * torch.where(signs == 0, 1.0, signs)[..., None, :]).mT)
    directions = torch.cat(blocks, dim=-2)
    return (directions * _lengths(exact, norms)).to(matrix.dtype)


def draw(
    shape: tuple[int, ...],  # (..., m, d)
    orthogonal: bool,
    norms: str,
    seed: int,
    draws: int,
) -> Tensor:
    """Draw number ``draws`` of ``seed``: float32 ``shape``, the same on every machine.

    Drawn on the CPU in float64 and rounded, so that a device or a vector width changes nothing but,
    rarely, a last bit.
    """
    _check_norms(norms)
    digest = hashlib.sha256(f"reassoc projections {seed} {draws}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))
    gaussian = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    if orthogonal:
        gaussian = orthogonalize(gaussian, norms)
    elif norms == "sqrt_dim":
        gaussian = gaussian / gaussian.norm(dim=-1, keepdim=True) * _lengths(gaussian, norms)
    return gaussian.to(torch.float32)


def _lengths(rows: Tensor, norms: str) -> Tensor | float:
    return rows.norm(dim=-1, keepdim=True) if norms == "chi" else math.sqrt(rows.shape[-1])


def _check_norms(norms: str) -> None:
    if norms not in NORMS:
        raise ValueError(f"norms must be one of {NORMS}, got {norms!r}")
