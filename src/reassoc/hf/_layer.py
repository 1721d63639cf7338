"""The part that stands in for softmax in one attention layer, with its parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._attention import linear_attention
from .._errors import InputError
from .._hybrid import hybrid_attention, hybrid_step
from .._hybrid_state import HybridState
from .._state import AttentionState
from .._stream import step
from ..feature_maps import FeatureMap, for_layer
from ..rules import Decay, Delta, GatedDelta, Rule, Sum
from ._settings import Conversion, Site

State = AttentionState | HybridState
SLOW = 1e-3  # a decay per token to start from: half is left after about 700 tokens


class KernelLayer(nn.Module):
    """Kernel or hybrid attention for one layer of a model: ``(B, H, N, d) -> (B, H, N, e)``.

    Parameters: those of the feature map, ``log_weight (H,)`` beside an exact window (see
    :func:`reassoc.hybrid_attention`), and one rate for each key head where the rule has some:
    ``decay (G,)``, the logarithm of minus the log decay, and ``strength (G,)``, the logit of beta.
    """

    def __init__(self, conversion: Conversion, site: Site, index: int) -> None:
        super().__init__()
        self.conversion, self.site = conversion, site
        self.feature_map: FeatureMap | None = None
        if conversion.feature_map is not None:
            self.feature_map = _build(conversion, site, index)
            if self.hybrid:
                self.log_weight = nn.Parameter(torch.zeros(site.heads))
        if conversion.rule in ("decay", "gated-delta"):
            self.decay = nn.Parameter(torch.full((site.key_heads,), math.log(SLOW)))
        if "delta" in conversion.rule:
            self.strength = nn.Parameter(torch.zeros(site.key_heads))

    @property
    def hybrid(self) -> bool:
        """Whether near keys are exact."""
        return self.conversion.window is not None and self.site.causal

    def _rule(self, key: Tensor) -> Rule:
        kind = self.conversion.rule
        if kind == "sum":
            return Sum()
        log_decay = -_exact(self.decay).exp() if "decay" in self._parameters else None
        if kind == "decay":
            assert log_decay is not None
            return Decay(log_decay)
        beta = _exact(self.strength).sigmoid()[None, :, None].expand(key.shape[:3])
        return Delta(beta) if log_decay is None else GatedDelta(beta, log_decay)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        state: State | None = None,
        keep: bool = False,
    ) -> tuple[Tensor, State | None]:
        """Output ``(B, H, N, e)`` and, to go on from, the state.

        Args:
            query: ``(B, H, N, d)``. key: ``(B, G, N, d)``. value: ``(B, G, N, e)``.
            key_mask: bool ``(B, N)``, True = real. A row that sees no key gives zero.
            state: of the tokens before; one token at a time advances it in place.
            keep: whether a state is wanted.
        """
        stepping = state is not None and query.shape[2] == 1
        rule = self._rule(key)
        if self.hybrid:
            o = self._near()
            weight = getattr(self, "log_weight", None) if o["feature_map"] is not None else None
            common: dict[str, Any] = {"log_weight": weight, "rule": rule, "key_mask": key_mask}
            common["undefined"] = "zero"
            phi = o.pop("feature_map")
            if stepping:
                assert isinstance(state, HybridState)
                return hybrid_step(query, key, value, phi, state, **common), state
            assert isinstance(state, HybridState | None)
            found = hybrid_attention(  # type: ignore[call-overload]
                query, key, value, phi, state=state, return_state=keep, scale=self.site.scale, **o, **common
            )
            return found if keep else (found, None)
        assert self.feature_map is not None and isinstance(state, AttentionState | None)
        options: dict[str, Any] = {"rule": rule, "key_mask": key_mask, "undefined": "zero"}
        options |= {"window": self.site.span, "normalize": "sum" if rule.family == "delta" else "attention"}
        if stepping:
            assert state is not None
            return step(query, key, value, self.feature_map, state, **options), state
        found = linear_attention(  # type: ignore[call-overload]
            query, key, value, self.feature_map, causal=self.site.causal, state=state, return_state=keep,
            **options,
        )  # fmt: skip
        return found if keep else (found, None)

    def _near(self) -> dict[str, Any]:
        """Map, window, sinks and span: a sliding window of the model's own hides what is further back."""
        window, span = self.conversion.window, self.site.span
        assert window is not None
        if span is None:
            return {"feature_map": self.feature_map, "window": window, "sinks": self.conversion.sinks}
        if span <= window or self.feature_map is None:
            return {"feature_map": None, "window": min(span, window)}
        return {"feature_map": self.feature_map, "window": window, "span": span}


def _exact(rate: Tensor) -> Tensor:
    """At least single precision: half of it cannot tell rates near zero apart."""
    return rate.to(torch.promote_types(rate.dtype, torch.float32))


def _build(conversion: Conversion, site: Site, index: int) -> FeatureMap:
    name, options = conversion.feature_map, dict(conversion.map_options)
    assert name is not None
    try:
        return for_layer(name, site.dim, site.key_heads, index, scale=site.scale, **options)
    except (ValueError, TypeError) as error:
        raise InputError(f"feature_map {name!r}: {error}") from error
