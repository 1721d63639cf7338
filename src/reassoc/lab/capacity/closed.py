"""Signal and crosstalk of a memory for given keys, in closed form.

N keys with features ``phi_i`` store values; each is then read with its own key. The read is
``sum_j W_ij v_j``: signal is what it takes of its own value, ``|W_ii|``, crosstalk what it takes of the
others, ``sum_{j != i} |W_ij|``. With ``G_ij = phi_i . phi_j`` (features as normalized):

- sum rule: ``W = G``; under attention normalization each row is divided by its sum.
- delta rule, keys in order, strengths beta: ``W = G T`` with ``T = (1 + tril(beta G, -1))^-1 beta``, the
  writes being ``T V``. After p passes over the same pairs ``W = 1 - (1 - G T)^p``.

For independent values of mean 0 and variance 1 the expected squared error of a read, per coordinate, is
``(W_ii - 1)^2 + sum_{j != i} W_ij^2``; 1 is as bad as reading zero. Two numbers say what it is due to:

- *least error* is what the best scale of each read leaves, ``1 - W_ii^2 / sum_j W_ij^2``: crosstalk alone.
- *bound*: W has at most the rank R of the features, so no rule, however it writes, gets the mean below
  ``1 - R / N`` (Eckart and Young). With R = N the delta rule reaches 0 as passes go on; strictly positive
  features are never orthogonal, so the sum rule does not.

A delta write is exact (reading the key at once gives the value) where ``beta |phi|^2 = 1``. Published are
features of sum 1 and beta up to 1, whose writes are partial: ``|phi|^2`` is then small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...feature_maps import FeatureMap
from ..fidelity import Row
from .cases import Case
from .keys import Stored

PASSES = 64  # a power of two


def closed(stored: Stored, case: Case, seed: int) -> Row:
    """One row of the closed form; means over the keys, ratio the median.

    Returns:
        Columns ``bound``, ``signal``, ``crosstalk``, ``ratio``, ``error``, ``least_error``; for the delta
        rule also ``error_passes`` (after 64), ``exact_error``, ``exact_error_passes`` (writes that are
        exact). With known values ``value_error``, the relative squared error of reading those.

    Raises:
        ValueError: the map cannot have this key size.
    """
    count, dim = stored.key.shape
    phi = case.build(dim, seed).double()
    features = _features(phi, stored.key, case.normalize)
    gram = features @ features.T
    found: Row = {
        "keys": stored.name, "head": stored.head, "pairs": count, "case": case.name, "map": case.map,
        "rule": case.rule, "normalize": case.normalize, "features": phi.feature_dim, "rank": rank(features),
    }  # fmt: skip
    found["bound"] = 1 - found["rank"] / count
    extra: Row = dict.fromkeys(("error_passes", "exact_error", "exact_error_passes", "value_error"))
    if case.rule == "sum":
        weights = sum_matrix(gram, case.normalize)
    else:
        weights = delta_matrix(gram, torch.ones_like(gram[0]))
        extra["error_passes"] = _mean_error(passes(weights, PASSES))
        if case.normalize == "attention":
            weights = weights / gram.sum(1, keepdim=True)
            extra["error_passes"] = None
        size = gram.diagonal()
        exact = delta_matrix(gram, torch.where(size > 0, 1 / size, 0.0))
        extra["exact_error"] = _mean_error(exact)
        extra["exact_error_passes"] = _mean_error(passes(exact, PASSES))
    signal = weights.diagonal().abs()
    crosstalk = weights.abs().sum(1) - signal
    found |= {
        "signal": float(signal.mean()), "crosstalk": float(crosstalk.mean()),
        "ratio": float((signal / crosstalk).median()), "error": _mean_error(weights),
        "least_error": float((1 - signal.square() / weights.square().sum(1)).nan_to_num(1.0).mean()),
    }  # fmt: skip
    value = stored.value
    if value is not None:
        extra["value_error"] = float((weights @ value - value).square().sum() / value.square().sum())
    return found | extra


def sum_matrix(gram: Tensor, normalize: str) -> Tensor:
    """W of the sum rule, ``(N, N)``; rows without any weight stay zero."""
    if normalize != "attention":
        return gram
    total = gram.sum(1, keepdim=True)
    return torch.where(total != 0, gram / total, 0.0)


def delta_matrix(gram: Tensor, beta: Tensor) -> Tensor:
    """W of the delta rule after one pass, ``(N, N)``, for strengths ``(N,)``.

    ``W_ij = phi_i^T M_N ... M_{j+1} beta_j phi_j`` with ``M_t = 1 - beta_t phi_t phi_t^T``: ``G T`` in the WY
    form of such products.
    """
    lower = (beta[:, None] * gram).tril(-1)
    writes: Tensor = torch.linalg.solve_triangular(lower, beta.diag(), upper=False, unitriangular=True)
    return gram @ writes


def passes(weights: Tensor, count: int) -> Tensor:
    """W after a power of two of passes, from W after one."""
    eye = torch.eye(len(weights), dtype=weights.dtype)
    left = eye - weights
    while count > 1:
        left, count = left @ left, count // 2
    return eye - left


def rank(features: Tensor) -> int:
    """Rank of the features ``(N, r)``, lengths aside: how many associations they can keep apart."""
    size = features.norm(dim=1, keepdim=True)
    return int(torch.linalg.matrix_rank(features / torch.where(size > 0, size, 1.0)))


def _features(phi: FeatureMap, key: Tensor, normalize: str) -> Tensor:
    """Features ``(N, r)`` as the memory has them; a vector of zeros has no sum and stays."""
    features = phi.key(key)
    if normalize == "sum":
        total = features.sum(1, keepdim=True)
        features = torch.where(total != 0, features / total, 0.0)
    return features


def _mean_error(weights: Tensor) -> float:
    """``(W_ii - 1)^2 + sum_{j != i} W_ij^2``, the mean over i."""
    return float((weights - torch.eye(len(weights), dtype=weights.dtype)).square().sum(1).mean())
