"""One candidate on one site: every seed against softmax, and what the seeds together say.

All arithmetic is float64 through the operator itself: what is measured is the kernel, not rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from .. import linear_attention
from ..feature_maps import (
    FeatureMap,
    LandmarkFeatures,
    PositiveFeatures,
    RandomFeatures,
    TrigonometricFeatures,
)
from .candidates import Candidate
from .softmax import Sequence, Split

# One row of results.csv per seed and head.
SEED_COLUMNS = (
    "output_error",
    "query_gradient_error",
    "key_gradient_error",
    "value_gradient_error",
    "kl_divergence",
    "kl_undefined_row_share",
    "total_variation",
    "negative_weight_share",
    "undefined_row_share",
    "smallest_denominator",
    "smallest_mass_ratio",
    "effective_features",
)
# One row of heads.csv per head: over all seeds.
HEAD_COLUMNS = (
    "output_error",
    "predicted_relative_variance",
    "observed_relative_variance",
    "output_squared_bias",
    "output_variance",
)


@dataclass
class Measured:
    """Results of one candidate on one site, H heads.

    Attributes:
        features: number r of features.
        seeds: per seed: column -> H numbers.
        heads: over seeds: column -> H numbers, NaN where it has no meaning.
    """

    features: int
    seeds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    heads: dict[str, list[float]] = field(default_factory=dict)


def measure(candidate: Candidate, data: Split, seeds: list[int]) -> Measured:
    """Measure a candidate for every seed (a map without randomness: once, as seed 0)."""
    first = data.judged[0]
    dim, groups, scale = first.query.shape[-1], first.key.shape[1], first.scale
    used = seeds if candidate.random else [0]
    outputs: list[list[Tensor]] = [[] for _ in data.judged]
    kernels: list[list[Tensor]] = [[] for _ in data.judged]
    predicted: list[Tensor] = []
    result = Measured(0)
    for seed in used:
        phi = candidate.build(dim, groups, scale, seed).double()
        if candidate.calibrated and isinstance(phi, RandomFeatures | LandmarkFeatures):
            calibrator = phi.calibrator()
            for query, key in data.calibration:
                calibrator.update(query, key)
            calibrator.finish()
        result.features = phi.feature_dim
        parts = []
        for index, sequence in enumerate(data.judged):
            part, output, kernel = _one(phi, sequence)
            parts.append(part)
            outputs[index].append(output)
            kernels[index].append(kernel)
            if seed == used[0]:
                predicted.append(_predicted(phi, sequence))
        result.seeds[seed] = _combine(parts)
    by_head = zip(*(result.seeds[s]["output_error"] for s in used), strict=True)
    result.heads = {"output_error": [median(errors) for errors in by_head]}
    result.heads |= _over_seeds(data.judged, outputs, kernels, predicted, len(used) > 1)
    return result


def _one(phi: FeatureMap, s: Sequence) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Raw sums ``(H,)`` of one map on one sequence, its output ``(H, k, e)`` and kernel ``(H, k, n)``."""
    inputs = tuple(t.clone().requires_grad_() for t in (s.query, s.key, s.value))
    query, key, value = inputs
    output = linear_attention(query, key, value, phi, causal=s.causal, undefined="zero")
    gradients = torch.autograd.grad(output, inputs, s.cotangent, allow_unused=True, materialize_grads=True)
    length, group = s.query.shape[2], s.query.shape[1] // s.key.shape[1]
    judged = slice(length - s.rows, length)
    found = output.detach()[0, :, judged]
    with torch.no_grad():
        eye = torch.eye(length, dtype=torch.float64).expand(1, s.key.shape[1], length, length)
        kernel = linear_attention(s.query, s.key, eye, phi, causal=s.causal, normalize="none")[0, :, judged]
        effective = _effective_features(phi, s)[:, judged]
    denominator, mass = kernel.sum(-1), kernel.abs().sum(-1)
    undefined = denominator == 0
    ratio = kernel / denominator.masked_fill(undefined, 1.0)[..., None]
    if not bool(ratio.isfinite().all()):  # the kernel overflows even float64: its normalized form does not
        with torch.no_grad():
            whole = linear_attention(s.query, s.key, eye, phi, causal=s.causal, undefined="zero")
        ratio = whole[0, :, judged]
    p = s.weights
    visible = s.log_kernel > -torch.inf
    positive = ((ratio > 0) | ~visible).all(-1)
    log_ratio = torch.where(visible, p.log() - ratio.clamp(min=1e-300).log(), 0.0)
    kl = torch.where(positive, (p * torch.where(p > 0, log_ratio, 0.0)).sum(-1), torch.nan)
    # exp(row maximum) cancels in the ratio of masses, so no true kernel value needs to be formed.
    log_mass = s.log_kernel.logsumexp(-1)
    rows = torch.full(p.shape[:1], float(s.rows), dtype=torch.float64)
    sums = {
        "rows": rows,
        "output": (found - s.output).square().sum((-2, -1)),
        "output_norm": s.output.square().sum((-2, -1)),
        "kl": kl.nansum(-1),
        "kl_rows": positive.sum(-1).double(),
        "tv": (p - ratio).abs().sum(-1).sum(-1) / 2,
        "negative": (ratio < 0).sum((-2, -1)) / visible.sum((-2, -1)) * s.rows,
        "undefined": undefined.sum(-1).double(),
        "smallest": torch.where(undefined, 0.0, denominator.abs() / mass).amin(-1),
        "mass": (denominator.abs().log() - log_mass).amin(-1).exp(),
        "effective": effective.median(-1).values * s.rows,
    }
    for name, mine, true in zip(("query", "key", "value"), gradients, s.gradients, strict=True):
        repeat = 1 if name == "query" else group
        difference, norm = ((t.square().sum((-2, -1))) for t in (mine[0] - true, true))
        sums[name] = difference.repeat_interleave(repeat)
        sums[f"{name}_norm"] = norm.repeat_interleave(repeat)
    return sums, found, kernel


