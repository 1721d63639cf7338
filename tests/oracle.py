"""A deliberately naive float64 oracle of kernel attention: every pair (i, j), every feature, written out.

It shares nothing with the library. No prefix sums of states, no chunks, no running maxima: a weight is
`sum_f phi(q_i)_f phi(k_j)_f decay_f(j -> i)` for each pair that the layout lets see each other. For the delta
rules the same weights between keys make one M x M system, whose inverse says what every token writes.

A feature is kept as `sign * exp(log)`, so that exponential maps of any norm stay exact. Gradients come from
autograd through these formulas. Memory is N x M x r for one head at a time: usable up to a few hundred.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Features(NamedTuple):
    """Feature vectors as `sign * exp(log)`, both (..., r)."""

    sign: Tensor
    log: Tensor

    def value(self) -> Tensor:
        """The plain numbers."""
        return self.sign * self.log.exp()

    def scaled(self, log_factor: Tensor) -> Features:
        """Multiply each vector by exp(log_factor), log_factor (...)."""
        return Features(self.sign, self.log + log_factor[..., None])


class Result(NamedTuple):
    """What the operator gives and how hard it was to compute."""

    output: Tensor  # (B, H, N, e)
    weights: Tensor  # (B, H, N, M): output = weights @ value
    undefined: Tensor  # (B, H, N) bool
    scale: Tensor  # (B, H, N, e): sum_j |w_ij| |v_j| / |den_i|, the unit of the error budgets (see _delta)
    spread: (
        Tensor  # (B, H, N): sum_j sum_f |w_ijf| / |den_i|: 1 for positive weights, large where they cancel
    )


# ---------------------------------------------------------------------------------------------------------
# Feature maps
# ---------------------------------------------------------------------------------------------------------


def plain(values: Tensor) -> Features:
    """Features given as numbers."""
    return Features(values, torch.zeros_like(values))


def exponential(logs: Tensor) -> Features:
    """Features given as logarithms."""
    return Features(torch.ones_like(logs), logs)


def identity(x: Tensor) -> Features:
    """phi(x) = x."""
    return plain(x)


def elu1(x: Tensor) -> Features:
    """phi(x) = ELU(x) + 1, which is x + 1 above zero and exp(x) below."""
    below = torch.where(x > 0, torch.zeros_like(x), x)
    return plain(torch.where(x > 0, x + 1, below.exp()))


def relu(x: Tensor) -> Features:
    """phi(x) = max(x, 0)."""
    return plain(torch.where(x > 0, x, torch.zeros_like(x)))


def squared_relu(x: Tensor) -> Features:
    """phi(x) = max(x, 0)^2."""
    return plain(torch.where(x > 0, x * x, torch.zeros_like(x)))


def exp(x: Tensor) -> Features:
    """phi(x) = exp(x), elementwise."""
    return exponential(x)


def softmax(x: Tensor) -> Features:
    """phi(x) = softmax(x) over the features."""
    top = x.amax(-1, keepdim=True)
    return exponential(x - top - (x - top).exp().sum(-1, keepdim=True).log())


def dpfp(x: Tensor, nu: int) -> Features:
    """Deterministic parameter-free projection: x' = [relu(x), relu(-x)], times its own shifts by 1..nu."""
    both = [relu(x).sign, relu(-x).sign]
    doubled = torch.cat(both, -1)
    size = doubled.shape[-1]
    columns = [
        doubled[..., i] * doubled[..., (i + shift) % size] for shift in range(1, nu + 1) for i in range(size)
    ]
    return plain(torch.stack(columns, -1))


def taylor(x: Tensor, scale: float | None = None) -> Features:
    """[1, x, x_i x_j / sqrt 2 (i = j), x_i x_j (i < j)] of the scaled x: the kernel 1 + s + s^2 / 2."""
    d = x.shape[-1]
    x = x * math.sqrt(d**-0.5 if scale is None else scale)
    columns = [torch.ones_like(x[..., 0])] + [x[..., i] for i in range(d)]
    for i in range(d):
        for j in range(i, d):
            columns.append(x[..., i] * x[..., j] / (math.sqrt(2) if i == j else 1.0))
    return plain(torch.stack(columns, -1))


