"""What divides the read: normalization of features and of outputs, and what undefined means."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op

from ._features import Features

NORMALIZATIONS = ("attention", "sum", "sum+attention", "none")
POLICIES = ("nan", "zero", "raise")


def sum_normalize(
    features: Features, undefined: str, what: str, visible: Tensor | None = None
) -> tuple[Features, Tensor]:
    """Divide every feature vector by its own sum.

    A vector that is zero throughout stays zero. A signed vector whose sum is zero has no
    normalization: it becomes NaN, zero or an error, as ``undefined`` says (zero where not ``visible``).

    Returns:
        The features, and bool ``(..., 1)``: which vectors were zero or had sum zero.
    """
    if features.mantissa is None and features.log is not None:
        # An empty vector is set aside first: the gradient of its own logsumexp is no number.
        empty = (features.log == -torch.inf).all(-1, keepdim=True)
        total = features.log.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
        return Features(None, features.log - total.masked_fill(empty, 0.0)), empty
    mantissa, log = features
    assert mantissa is not None
    if log is not None and log.shape[-1] > 1:  # mantissa and logarithm per feature: one common scale
        level = log.detach().amax(-1, keepdim=True)
        mantissa = mantissa * (log - torch.where(level == -torch.inf, 0.0, level)).exp()
    # A logarithm shared by the whole vector cancels.
    total = mantissa.sum(-1, keepdim=True)
    empty = total == 0
    bad = empty & (mantissa != 0).any(-1, keepdim=True)
    if visible is not None:
        bad = bad & visible
    normalized = mantissa / total.masked_fill(empty, 1.0)
    if undefined == "raise":
        refuse(bad[..., 0], f"a {what} feature vector sums to zero")
    fill = math.nan if undefined == "nan" else 0.0
    normalized = torch.where(bad, fill, torch.where(empty, 0.0, normalized))
    # The logarithm stays, as zero, so that the map's state keeps its form.
    return Features(normalized, None if log is None else torch.zeros_like(log)), empty


def divide(
    read: Tensor,  # (B, H, N, e + 1): the last column is the denominator
    log_row: Tensor | None,  # (B, H, N)
    eps: float,
    undefined: str,
    empty: Tensor | None,  # bool (B, H, N): rows already undefined (sum normalization)
) -> Tensor:
    """``numerator / (denominator + eps)``, undefined rows as the policy says: ``(B, H, N, e)``."""
    numerator, denominator = read[..., :-1], read[..., -1:]
    if eps != 0.0:
        if log_row is not None:
            # eps lives on the true scale; whichever factor is at most one is applied.
            row = log_row[..., None]
            shrink = row.clamp(max=0.0).exp()
            numerator = numerator * shrink
            denominator = denominator * shrink + eps * (-row.clamp(min=0.0)).exp()
        else:
            denominator = denominator + eps
    bad = denominator == 0
    if empty is not None:
        bad = bad | empty[..., None]
    output = numerator / denominator.masked_fill(bad, 1.0)
    return settle(output, bad, undefined, "the denominator is zero, or no key is visible")


def settle(output: Tensor, bad: Tensor, undefined: str, why: str) -> Tensor:
    """Put NaN, zero or an error where ``bad`` (B, H, N, 1); no gradient leaves such a row."""
    if undefined == "raise":
        bad = refuse(bad[..., 0], why)[..., None]
    return output.masked_fill(bad, math.nan if undefined == "nan" else 0.0)


def unscale(read: Tensor, log_row: Tensor | None) -> Tensor:
    """Give back the true scale of an unnormalized read; overflow is infinity.

    Applied as two equal factors within range, so that a zero stays zero and a zero gradient too.
    """
    if log_row is None:
        return read
    half = math.log(torch.finfo(read.dtype).max) * 0.99
    factor = (log_row.clamp(max=2 * half) / 2).exp()[..., None]
    return read * factor * factor


@custom_op("reassoc::refuse", mutates_args=())
def _refuse(bad: Tensor, why: str) -> Tensor:
    if bool(bad.any()):
        batch, head, position = bad.nonzero()[0].tolist()
        raise ValueError(
            f"undefined result at batch {batch}, head {head}, position {position}: {why}. Use "
            "undefined='nan' or 'zero' to continue, a positive feature map, or mask this row"
        )
    return bad.clone()


@_refuse.register_fake
def _(bad: Tensor, why: str) -> Tensor:
    return torch.empty_like(bad)


def refuse(bad: Tensor, why: str) -> Tensor:
    """Raise ``ValueError`` naming the first True of ``bad`` (B, H, N); else return it."""
    refused: Tensor = _refuse(bad, why)
    return refused
