"""Arguments into settings and features: every check that a user can run into is here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import kernels
from ._features import Features
from ._normalize import NORMALIZATIONS, POLICIES, sum_normalize
from ._summary import AttentionState, Origin, Tail
from .feature_maps import FeatureMap, parameterless
from .rules import Decay, Rule, Sum

_NAMED: dict[tuple[str, int], FeatureMap] = {}


def named_map(name: str, dim: int) -> FeatureMap:
    """The parameterless map of that name; one object serves all calls."""
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
) -> Settings:
    """Check options that need no tensors."""
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
    if not isinstance(rule, Sum | Decay):
        raise TypeError(f"rule must be rules.Sum() or rules.Decay(log_decay), got {rule!r}")
    normalize = "attention" if normalize is None else normalize
    for name, got, known in (("normalize", normalize, NORMALIZATIONS), ("undefined", undefined, POLICIES)):
        if got not in known:
            raise ValueError(f"{name} must be one of {known}, got {got!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be a positive number of positions, got {window!r}")
    eps = float(eps)
    if not math.isfinite(eps):
        raise ValueError(f"eps must be finite, got {eps!r}")
    if eps != 0.0 and "attention" not in normalize:
        raise ValueError(
            f"eps is added to the denominator, and normalize={normalize!r} has none: leave eps=0, or use "
            "normalize='attention'"
        )
    return Settings(feature_map, rule, normalize, window, eps, undefined, kernels.choose(backend))


def check_tensor(name: str, x: Tensor, sizes: tuple[int | str, ...], like: Tensor | None = None) -> None:
    """Rank, sizes (a string names a free one), floating dtype, and agreement with ``like``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    fits = x.ndim == len(sizes) and all(
        isinstance(s, str) or s == n for s, n in zip(sizes, x.shape, strict=True)
    )
    if not fits:
        wanted = "(" + ", ".join(str(s) for s in sizes) + ")"
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
    if like is not None and (x.dtype != like.dtype or x.device != like.device):
        raise TypeError(
            f"{name} must have the query's dtype and device ({like.dtype}, {like.device}), got "
            f"({x.dtype}, {x.device})"
        )


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    """A bool mask of keys; anything of another rank is not a mask of keys."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor, True = real key, got {got}; use mask.bool()")
    if tuple(mask.shape) != shape:
        hint = ""
        if mask.ndim > 2:
            hint = (
                "; a mask over pairs of positions cannot be used: no summary shared by all queries "
                "exists for it. Use causal=, window=, key_mask= or cu_seqlens=, or softmax attention"
            )
        raise ValueError(f"{name} must have shape (B, M) = {shape}, got {tuple(mask.shape)}{hint}")
    if mask.device != device:
        raise TypeError(f"{name} must be on {device}, got {mask.device}")


def key_heads(query_heads: int, heads: int, feature_map: FeatureMap) -> None:
    """Grouped heads fit, and the map's own heads too."""
    if heads == 0 or query_heads % heads:
        raise ValueError(
            f"query heads must be a multiple of key heads, got {query_heads} and {heads}; head h reads "
            "key head h // (H // G)"
        )
    check_map_heads(heads, feature_map)


def check_map_heads(heads: int, feature_map: FeatureMap) -> None:
    """A map with parameters per head needs exactly its own number of key heads."""
    if feature_map.heads is not None and feature_map.heads != heads:
        raise ValueError(f"feature_map has heads={feature_map.heads}, the keys have {heads} heads")


