"""Options into settings, inputs into features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from ._features import Features
from ._gates import check_beta, expand_decay
from ._normalize import NORMALIZATIONS, POLICIES, sum_normalize
from ._summary import Origin, Tail
from .feature_maps import FeatureMap, parameterless
from .rules import Decay, Delta, GatedDelta, Rule, Sum

_NAMED: dict[tuple[str, int], FeatureMap] = {}


def named_map(name: str, dim: int) -> FeatureMap:
    """The parameterless map of that name; one object serves all calls."""
    dim = int(dim)  # under torch.jit.trace sizes are tensors
    if (name, dim) not in _NAMED:
        _NAMED[name, dim] = parameterless(name, dim)
    return _NAMED[name, dim]


@dataclass(frozen=True)
class Settings:
    """Checked options that queries, keys and states of one call share."""

    map: FeatureMap
    rule: Rule
    normalize: str
    window: int | None
    eps: float
    undefined: str
    backend: str
    shared: bool = False  # the denominator is shared with weights that are no features' products

    @property
    def origin(self) -> Origin:
        """What a state made with these settings remembers."""
        return Origin(self.map.fingerprint, self.rule.name, self.normalize, self.window)

    @property
    def has_z(self) -> bool:
        """Whether a normalizer is kept."""
        return "attention" in self.normalize

    @property
    def needs_query_factor(self) -> bool:
        """Whether a factor common to a query's features does not cancel."""
        if self.shared:
            return True
        return "sum" not in self.normalize and (self.normalize == "none" or self.eps != 0.0)

    def accumulate(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of states and sums for inputs of ``dtype``."""
        return torch.float64 if dtype == torch.float64 or self.backend == "reference" else torch.float32


def settings(
    feature_map: FeatureMap | str,
    dim: int,
    *,
    rule: Rule | None = None,
    normalize: str | None = None,
    window: int | None = None,
    eps: float = 0.0,
    undefined: str = "nan",
    backend: str = "auto",
    like: Tensor | None = None,
) -> Settings:
    """Check options that need no tensors; ``like`` only tells where and in which dtype the call will run."""
    if isinstance(feature_map, str):
        feature_map = named_map(feature_map, dim)
    elif not isinstance(feature_map, FeatureMap):
        raise TypeError(
            "feature_map must be a name or a reassoc.feature_maps.FeatureMap, got "
            f"{type(feature_map).__name__}; derive a class with methods query and key"
        )
    if feature_map.dim != dim:
        raise ValueError(f"feature_map has dim={feature_map.dim}, queries and keys have size {dim}")
    rule = Sum() if rule is None else rule
    if not isinstance(rule, Sum | Decay | Delta | GatedDelta):
        raise TypeError(
            "rule must be rules.Sum(), rules.Decay(log_decay), rules.Delta(beta) or "
            f"rules.GatedDelta(beta, log_decay), got {rule!r}"
        )
    if rule.family == "delta" and normalize is None:
        raise ValueError(
            f"normalize must be named for rule {type(rule).__name__}: 'sum' (as published) and 'none' are "
            "usual; 'attention' shrinks outputs over time, since z adds up while S does not, and is there "
            "for comparison"
        )
    normalize = "attention" if normalize is None else normalize
    for name, got, known in (("normalize", normalize, NORMALIZATIONS), ("undefined", undefined, POLICIES)):
        if got not in known:
            raise ValueError(f"{name} must be one of {known}, got {got!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be a positive number of positions, got {window!r}")
    if window is not None and rule.family == "delta":
        raise ValueError(
            f"window cannot be used with rule {type(rule).__name__}: what a token wrote depends on all keys "
            "before it, so none can be left out later. Use rules.GatedDelta(beta, log_decay) to forget, or "
            "an additive rule"
        )
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}")
    eps = float(eps)
    if not -math.inf < eps < math.inf:  # math.isfinite would not trace
        raise ValueError(f"eps must be finite, got {eps!r}")
    if eps != 0.0 and "attention" not in normalize:
        raise ValueError(
            f"eps is added to the denominator, and normalize={normalize!r} has none: leave eps=0, or use "
            "normalize='attention'"
        )
    return Settings(feature_map, rule, normalize, window, eps, undefined, kernels.choose(backend, like))


class Queries(NamedTuple):
    """Queries ready for a kernel.

    Attributes:
        features: ``(B, H, N, r)``, with a logarithm exactly where keys have one.
        log_row: ``(B, H, N)`` without gradient: true features are ``exp(log_row)`` times these; ``None``: 0.
        empty: bool ``(B, H, N)``: rows that sum normalization leaves undefined; ``None``: no such thing.
    """

    features: Features
    log_row: Tensor | None
    empty: Tensor | None


def prepare_queries(query: Tensor, s: Settings, heads: int, dtype: torch.dtype, exponential: bool) -> Queries:
    """Features of queries ``(B, H, N, d)`` for ``heads`` key heads; ``exponential``: keys have logarithms."""
    x = query.to(dtype)
    count = x.shape[1]
    grouped = s.map.heads is not None and count != heads
    if grouped:
        x = x.unflatten(1, (heads, -1)).flatten(2, 3)
    features = check_features(s.map.query_features(x), s.map, x, "query")
    if s.needs_query_factor:
        factor = s.map.log_query_factor(x)
        if factor is not None:
            log = factor[..., None] if features.log is None else features.log + factor[..., None]
            features = Features(features.mantissa, log)
    if grouped:
        features = features.map(lambda t: t.unflatten(2, (count // heads, -1)).flatten(1, 2))
    empty: Tensor | None = None
    log_row: Tensor | None = None
    if "sum" in s.normalize:
        features, bad = sum_normalize(features, s.undefined, "query")
        empty = bad[..., 0]
    if exponential and features.log is None:
        zero = features.tensor.new_zeros(1).expand(*features.tensor.shape[:-1], 1)
        features = Features(features.mantissa, zero)
    elif features.log is not None and not exponential:
        # Bounded keys, and so a state without scale: the query's logarithm goes around the kernel.
        largest = features.log.detach().amax(-1)
        log_row = torch.where(largest == -torch.inf, 0.0, largest)
        weight = (features.log - log_row[..., None]).exp()
        features = Features(weight if features.mantissa is None else features.mantissa * weight, None)
    return Queries(features, log_row, empty)


def check_features(features: Features, phi: FeatureMap, x: Tensor, role: str) -> Features:
    """Refuse what a map of the caller's own should not return: another size, or another dtype."""
    sizes = {int(part.shape[-1]) for part in features if part is not None}  # tensors in torch.jit.trace
    if max(sizes, default=0) != phi.feature_dim or not sizes <= {1, phi.feature_dim}:
        raise ValueError(
            f"feature_map {phi.name}: {role} features must have size feature_dim={phi.feature_dim}, "
            f"got {sorted(sizes)}"
        )
    if any(part is not None and part.dtype != x.dtype for part in features):
        raise TypeError(f"feature_map {phi.name}: {role} features must keep the dtype {x.dtype} of the input")
    return features


def key_features(key: Tensor, mask: Tensor | None, s: Settings, dtype: torch.dtype) -> Features:
    """Features of keys ``(B, G, M, d)``; a hidden key may hold NaN."""
    visible = None if mask is None else mask[:, None, :, None]
    if visible is not None:
        key = key.masked_fill(~visible, 0.0)
    key = key.to(dtype)
    features = check_features(s.map.key_features(key), s.map, key, "key")
    if "sum" in s.normalize:
        features, _ = sum_normalize(features, s.undefined, "key", visible)
    if s.rule.family == "delta":  # not linear in the key: its true scale is what counts
        features = Features(features.value(), None)
    return features


class Keys:
    """Keys and values ready for a kernel, NaN behind the mask removed."""

    def __init__(
        self, key: Tensor, value: Tensor, mask: Tensor | None, s: Settings, dtype: torch.dtype
    ) -> None:
        log_decay = expand_decay(s.rule, key, s.map.feature_dim, dtype)
        beta = check_beta(s.rule, key, dtype)
        if mask is not None:
            hidden = ~mask[:, None, :, None]
            value = value.masked_fill(hidden, 0.0)
            log_decay = None if log_decay is None else log_decay.masked_fill(hidden, 0.0)
            beta = None if beta is None else beta.masked_fill(hidden[..., 0], 0.0)
        features = key_features(key, mask, s, dtype)
        value = value.to(dtype)
        if s.has_z:
            value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)
        self.features, self.value, self.log_decay, self.mask = features, value, log_decay, mask
        self.beta = beta

    def tail(self) -> Tail:
        """All positions in the form that a state keeps."""
        batch, _, length, _ = self.value.shape
        mask = self.mask
        if mask is None:
            mask = torch.ones(batch, length, dtype=torch.bool, device=self.value.device)
        return Tail(*self.features, self.value, self.log_decay, mask)

    def replace(self, tail: Tail) -> None:
        """Take positions from that form."""
        self.features = Features(tail.mantissa, tail.log)
        self.value, self.log_decay, self.mask = tail.value, tail.log_decay, tail.mask
