"""Multi-head linear attention as a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._attention import linear_attention
from .._state import AttentionState, state_dtype
from .._stream import read, step
from .._summarize import summarize
from ..feature_maps import FeatureMap, for_layer
from ..rules import Rule
from .config import AttentionConfig
from .gates import Gates
from .heads import Heads
from .mixer import Mixer
from .rotary import Rotary
from .rotated import RotatedState, rotated_attention
from .state import Memory


class LinearAttention(Mixer):
    """Multi-head kernel attention, ``(B, N, width) -> (B, N, width)``, with any map, rule and normalization.

    Args:
        width: size of a token. config: see :class:`AttentionConfig`.
        causal: needed by the delta rules. layer: which draw a random map takes.
        feature_map: a map of your own instead of the one that the config names.

    Raises:
        ValueError: sizes or combinations that cannot be.

    Example:
        >>> import torch
        >>> from reassoc.nn import AttentionConfig, LinearAttention
        >>> layer = LinearAttention(64, AttentionConfig(heads=4, rule="delta"))
        >>> y, state = layer(torch.randn(2, 100, 64), return_state=True)
        >>> layer.step(torch.randn(2, 1, 64), state).shape
        torch.Size([2, 1, 64])

    Sources: Katharopoulos et al. 2020; Schlag et al. 2021 for the delta rule.
    """

    memory_kind: type[Memory] = AttentionState

    def __init__(
        self,
        width: int,
        config: AttentionConfig,
        *,
        causal: bool = True,
        layer: int = 0,
        feature_map: FeatureMap | None = None,
    ) -> None:
        super().__init__(width, config, causal=causal, layer=layer)
        if config.mixer != "linear":
            raise ValueError(f"LinearAttention needs mixer='linear', got {config.mixer!r}")
        if not causal and ("delta" in config.rule or config.window or config.position == "rotary-after"):
            raise ValueError(
                f"causal=False has no order of tokens, which rule={config.rule!r}, window={config.window}, "
                f"position={config.position!r} needs: use rule='sum', no window, position 'none' or 'rotary'"
            )
        self.feature_map = _build(config, self.dim, layer) if feature_map is None else feature_map
        self.gates = Gates(width, config, self.feature_map.feature_dim)
        after = config.position == "rotary-after"
        if after:
            self.memory_kind = RotatedState
        if config.position != "none":
            self.rotary = Rotary(self.feature_map.feature_dim if after else self.dim, config.rotary_base)

    def _options(self, rule: Rule) -> dict[str, Any]:
        c = self.config
        return {"rule": rule, "normalize": c.normalization, "window": c.window, "eps": c.eps,
                "undefined": c.undefined, "backend": c.backend}  # fmt: skip

    def _attend(
        self,
        heads: Heads,
        key_mask: Tensor | None,
        memory: Memory | None,
        keep: bool,
    ) -> tuple[Tensor, Memory | None]:
        rule = self.gates(heads.source)
        if self.config.position == "rotary-after":
            assert isinstance(memory, RotatedState | None)
            return rotated_attention(
                heads, self.feature_map, rule, self.config, key_mask=key_mask, state=memory,
                return_state=keep, stepping=False,
            )  # fmt: skip
        found = linear_attention(  # type: ignore[call-overload]
            *heads[:3], self.feature_map, causal=self.causal, key_mask=key_mask, state=memory,
            return_state=keep, **self._options(rule),
        )  # fmt: skip
        return found if keep else (found, None)

    def _step(self, heads: Heads, memory: Memory) -> tuple[Tensor, Memory]:
        rule = self.gates(heads.source)
        if self.config.position == "rotary-after":
            assert isinstance(memory, RotatedState)
            output, stepped = rotated_attention(
                heads, self.feature_map, rule, self.config, key_mask=None, state=memory, return_state=False,
                stepping=True,
            )  # fmt: skip
            assert stepped is not None
            return output, stepped
        assert isinstance(memory, AttentionState)
        return step(*heads[:3], self.feature_map, memory, **self._options(rule)), memory

    def remember(self, context: Tensor, key_mask: Tensor | None = None) -> AttentionState:
        """State of a context ``(B, M, width)``, for :meth:`Mixer.look_up`; ``key_mask`` bool ``(B, M)``."""
        self._require_unordered()
        self._check("context", context, ("B", "M"))
        key, value = self._keys_values(self.key_value(context), None)
        rule = self.gates(context)
        options = {"rule": rule, "normalize": self.config.normalization}
        batch, groups, _, columns = value.shape
        kept = state_dtype(value.dtype)
        start = AttentionState.zeros(
            self.feature_map, batch, groups, columns, dtype=kept, device=value.device, **options
        )
        backend = self.config.backend
        return start.apply(
            summarize(key, value, self.feature_map, key_mask=key_mask, backend=backend, **options)
        )

    def _read(self, query: Tensor, memory: Memory) -> Tensor:
        assert isinstance(memory, AttentionState)
        return read(query, self.feature_map, memory, eps=self.config.eps, undefined=self.config.undefined)


def _build(config: AttentionConfig, dim: int, layer: int) -> FeatureMap:
    return for_layer(config.feature_map, dim, config.groups, layer, **config.map_options)