def query_features(
    query: Tensor, s: Settings, heads: int, dtype: torch.dtype
) -> tuple[Features, Tensor | None]:
    """Features ``(B, H, N, r)``, and bool ``(B, H, N)``: rows that sum normalization leaves undefined."""
    x = query.to(dtype)
    count = x.shape[1]
    grouped = s.map.heads is not None and count != heads
    if grouped:
        x = x.unflatten(1, (heads, -1)).flatten(2, 3)
    features = s.map.query_features(x)
    if s.needs_query_factor:
        factor = s.map.log_query_factor(x)
        if factor is not None:
            log = factor[..., None] if features.log is None else features.log + factor[..., None]
            features = Features(features.mantissa, log)
    if grouped:
        features = features.map(lambda t: t.unflatten(2, (count // heads, -1)).flatten(1, 2))
    empty = None
    if "sum" in s.normalize:
        features, bad = sum_normalize(features, s.undefined, "query")
        empty = bad[..., 0]
    return features, empty


class Keys:
    """Keys and values ready for a kernel, NaN behind the mask removed."""

    def __init__(
        self, key: Tensor, value: Tensor, mask: Tensor | None, s: Settings, dtype: torch.dtype
    ) -> None:
        log_decay = expand_decay(s.rule, key, s.map.feature_dim, dtype)
        if mask is not None:
            hidden = ~mask[:, None, :, None]
            key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
            log_decay = None if log_decay is None else log_decay.masked_fill(hidden, 0.0)
        features = s.map.key_features(key.to(dtype))
        if "sum" in s.normalize:
            features, _ = sum_normalize(features, s.undefined, "key")
        value = value.to(dtype)
        if s.has_z:
            value = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
        self.features, self.value, self.log_decay, self.mask = features, value, log_decay, mask

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


def expand_decay(rule: Rule, key: Tensor, features: int, dtype: torch.dtype) -> Tensor | None:
    """The gates as ``(B, G, M, 1 or r)``."""
    gate = rule.log_decay
    if gate is None:
        return None
    batch, heads, length, _ = key.shape
    shapes = {1: (heads,), 3: (batch, heads, length), 4: (batch, heads, length, features)}
    if tuple(gate.shape) != shapes[gate.ndim]:
        raise ValueError(
            f"log_decay must have shape (G,) = {(heads,)}, (B, G, M) = {(batch, heads, length)} or "
            f"(B, G, M, r) = {(batch, heads, length, features)}, got {tuple(gate.shape)}"
        )
    if gate.device != key.device:
        raise TypeError(f"log_decay must be on {key.device}, got {gate.device}")
    if gate.ndim == 1:
        gate = gate[None, :, None].expand(batch, heads, length)
    return (gate if gate.ndim == 4 else gate[..., None]).to(dtype)


def check_state(
    state: AttentionState,
    origin: Origin,
    shape: tuple[int, int, int, int],  # sequences, key heads, features, value columns
    device: torch.device,
) -> None:
    """The state belongs to this call."""
    if not isinstance(state, AttentionState):
        raise TypeError(
            f"state must be an AttentionState, got {type(state).__name__}; a bare tensor would lose z, "
            "the scale and the origin. Start with AttentionState.zeros or return_state=True"
        )
    state.origin.require(origin, "state")
    got = tuple(state._memory.shape)
    if got != shape:
        raise ValueError(
            f"state was made for (batch, key heads, features, value columns) = {got}, this call has {shape}"
            " (value columns count z; with cu_seqlens the batch is the number of sequences)"
        )
    if state._memory.device != device:
        raise TypeError(f"state must be on {device}, got {state._memory.device}; use state.to(...)")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a state is kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_tail(like: Tail, batch: int, length: int) -> Tail:
    """Positions before any sequence: hidden."""

    def blank(t: Tensor | None, fill: float = 0.0) -> Tensor | None:
        return None if t is None else t.new_full((batch, t.shape[1], length, t.shape[3]), fill)

    value = blank(like.value)
    assert value is not None
    mask = like.mask.new_zeros(batch, length)
    return Tail(blank(like.mantissa), blank(like.log, -torch.inf), value, blank(like.log_decay), mask)


def empty_state(
    feature_map: Any,
    batch: int,
    heads: int,
    value_dim: int,
    rule: Rule | None,
    normalize: str | None,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> AttentionState:
    """See :meth:`AttentionState.zeros`."""
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(
            "AttentionState.zeros needs a FeatureMap object; make one with reassoc.feature_maps.make"
        )
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"a state is float32 or float64, got {dtype}")
    check_map_heads(heads, feature_map)
    s = settings(feature_map, feature_map.dim, rule=rule, normalize=normalize, window=window)
    example = torch.zeros(1, heads, 1, feature_map.dim, dtype=dtype, device=device)
    with torch.no_grad():
        gates = None if rule is None else rule.log_decay
        per_feature = gates is not None and gates.ndim == 4
        width = feature_map.feature_dim if per_feature else 1
        gate = None if gates is None else example.new_zeros(1, heads, 1, width)
        features = feature_map.key_features(example)
    memory = example.new_zeros(batch, heads, feature_map.feature_dim, value_dim + s.has_z)
    scale = None
    if features.log is not None:
        scale = example.new_full((batch, heads, feature_map.feature_dim), -torch.inf)
    length = torch.zeros(batch, dtype=torch.int64, device=device)
    tail = None
    if window is not None:
        one = example.new_zeros(1, heads, 1, memory.shape[-1])
        mask = torch.ones(1, 1, dtype=torch.bool, device=device)
        tail = empty_tail(Tail(*features, one, gate, mask), batch, window - 1)
    return AttentionState(memory, scale, length, s.origin, tail)