def positive(x: Tensor, projections: Tensor, scale: float = 1.0, hyperbolic: bool = False) -> Features:
    """Performer's positive features m^-1/2 exp(w.x - |x|^2 / 2), projections (m, d)."""
    x = x * math.sqrt(scale)
    m = projections.shape[0]
    u = x @ projections.T
    half = (x * x).sum(-1, keepdim=True) / 2
    if hyperbolic:
        return exponential(torch.cat([u - half, -u - half], -1) - math.log(2 * m) / 2)
    return exponential(u - half - math.log(m) / 2)


def trigonometric(x: Tensor, projections: Tensor, scale: float = 1.0, kernel: str = "softmax") -> Features:
    """m^-1/2 exp(|x|^2 / 2) [sin w.x, cos w.x]; without the exponential for the Gaussian kernel."""
    x = x * math.sqrt(scale)
    m = projections.shape[0]
    u = x @ projections.T
    half = (x * x).sum(-1, keepdim=True) / 2 if kernel == "softmax" else torch.zeros_like(x[..., :1])
    waves = torch.cat([u.sin(), u.cos()], -1) / math.sqrt(m)
    return Features(waves, half.expand_as(waves))


# ---------------------------------------------------------------------------------------------------------
# The operator
# ---------------------------------------------------------------------------------------------------------


def sum_normalized(features: Features, undefined: str = "nan") -> tuple[Features, Tensor, Tensor]:
    """Each vector divided by its own sum. Also: which are all zero, which are signed with a zero sum."""
    top = features.log.amax(-1, keepdim=True).detach()
    terms = features.sign * (features.log - top).exp()
    total = terms.sum(-1, keepdim=True)
    empty = (terms == 0).all(-1)
    cancelled = (total[..., 0] == 0) & ~empty
    safe = torch.where(total == 0, torch.ones_like(total), total)
    sign = features.sign / safe
    sign = torch.where(empty[..., None], torch.zeros_like(sign), sign)
    bad = math.nan if undefined == "nan" else 0.0
    sign = torch.where(cancelled[..., None], torch.full_like(sign, bad), sign)
    return Features(sign, features.log - top), empty, cancelled


def decay_to(
    log_decay: Tensor | None, batch: int, heads: int, length: int, like: Tensor
) -> Tensor:  # (B, G, M, 1 or r)
    """Every accepted shape of log_decay as (B, G, M, 1 or r)."""
    if log_decay is None:
        return torch.zeros(batch, heads, length, 1, dtype=like.dtype)
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(batch, heads, length)
    if log_decay.dim() == 3:
        log_decay = log_decay[..., None]
    return log_decay.to(like.dtype)