def _combine(parts: list[dict[str, Tensor]]) -> dict[str, list[float]]:
    """Sums over sequences into relative errors and means per row."""
    total = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    rows = total["rows"].sum(0)

    def relative(name: str) -> Tensor:
        return (total[name].sum(0) / total[f"{name}_norm"].sum(0)).sqrt()

    columns = {
        "output_error": relative("output"),
        "query_gradient_error": relative("query"),
        "key_gradient_error": relative("key"),
        "value_gradient_error": relative("value"),
        "kl_divergence": total["kl"].sum(0) / total["kl_rows"].sum(0),
        "kl_undefined_row_share": 1 - total["kl_rows"].sum(0) / rows,
        "total_variation": total["tv"].sum(0) / rows,
        "negative_weight_share": total["negative"].sum(0) / rows,
        "undefined_row_share": total["undefined"].sum(0) / rows,
        "smallest_denominator": total["smallest"].amin(0),
        "smallest_mass_ratio": total["mass"].amin(0),
        "effective_features": total["effective"].sum(0) / rows,
    }
    return {name: columns[name].tolist() for name in SEED_COLUMNS}


def _over_seeds(
    judged: tuple[Sequence, ...],
    outputs: list[list[Tensor]],
    kernels: list[list[Tensor]],
    predicted: list[Tensor],
    several: bool,
) -> dict[str, list[float]]:
    """What only several draws show: variance of the kernel, bias and variance of the output."""
    heads = judged[0].query.shape[1]
    nothing = [math.nan] * heads
    found = dict.fromkeys(HEAD_COLUMNS[1:], nothing)
    if predicted and not bool(torch.isnan(predicted[0]).all()):
        found["predicted_relative_variance"] = torch.cat(predicted, -1).median(-1).values.tolist()
    if not several:
        return found
    observed, bias, variance, norm = [], [], [], []
    for s, drawn, kernel in zip(judged, outputs, kernels, strict=True):
        relative = torch.stack(kernel).var(0).log() - 2 * s.log_kernel
        weighted = torch.where(s.weights > 0, s.weights * relative.exp(), 0.0).sum(-1)
        observed.append(weighted)
        stack = torch.stack(drawn)
        spread = stack.var(0).sum((-2, -1))
        # The mean of S draws still has 1/S of the variance in it; what is left is the bias.
        bias.append((stack.mean(0) - s.output).square().sum((-2, -1)) - spread / len(drawn))
        variance.append(spread)
        norm.append(s.output.square().sum((-2, -1)))
    total = torch.stack(norm).sum(0)
    if predicted and not bool(torch.isnan(predicted[0]).all()):
        found["observed_relative_variance"] = torch.cat(observed, -1).median(-1).values.tolist()
    found["output_squared_bias"] = (torch.stack(bias).sum(0) / total).tolist()
    found["output_variance"] = (torch.stack(variance).sum(0) / total).tolist()
    return found


def _predicted(phi: FeatureMap, s: Sequence) -> Tensor:
    """Predicted relative variance of each judged row, averaged by softmax's weights: ``(H, k)``."""
    if not isinstance(phi, PositiveFeatures | TrigonometricFeatures):
        return torch.full(s.weights.shape[:2], torch.nan, dtype=torch.float64)
    group = s.query.shape[1] // s.key.shape[1]
    query = s.query[0].unflatten(0, (-1, group))[:, :, -s.rows :].flatten(1, 2)  # (G, P k, d)
    pairs = phi.relative_variance(query, s.key[0]).unflatten(1, (group, s.rows)).flatten(0, 1)
    weighted: Tensor = torch.where(s.weights > 0, s.weights * pairs, 0.0).sum(-1)
    return weighted


def _effective_features(phi: FeatureMap, s: Sequence) -> Tensor:
    """``(sum_f c_f)^2 / sum_f c_f^2`` of the shares c_f = |phi(q)_f z_f| of each query: ``(H, n)``."""
    group = s.query.shape[1] // s.key.shape[1]
    key = phi.key_features(s.key)
    query = phi.query_features(s.query.unflatten(1, (-1, group)).flatten(2, 3))

    def log_size(part: Tensor | None, log: Tensor | None) -> Tensor:
        size = part.abs().log() if part is not None else torch.zeros(1, dtype=torch.float64)
        return size if log is None else size + log

    z = log_size(*key).logsumexp(2, keepdim=True)
    share = (log_size(*query) + z).log_softmax(-1)
    effective = (-(2 * share).logsumexp(-1)).exp().nan_to_num(0.0)
    per_head: Tensor = effective.unflatten(2, (group, -1)).flatten(0, 2)
    return per_head
