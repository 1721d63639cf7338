"""Closed forms for the variance of random-feature estimates of the softmax kernel.

With x, y scaled (and calibrated), z = x + y, D = |x - y|^2 and m projections, relative to the square
of the true kernel ``exp(x . y)``:

- positive: ``(e^{|z|^2} - 1) / m``;
- hyperbolic (m pairs): ``(e^{|z|^2} - 1)(1 - e^{-|z|^2}) / (2 m)``;
- optimal: ``(B e^{r |z|^2} - 1) / m`` with ``B = ((1 + r)^2 / 4r)^{d/2}``; of m pairs the mean of that
  and ``(B e^{-|z|^2} - 1) / m``;
- trigonometric: ``e^D (1 - e^{-D})^2 / (2 m)``.

Rows orthogonal in blocks of sizes m_b subtract ``beta (1 - e^{-|z|^2} 1F1(d; d/2; |z|^2/2))`` from the
positive forms, with ``beta = sum_b m_b (m_b - 1) / m^2`` (Choromanski et al. 2021 bound this gain; the
form here is exact). For the optimal and trigonometric maps the independent-rows form is given, an
upper bound where orthogonality helps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def positive_variance(
    z_square: Tensor,  # |x + y|^2, any shape
    dim: int,
    num_features: int,
    orthogonal: bool,
    hyperbolic: bool = False,
) -> Tensor:
    """Relative variance of the positive and hyperbolic estimates, float64."""
    z_square = z_square.double()
    variance = torch.expm1(z_square) / num_features
    if hyperbolic:
        variance = variance * -torch.expm1(-z_square) / 2
    if orthogonal:
        sizes = [min(dim, num_features - start) for start in range(0, num_features, dim)]
        beta = sum(size * (size - 1) for size in sizes) / num_features**2
        variance = variance - beta * (1 - _scaled_1f1(dim, z_square))
    return variance.clamp(min=0.0)


def optimal_variance(
    z_square: Tensor, dim: int, num_features: int, tilt: Tensor, hyperbolic: bool = False
) -> Tensor:
    """Relative variance of the optimal positive estimate with parameter A = ``tilt``, float64."""
    ratio = 1 / (1 - 8 * tilt.double())
    z_square = z_square.double()
    constant = dim / 2 * ((1 + ratio) ** 2 / (4 * ratio)).log()
    alone = torch.expm1(constant + ratio * z_square)
    if hyperbolic:  # the two of a pair correlate
        alone = (alone + torch.expm1(constant - z_square)) / 2
    return alone / num_features


def trigonometric_variance(difference_square: Tensor, num_features: int) -> Tensor:
    """Relative variance of the trigonometric estimate of the softmax kernel, float64."""
    D = difference_square.double()
    return D.exp() * torch.expm1(-D).square() / (2 * num_features)


def _scaled_1f1(dim: int, z_square: Tensor) -> Tensor:
    """``e^{-s} 1F1(d; d/2; s/2)`` for s >= 0, by its series of positive terms.

    Beyond s = 600 it is below 1e-60 for every d up to 256 and taken as zero.
    """
    s = z_square.clamp(max=600.0)
    term = (-s).exp()
    total = term.clone()
    for n in range(2000):
        term = term * ((dim + n) / (dim / 2 + n)) * (s / 2) / (n + 1)
        total += term
        if bool((term <= 1e-17 * total).all()):
            break
    return torch.where(z_square > 600.0, 0.0, total)


def pairwise_sums(x: Tensor, y: Tensor, sign: float) -> Tensor:
    """``|x_i + sign y_j|^2``: ``(..., N, d), (..., M, d) -> (..., N, M)``."""
    cross = 2 * sign * (x @ y.mT)
    return (x.square().sum(-1)[..., None] + y.square().sum(-1)[..., None, :] + cross).clamp(min=0.0)
