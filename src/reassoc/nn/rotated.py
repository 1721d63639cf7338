"""Rotary positions after the feature map: rotated features above the line, unrotated ones below.

    o_i = sum_j (R_i phi(q_i)).(R_j phi(k_j)) v_j / sum_j phi(q_i).phi(k_j)

Rotated features are signed, so their own sum could vanish; the denominator keeps the unrotated ones, which
for a nonnegative map are positive. The weights then no longer add up to one: that is the published form, and
why rotation before the map is the default.

Source: Su et al. 2024 (RoFormer), section 3.3, equation 19.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._attention import linear_attention
from .._features import Features
from .._normalize import divide, settle, sum_normalize
from .._state import AttentionState, state_dtype
from .._stream import step
from .._summary import Origin
from ..feature_maps import FeatureMap
from ..rules import Decay, Rule, Sum
from .config import AttentionConfig
from .heads import Heads
from .rotary import rotate


@dataclass
class RotatedState:
    """Two states: of the rotated features, and, where the normalization divides, of the unrotated ones."""

    numerator: AttentionState
    denominator: AttentionState | None
    origin: Origin  # of the map itself: the two states know features only

    @property
    def length(self) -> Tensor:
        """int64 ``(B,)``: real keys seen."""
        return self.numerator.length

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.numerator.nbytes + (0 if self.denominator is None else self.denominator.nbytes)

    def _map(self, function: Callable[[AttentionState], AttentionState]) -> RotatedState:
        below = None if self.denominator is None else function(self.denominator)
        return RotatedState(function(self.numerator), below, self.origin)

    def detach(self) -> RotatedState:
        """The same numbers, cut off from the gradient."""
        return self._map(AttentionState.detach)

    def clone(self) -> RotatedState:
        """A copy that steps do not touch."""
        return self._map(AttentionState.clone)

    def reorder(self, index: Tensor) -> RotatedState:
        """Pick sequences."""
        return self._map(lambda state: state.reorder(index))

    def _pack(self) -> tuple[dict[str, Tensor], str]:
        tensors: dict[str, Tensor] = {}
        origins: dict[str, Any] = {"map": vars(self.origin)}
        for name, state in (("numerator", self.numerator), ("denominator", self.denominator)):
            if state is not None:
                part, origins[name] = state._pack()
                tensors |= {f"{name}.{key}": tensor for key, tensor in part.items()}
        return tensors, json.dumps(origins)

    @classmethod
    def _unpack(cls, tensors: Mapping[str, Tensor], origin: str) -> RotatedState:
        def state(name: str, source: str) -> AttentionState:
            prefix = f"{name}."
            own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            return AttentionState._unpack(own, source)

        about = json.loads(origin)
        above = Origin(**about.pop("map"))
        found = {name: state(name, source) for name, source in about.items()}
        below = found["denominator"] if "attention" in above.normalize else None
        return cls(found["numerator"], below, above)


def rotated_attention(
    heads: Heads,  # angles for vectors of size r
    phi: FeatureMap,
    rule: Rule,
    config: AttentionConfig,
    *,
    key_mask: Tensor | None,
    state: RotatedState | None,
    return_state: bool,
    stepping: bool,
) -> tuple[Tensor, RotatedState | None]:
    """Causal attention with features rotated after the map; with ``stepping`` the state is advanced.

    Returns:
        ``(B, H, N, e)`` and the state, if asked for or stepped.
    """
    angles = heads.angles
    assert angles is not None
    groups, normalize, dtype = heads.key.shape[1], config.normalization, heads.query.dtype
    origin = Origin(phi.fingerprint, rule.name, normalize, config.window)
    if state is not None:
        state.origin.require(origin, "state")
        if stepping and config.undefined == "raise":
            state = state.clone()  # a row that is refused leaves the state as it was
    # As in the operator: features in float32 at least, autocast or not.
    query, key, value = (t.to(state_dtype(dtype)) for t in heads[:3])
    grouped = query.unflatten(1, (groups, -1)).flatten(2, 3)  # heads of the map are those of the keys
    with torch.autocast(query.device.type, enabled=False):
        queries, keys = phi.query(grouped), phi.key(key)
        factor = phi.log_query_factor(grouped)
        if factor is not None and "sum" not in normalize and (normalize == "none" or config.eps):
            queries = queries * factor[..., None].exp()  # what the map leaves out does not cancel here
    queries = queries.reshape(*query.shape[:3], phi.feature_dim)
    empty: Tensor | None = None
    if "sum" in normalize:
        queries, empty = _sum_normalized(queries, config.undefined, "query")
        keys, _ = _sum_normalized(keys, config.undefined, "key")

    def run(
        q: Tensor, k: Tensor, v: Tensor, rule: Rule, before: AttentionState | None
    ) -> tuple[Tensor, AttentionState | None]:
        # Bare features: the map and its normalization are applied already.
        options = {"rule": rule, "normalize": "none", "window": config.window, "key_mask": key_mask,
                   "backend": config.backend}  # fmt: skip
        if stepping:
            assert before is not None
            return step(q, k, v, "identity", before, **options), before  # type: ignore[arg-type]
        if return_state:
            return linear_attention(  # type: ignore[call-overload, no-any-return]
                q, k, v, "identity", causal=True, state=before, return_state=True, **options
            )
        return linear_attention(q, k, v, "identity", causal=True, state=before, **options), None  # type: ignore[call-overload]

    above = None if state is None else state.numerator
    output, numerator = run(rotate(queries, angles), rotate(keys, angles), value, rule, above)
    denominator: AttentionState | None = None
    if "attention" in normalize:
        # Under a delta rule too, z adds up: what the rule erases from S stays in z.
        gate = rule.log_decay
        adding: Rule = Sum() if gate is None else Decay(gate)
        below = None if state is None else state.denominator
        total, denominator = run(queries, keys, torch.ones_like(value[..., :1]), adding, below)
        rows = None if empty is None else empty[..., 0]
        output = divide(torch.cat([output, total], dim=-1), None, config.eps, config.undefined, rows)
    elif empty is not None:
        output = settle(output, empty, config.undefined, "a query's features are all zero")
    return output.to(dtype), None if numerator is None else RotatedState(numerator, denominator, origin)


def _sum_normalized(features: Tensor, undefined: str, what: str) -> tuple[Tensor, Tensor]:
    found, empty = sum_normalize(Features(features, None), undefined, what)
    return found.tensor, empty
