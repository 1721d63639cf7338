"""A cache layer of constant size for ``generate``: the one file that knows transformers' cache interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from .._errors import InputError
from ._layer import State

_TAG = "_reassoc_cache_layer"  # on a key tensor: the way from a cache to the attention function


class KernelCacheLayer(CacheLayerMixin):
    """What one converted layer remembers, in place of its keys and values.

    It stands in a cache of transformers' own (``DynamicCache``), where a converted layer puts it before
    its first token. Keys and values are handed through, and the attention function advances the state.

    Attributes:
        state: an :class:`reassoc.AttentionState` or :class:`reassoc.HybridState`; ``None`` before a token.
        positions: tokens seen, padding included.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.positions = 0

    @property
    def nbytes(self) -> int:
        """Bytes held: bounded, whatever the length."""
        return 0 if self.state is None else self.state.nbytes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Only the new keys and values, on their way to the attention function, which finds this layer."""
        self.is_initialized = True
        self.positions += key_states.shape[2]
        key_states = key_states.view_as(key_states)  # a tensor of its own to carry the tag
        setattr(key_states, _TAG, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask is made for."""
        return self.positions + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.positions

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.positions, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Pick sequences: beam search."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if self.state is not None:
            batch = self.state.length.shape[0]
            device = self.state.length.device
            self.state = self.state.reorder(torch.arange(batch, device=device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a token that was written cannot be taken back out of a sum."""
        if tokens_to_remove:
            raise InputError(
                "a state of constant size cannot forget its last tokens, which assisted decoding and prompt "
                "lookup ask for: generate without them, or keep a copy (copy.deepcopy) of the cache"
            )

    def offload(self) -> None:
        """Nothing worth moving."""

    def prefetch(self) -> None:
        """Nothing was moved."""


def of_key(key: Tensor) -> KernelCacheLayer | None:
    """The cache layer that handed this key on, if any."""
    return getattr(key, _TAG, None)


def take_place(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a converted attention module runs: put a :class:`KernelCacheLayer` into the cache it is given.

    A forward pre-hook, so that ``generate`` and every user of a plain cache get the constant size unasked.
    """
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if cache is None:
        return
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    index: Any = module.layer_idx
    if not isinstance(cache, Cache) or not isinstance(index, int):
        raise InputError(f"{type(module).__name__} got a {type(cache).__name__}; expected a DynamicCache")
    make = cache.layer_class_to_replicate
    while len(cache.layers) <= index and make is not None:
        cache.layers.append(make())
    there = cache.layers[index]
    if isinstance(there, KernelCacheLayer):
        return
    if there.get_seq_length():
        raise InputError(
            f"the cache holds {there.get_seq_length()} tokens of another model at layer {index}; start with "
            "a new cache"
        )
    cache.layers[index] = KernelCacheLayer()


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache holds: states of converted layers, keys and values of the others."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    total = 0
    for layer in cache.layers:
        if isinstance(layer, KernelCacheLayer):
            total += layer.nbytes
        else:
            parts = (getattr(layer, "keys", None), getattr(layer, "values", None))
            total += sum(t.numel() * t.element_size() for t in parts if isinstance(t, Tensor))
    return total
