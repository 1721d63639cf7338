"""The truth that kernels are compared with: softmax attention in float64, with its gradients."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .._errors import InputError
from ._sites import Site


@dataclass(frozen=True)
class Sequence:
    """One sequence of a site to be judged, float64, with softmax's results.

    Shapes: H query heads, G key heads, n tokens, k judged rows (the last k).

    Attributes:
        query: ``(1, H, n, d)``. key: ``(1, G, n, d)``. value: ``(1, G, n, e)``.
        causal: whether position i sees only keys up to i. scale: of the scores.
        rows: number k of judged rows; the others are of the calibration half.
        cotangent: ``(1, H, n, e)``: gradient of a loss by the output, zero outside the judged rows.
        log_kernel: ``(H, k, n)``: scores, minus infinity where hidden.
        weights: ``(H, k, n)``. output: ``(H, k, e)``.
        gradients: of query ``(H, n, d)``, key ``(G, n, d)``, value ``(G, n, e)``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    scale: float
    rows: int
    cotangent: Tensor
    log_kernel: Tensor
    weights: Tensor
    output: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Split:
    """A site cut in two: calibration learns from one half of the tokens, the other is judged.

    Attributes:
        calibration: pairs of query ``(1, H, n, d)`` and key ``(1, G, n, d)``, float64.
        judged: what is measured.
    """

    calibration: tuple[tuple[Tensor, Tensor], ...]
    judged: tuple[Sequence, ...]


def check_divisible(site: Site) -> None:
    """Raise ``InputError`` if the site has fewer than two tokens: one to learn from, one to judge."""
    if site.query.shape[1] < 2:
        raise InputError(
            f"site {site.name!r} has {site.query.shape[1]} tokens: at least 2 are needed, one to judge"
        )


def split(site: Site) -> Split:
    """Half of the sequences; with a single one, its first half of positions calibrates.

    Judged rows of a single sequence are those of its second half; they still see all their keys.

    Raises:
        InputError: fewer than two tokens to divide.
    """
    sequences = [tuple(t.double()[None] for t in parts) for parts in site.sequences() if parts[0].shape[1]]
    count = len(sequences)
    if count >= 2:
        half = count // 2
        learned = [(q, k) for q, k, _ in sequences[:half]]
        rest = [(q, k, v, q.shape[2]) for q, k, v in sequences[half:]]
    else:
        check_divisible(site)
        (q, k, v), half = sequences[0], sequences[0][0].shape[2] // 2
        learned = [(q[:, :, :half], k[:, :, :half])]
        rest = [(q, k, v, q.shape[2] - half)]
    # A fixed cotangent per site: every map and seed is judged by the same loss.
    seed = int.from_bytes(hashlib.sha256(site.name.encode()).digest()[:6], "little")
    generator = torch.Generator().manual_seed(seed)
    return Split(tuple(learned), tuple(_truth(*parts, site, generator) for parts in rest))


def _truth(
    query: Tensor, key: Tensor, value: Tensor, rows: int, site: Site, generator: torch.Generator
) -> Sequence:
    heads, groups, length = query.shape[1], key.shape[1], query.shape[2]
    cotangent = torch.randn((1, heads, length, value.shape[-1]), generator=generator, dtype=torch.float64)
    cotangent[:, :, : length - rows] = 0.0
    inputs = tuple(t.clone().requires_grad_() for t in (query, key, value))
    q, k, v = inputs
    k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
    scores = site.scale * q @ k.mT
    if site.causal:
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    output = weights @ v
    gradients = torch.autograd.grad(output, inputs, cotangent)
    judged = slice(length - rows, length)
    return Sequence(
        query, key, value, site.causal, site.scale, rows, cotangent,
        scores.detach()[0, :, judged], weights.detach()[0, :, judged], output.detach()[0, :, judged],
        (gradients[0][0], gradients[1][0], gradients[2][0]),
    )  # fmt: skip
