"""Softmax attention of the same shape: the twin to compare with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .._checks import check_mask
from .cache import KeyValueCache
from .config import AttentionConfig
from .heads import Heads
from .mixer import Mixer
from .rotary import Rotary
from .state import Memory


class SoftmaxAttention(Mixer):
    """Multi-head softmax attention, with everything around it as in :class:`LinearAttention`.

    Uses ``torch.nn.functional.scaled_dot_product_attention``. The map, rule and normalization of the
    config do not matter to it. Its memory, a :class:`KeyValueCache`, grows with every token.

    Args:
        width, config, causal, layer: as for :class:`LinearAttention`.

    Source: Vaswani et al. 2017.
    """

    memory_kind = KeyValueCache

    def __init__(self, width: int, config: AttentionConfig, *, causal: bool = True, layer: int = 0) -> None:
        super().__init__(width, config, causal=causal, layer=layer)
        if config.mixer != "softmax":
            raise ValueError(f"SoftmaxAttention needs mixer='softmax', got {config.mixer!r}")
        if not causal and config.window:
            raise ValueError(f"causal=False has no order of tokens, which window={config.window} needs")
        if config.position != "none":
            self.rotary = Rotary(self.dim, config.rotary_base)

    def _attend(
        self,
        heads: Heads,
        key_mask: Tensor | None,
        memory: Memory | None,
        keep: bool,
    ) -> tuple[Tensor, Memory | None]:
        assert isinstance(memory, KeyValueCache | None)
        cache = _cache(heads.key, heads.value, key_mask)
        if memory is not None:
            cache = memory.append(cache.key, cache.value, key_mask)
        return self._over(heads.query, cache), cache if keep else None

    def _step(self, heads: Heads, memory: Memory) -> tuple[Tensor, Memory]:
        assert isinstance(memory, KeyValueCache)
        cache = memory.append(heads.key, heads.value, None)
        return self._over(heads.query, cache), cache

    def remember(self, context: Tensor, key_mask: Tensor | None = None) -> KeyValueCache:
        """Keys and values of a context ``(B, M, width)``, for :meth:`Mixer.look_up`."""
        self._require_unordered()
        self._check("context", context, ("B", "M"))
        check_mask("key_mask", key_mask, (context.shape[0], context.shape[1]), context.device)
        return _cache(*self._keys_values(self.key_value(context), None), key_mask)

    def _read(self, query: Tensor, memory: Memory) -> Tensor:
        assert isinstance(memory, KeyValueCache)
        return self._over(query, memory)

    def _over(self, query: Tensor, cache: KeyValueCache) -> Tensor:
        """Queries ``(B, H, N, d)``, the last of them at the last key where causal: ``(B, H, N, e)``."""
        queries, keys = query.shape[2], cache.key.shape[2]
        plain = self.causal and queries == keys and cache.mask is None and self.config.window is None
        visible = None if plain else self._visible(queries, keys, cache.mask, query.device)
        blind = None
        if visible is not None and cache.mask is not None:
            # A row without a visible key has no softmax: it looks at all keys, and then gives zero.
            blind = ~visible.any(-1, keepdim=True)
            visible = visible | blind
        output = functional.scaled_dot_product_attention(
            query, cache.key, cache.value, attn_mask=visible, is_causal=plain,
            enable_gqa=self.config.groups != self.config.heads,
        )  # fmt: skip
        return output if blind is None else output.masked_fill(blind, 0.0)

    def _visible(self, queries: int, keys: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Bool ``(N, M)`` or ``(B, 1, N, M)``: which keys a query sees; ``None``: all."""
        visible: Tensor | None = None
        if self.causal and (queries > 1 or self.config.window is not None):
            ahead = (
                torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
            )
            visible = ahead <= 0
            if self.config.window is not None:
                visible = visible & (ahead > -self.config.window)
        if mask is None:
            return visible
        hidden = mask[:, None, None, :].expand(-1, 1, queries, -1)
        return hidden if visible is None else hidden & visible


def _cache(key: Tensor, value: Tensor, mask: Tensor | None) -> KeyValueCache:
    """Keys ``(B, G, M, d)`` and values; what is hidden may be NaN, which no weight of zero would remove."""
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
        mask = mask.clone()  # the caller's own, and one for all layers
    return KeyValueCache(key, value, mask)