def attend(
    query: Features,  # (B, H, N, r)
    key: Features,  # (B, G, M, r)
    value: Tensor,  # (B, G, M, e)
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,  # (B, G, M): a delta rule
    normalize: str = "attention",
    causal: bool = False,
    window: int | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: list[int] | None = None,
    eps: float = 0.0,
    undefined: str = "nan",
) -> Result:
    """The operator. A causal call with fewer queries than keys reads the last N positions."""
    batch, heads, n, _ = query.sign.shape
    groups, m = key.sign.shape[1:3]
    decay = decay_to(log_decay, batch, groups, m, value)
    if cu_seqlens is not None:
        parts = []
        weights = value.new_zeros(batch, heads, n, m)
        for start, stop in itertools.pairwise(cu_seqlens):
            own = slice(start, stop)
            if start == stop:
                continue
            part = attend(
                Features(query.sign[:, :, own], query.log[:, :, own]),
                Features(key.sign[:, :, own], key.log[:, :, own]),
                value[:, :, own],
                log_decay=decay[:, :, own],
                beta=None if beta is None else beta[:, :, own],
                normalize=normalize,
                causal=causal,
                window=window,
                key_mask=None if key_mask is None else key_mask[:, own],
                eps=eps,
                undefined=undefined,
            )
            weights[:, :, own, own] = part.weights.detach()
            parts.append(part)
        return Result(
            torch.cat([p.output for p in parts], 2),
            weights,
            torch.cat([p.undefined for p in parts], 2),
            torch.cat([p.scale for p in parts], 2),
            torch.cat([p.spread for p in parts], 2),
        )

    no_query = torch.zeros(batch, heads, n, dtype=torch.bool)
    if "sum" in normalize:
        query, empty, cancelled = sum_normalized(query, undefined)
        no_query = empty | cancelled
        query = Features(
            torch.where(no_query[..., None], torch.zeros_like(query.sign), query.sign), query.log
        )
        key, _, _ = sum_normalized(key, undefined)

    real = torch.ones(batch, m, dtype=torch.bool) if key_mask is None else key_mask
    results = [
        _one_head(
            Features(query.sign[b, h], query.log[b, h]),
            Features(key.sign[b, h // (heads // groups)], key.log[b, h // (heads // groups)]),
            value[b, h // (heads // groups)],
            decay[b, h // (heads // groups)],
            None if beta is None else beta[b, h // (heads // groups)],
            real[b],
            no_query[b, h],
            divide="attention" in normalize,
            causal=causal,
            window=window,
            eps=eps,
            undefined=undefined,
        )
        for b in range(batch)
        for h in range(heads)
    ]
    stacked = [torch.stack(list(column)) for column in zip(*results, strict=True)]
    return Result(*(column.unflatten(0, (batch, heads)) for column in stacked))


def _one_head(
    query: Features,  # (N, r)
    key: Features,  # (M, r)
    value: Tensor,  # (M, e)
    decay: Tensor,  # (M, 1 or r)
    beta: Tensor | None,  # (M,)
    real: Tensor,  # (M,)
    no_query: Tensor,  # (N,)
    *,
    divide: bool,
    causal: bool,
    window: int | None,
    eps: float,
    undefined: str,
) -> tuple[Tensor, ...]:
    n, m = query.sign.shape[0], key.sign.shape[0]
    position = torch.arange(n) + (m - n)
    keys = torch.arange(m)
    visible = real[None, :].expand(n, m).clone()
    if causal:
        visible &= keys[None, :] <= position[:, None]
    if window is not None:
        visible &= position[:, None] - keys[None, :] < window

    hide = ~real[:, None]
    key = Features(key.sign.masked_fill(hide, 0.0), key.log.masked_fill(hide, 0.0))
    value = value.masked_fill(hide, 0.0)
    decay = decay.masked_fill(hide, 0.0)

    # The decay from key j to query i: over the tokens after j up to i (all later ones when not causal).
    resets = decay == -math.inf
    passed = decay.masked_fill(resets, 0.0).cumsum(0)
    fresh = resets.cumsum(0)
    last = position if causal else torch.full((n,), m - 1)
    exponent = query.log[:, None] + key.log[None]
    if m:
        exponent = exponent + (passed[last][:, None] - passed[None])
        alive = (fresh[last][:, None] == fresh[None]) & visible[..., None]
    else:
        alive = visible[..., None]
    exponent = exponent.masked_fill(~alive, -math.inf)

    counts = (query.sign[:, None] != 0) & (key.sign[None] != 0) & alive
    top = torch.where(counts, exponent.detach(), -math.inf).flatten(1)
    top = top.amax(1) if top.shape[1] else torch.full((n,), -math.inf, dtype=value.dtype)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    signs = torch.where(alive, query.sign[:, None] * key.sign[None], torch.zeros_like(exponent))
    terms = signs * (exponent - top[:, None, None]).exp()
    weight = terms.sum(-1)
    size = terms.detach().abs().sum(-1)
    seen, seen_size = weight, size  # what z adds up
    if beta is not None:
        weight, size = _delta(weight, size, key, decay, beta, real)

    if divide:
        extra = eps * (-top).exp() if eps else torch.zeros_like(top)
        denominator = seen.sum(1) + extra
        at_true_scale = seen.sum(1) * top.exp() + eps if eps else denominator
        bad = (denominator == 0) | (at_true_scale == 0)
        if not eps:
            bad = bad | ~visible.any(1)
        safe = torch.where(bad, torch.ones_like(denominator), denominator)
        weight = weight / safe[:, None]
        size = size / safe.detach().abs()[:, None]
        seen_size = seen_size / safe.detach().abs()[:, None]
    else:
        weight = weight * top.exp()[:, None]
        size = size * top.exp()[:, None]
        bad = torch.zeros(n, dtype=torch.bool)
    bad = bad | no_query
    fill = math.nan if undefined == "nan" else 0.0
    output = weight @ value  # before the fill: NaN times a zero gradient is NaN
    weight = torch.where(bad[:, None], torch.full_like(weight, fill), weight)
    output = torch.where(bad[:, None], torch.full_like(output, fill), output)
    size = torch.where(bad[:, None], torch.zeros_like(size), size)
    spread = size.sum(1)
    scale = size @ value.detach().abs()
    if divide:  # a quotient also carries its denominator's relative error
        excess = (torch.where(bad, 0.0, seen_size.sum(1)) - 1).clamp_min(0)
        scale = scale + excess[:, None] * output.detach().abs().nan_to_num()
    return output, weight, bad, scale, spread


def hybrid(
    query: Tensor,  # (B, H, N, d)
    key: Tensor,  # (B, G, N, d); anything but NaN where hidden
    value: Tensor,  # (B, G, N, e)
    far: tuple[Features, Features] | None,  # of queries (B, H, N, r), whole, and of keys (B, G, N, r)
    *,
    scale: float,
    window: int,
    sinks: int = 0,
    span: int | None = None,
    log_weight: Tensor | None = None,  # (H,)
    log_decay: Tensor | None = None,  # (G,)
    key_mask: Tensor | None = None,  # (B, N)
    undefined: str = "nan",
) -> Result:
    """Hybrid attention, pair by pair: what a key weighs depends on where it stands, and on nothing else."""
    batch, heads, n, _ = query.shape
    groups = key.shape[1]
    real = torch.ones(batch, n, dtype=torch.bool) if key_mask is None else key_mask
    results = []
    for b, h in itertools.product(range(batch), range(heads)):
        g = h // (heads // groups)
        back = torch.arange(n)[:, None] - torch.arange(n)[None]  # how far key j is behind query i
        visible = (back >= 0) & real[b]
        if span is not None:
            visible = visible & (back < span)
        sink = real[b] & (real[b].cumsum(0) <= sinks)
        near = visible & ((back < window) | sink)
        signs = [torch.ones(n, n, 1, dtype=query.dtype)]
        logs = [(query[b, h] @ key[b, g].T * scale).masked_fill(~near, -math.inf)[..., None]]
        if far is not None:
            of_query, of_key = far
            # A token decays what left the window before it, and does so as it leaves itself.
            left = (real[b] & ~sink).cumsum(0)
            steps = torch.cat([left.new_zeros(min(window, n)), left[: max(n - window, 0)]])
            exponent = of_query.log[b, h][:, None] + of_key.log[b, g][None]
            if log_decay is not None:
                exponent = exponent + (log_decay[g] * (steps[:, None] - left[None]))[..., None]
            if log_weight is not None:
                exponent = exponent + log_weight[h]
            logs.append(exponent.masked_fill(~(visible & ~near)[..., None], -math.inf))
            signs.append(of_query.sign[b, h][:, None] * of_key.sign[b, g][None])
        exponent, sign = torch.cat(logs, -1), torch.cat(signs, -1)
        counts = torch.where(sign == 0, -math.inf, exponent.detach())
        top = counts.flatten(1).amax(1) if n else counts.new_zeros(0)
        top = torch.where(top.isfinite(), top, torch.zeros_like(top))
        # A zero feature counts for nothing, however large the others are, but keeps its gradient.
        terms = sign * (exponent - top[:, None, None]).clamp(max=600.0).exp()
        weight, size = terms.sum(-1), terms.detach().abs().sum(-1)
        denominator = weight.sum(1)
        bad = (denominator == 0) | ~visible.any(1)
        safe = torch.where(bad, torch.ones_like(denominator), denominator)
        weight, size = weight / safe[:, None], size / safe.detach().abs()[:, None]
        fill = math.nan if undefined == "nan" else 0.0
        output = torch.where(bad[:, None], fill, weight @ value[b, g])
        size = torch.where(bad[:, None], 0.0, size)
        spread = size.sum(1)
        unit = size @ value[b, g].detach().abs()
        unit = unit + (spread - 1).clamp_min(0)[:, None] * output.detach().abs().nan_to_num()
        results.append((output, weight, bad, unit, spread))
    stacked = [torch.stack(list(column)) for column in zip(*results, strict=True)]
    return Result(*(column.unflatten(0, (batch, heads)) for column in stacked))


def _writes(key: Features, decay: Tensor, beta: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """What tokens take from each other: beta_i k_i^T exp(D_ij) k_j for j < i; the same of absolute values.

    With this L, the tokens write U = (I + L)^-1 beta V.
    """
    m = key.sign.shape[0]
    resets = decay == -math.inf
    passed, fresh = decay.masked_fill(resets, 0.0).cumsum(0), resets.cumsum(0)
    earlier = torch.ones(m, m, dtype=torch.bool).tril(-1) & real[:, None] & real[None]
    alive = (fresh[:, None] == fresh[None]) & earlier[..., None]
    exponent = key.log[:, None] + key.log[None] + (passed[:, None] - passed[None])
    terms = key.sign[:, None] * key.sign[None] * exponent.masked_fill(~alive, -math.inf).exp()
    return beta[:, None] * terms.sum(-1), beta.detach()[:, None].abs() * terms.detach().abs().sum(-1)


def _delta(
    weight: Tensor,  # (N, M): q_i^T exp(D_ij) k_j, zero for hidden keys
    size: Tensor,  # (N, M): the same of absolute values
    key: Features,
    decay: Tensor,
    beta: Tensor,
    real: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weights of a delta rule, and their size: both (N, M).

    The weights are P (I + L)^-1 beta. Their size is what they can change by, to first order, when every
    product in P, L and beta changes by one unit of itself: |P| |T| (I + |L|) |T| beta with T = (I + L)^-1.
    The weights themselves would be too small a unit: a delta rule takes back what it wrote.
    """
    beta = beta.masked_fill(~real, 0.0)
    taken, taken_size = _writes(key, decay, beta, real)
    one = torch.eye(len(beta), dtype=beta.dtype)
    solved = torch.linalg.inv(one + taken)
    reach = solved.detach().abs()
    return weight @ solved * beta, size @ reach @ (one + taken_size) @ reach * beta.detach().abs()


def final_state(
    key: Features,  # (B, G, M, r)
    value: Tensor,  # (B, G, M, e)
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    normalize: str = "attention",
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S (B, G, r, e) and z (B, G, r) at their true scale, one write after another."""
    if "sum" in normalize:
        key, _, _ = sum_normalized(key)
    batch, groups, m, r = key.sign.shape
    decay = decay_to(log_decay, batch, groups, m, value)
    if beta is not None:
        real = torch.ones(batch, m, dtype=torch.bool) if key_mask is None else key_mask
        value = value.clone()
        for b, g in itertools.product(range(batch), range(groups)):
            strength = beta[b, g].masked_fill(~real[b], 0.0)
            one = Features(key.sign[b, g], key.log[b, g])
            taken, _ = _writes(one, decay[b, g].masked_fill(~real[b, :, None], 0.0), strength, real[b])
            value[b, g] = torch.linalg.inv(torch.eye(m) + taken) @ (strength[:, None] * value[b, g])
    decay = decay.exp()
    features = key.value()
    S = value.new_zeros(batch, groups, r, value.shape[-1])
    z = value.new_zeros(batch, groups, r)
    for b in range(batch):
        for j in range(m):
            if key_mask is not None and not key_mask[b, j]:
                continue
            S[b] = decay[b, :, j, :, None] * S[b] + features[b, :, j, :, None] * value[b, :, j, None, :]
            z[b] = decay[b, :, j] * z[b] + features[b, :, j]
    return S, z


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False
) -> Tensor:
    """Exact softmax attention, the thing that random features estimate."""
    scores = query @ key.mT * scale
    if causal:
        n = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ value
