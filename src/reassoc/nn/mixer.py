"""What every attention layer shares: projections, convolution, norms, positions, gate."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import AttentionConfig
from .convolution import ShortConvolution
from .rotary import Rotary, rotate
from .state import Memory, MixerState


class Mixer(nn.Module):
    """Base of :class:`LinearAttention` and :class:`SoftmaxAttention`: tokens in, tokens out.

    Args:
        width: size of a token. config: see :class:`AttentionConfig`.
        causal: a token sees itself and earlier ones; otherwise all tokens, or with ``context`` all of that.
        layer: number of the layer, which random maps take their draw from.

    Raises:
        ValueError: sizes that do not fit, or positions and convolutions without an order of tokens.
    """

    def __init__(self, width: int, config: AttentionConfig, *, causal: bool = True, layer: int = 0) -> None:
        super().__init__()
        self.config, self.causal, self.layer = config, causal, layer
        self.dim, self.value_dim = config.sizes(width)
        heads, groups = config.heads, config.groups
        self.query = nn.Linear(width, heads * self.dim, bias=False)
        self.key_value = nn.Linear(width, groups * (self.dim + self.value_dim), bias=False)
        self.output = nn.Linear(heads * self.value_dim, width, bias=False)
        self.rotary: Rotary | None = None
        self.convolution: ShortConvolution | None = None
        if config.convolution:
            channels = heads * self.dim + groups * (self.dim + self.value_dim)
            self.convolution = ShortConvolution(channels, config.convolution)
        self.query_norm = nn.RMSNorm(self.dim) if config.query_key_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.dim) if config.query_key_norm else nn.Identity()
        self.output_norm = nn.RMSNorm(self.value_dim) if config.output_norm else nn.Identity()
        self.gate = nn.Linear(width, heads * self.value_dim, bias=False) if config.output_gate else None

    def _attend(
        self,
        query: Tensor,  # (B, H, N, d)
        key: Tensor,  # (B, G, M, d)
        value: Tensor,  # (B, G, M, e)
        source: Tensor,  # (B, M, width): what keys and values were made from
        angles: tuple[Tensor, Tensor] | None,
        key_mask: Tensor | None,
        memory: Memory | None,
        keep: bool,
    ) -> tuple[Tensor, Memory | None]:
        """``(B, H, N, e)``, and with ``keep`` what is remembered afterwards."""
        raise NotImplementedError

    def _step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        source: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """One token, ``(B, H, 1, e)``."""
        raise NotImplementedError

    def remember(self, context: Tensor, key_mask: Tensor | None = None) -> Memory:
        """A context ``(B, M, width)`` as a memory for :meth:`look_up`; ``key_mask``: bool ``(B, M)``."""
        raise NotImplementedError

    def _read(self, query: Tensor, memory: Memory) -> Tensor:
        """Queries ``(B, H, N, d)`` over all that is remembered, nothing written."""
        raise NotImplementedError

    @overload
    def forward(
        self, x: Tensor, *, context: Tensor | None = ..., key_mask: Tensor | None = ...,
        state: MixerState | None = ..., return_state: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, x: Tensor, *, context: Tensor | None = ..., key_mask: Tensor | None = ...,
        state: MixerState | None = ..., return_state: Literal[True],
    ) -> tuple[Tensor, MixerState]: ...  # fmt: skip

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: MixerState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, MixerState]:
        """Mix tokens.

        Args:
            x: ``(B, N, width)``. context: ``(B, M, width)`` for cross-attention; default x itself.
            key_mask: bool ``(B, M)``, True = real: hides keys, never queries.
            state: go on after what it has seen (causal). return_state: also return the state after.

        Returns:
            ``(B, N, width)``, and with ``return_state`` a :class:`MixerState`.

        Raises:
            ValueError: a state without causality, or a convolution over another context.
        """
        if not self.causal and (state is not None or return_state):
            raise ValueError("a state belongs to causal attention; for a context use remember and look_up")
        if context is not None and (self.causal or self.convolution is not None):
            raise ValueError("a context needs causal=False and convolution=0")
        source = x if context is None else context
        query, keys = self.query(x), self.key_value(source)
        recent = None
        if self.convolution is not None:
            before = None if state is None else state.recent
            mixed, recent = self.convolution(torch.cat([query, keys], dim=-1), key_mask, before)
            query, keys = mixed.split([query.shape[-1], keys.shape[-1]], dim=-1)
        angles = None
        if self.rotary is not None:
            start = None if state is None else state.memory.length
            angles = self.rotary(positions(x, key_mask, start))
        memory = None if state is None else state.memory
        heads = (self._queries(query, angles), *self._keys_values(keys, angles))
        mixed, after = self._attend(*heads, source, angles, key_mask, memory, return_state)
        output = self._merge(mixed, x)
        if not return_state:
            return output
        assert after is not None
        return output, MixerState(after, recent)

    def step(self, x: Tensor, state: MixerState) -> Tensor:
        """One token ``(B, 1, width)``: what the causal call gives at this position; ``state`` is advanced."""
        query, keys = self.query(x), self.key_value(x)
        if self.convolution is not None:
            mixed, recent = self.convolution(torch.cat([query, keys], dim=-1), None, state.recent)
            query, keys = mixed.split([query.shape[-1], keys.shape[-1]], dim=-1)
        angles = None if self.rotary is None else self.rotary(state.memory.length[:, None])
        heads = (self._queries(query, angles), *self._keys_values(keys, angles))
        mixed, memory = self._step(*heads, x, angles, state.memory)
        output = self._merge(mixed, x)
        state.memory = memory  # only now: an error above leaves the state as it was
        if self.convolution is not None:
            state.recent = recent
        return output

    def look_up(self, x: Tensor, memory: Memory) -> Tensor:
        """Tokens ``(B, N, width)`` over a remembered context (cross-attention while decoding)."""
        return self._merge(self._read(self._queries(self.query(x), None), memory), x)

    def _queries(self, query: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """``(B, N, H d) -> (B, H, N, d)``."""
        query = self.query_norm(query.unflatten(-1, (self.config.heads, -1)).transpose(1, 2))
        return query if angles is None or self.config.position != "rotary" else rotate(query, angles)

    def _keys_values(self, keys: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """``(B, M, G (d + e))`` to keys ``(B, G, M, d)`` and values ``(B, G, M, e)``."""
        groups = self.config.groups
        key, value = keys.split([groups * self.dim, groups * self.value_dim], dim=-1)
        key = self.key_norm(key.unflatten(-1, (groups, -1)).transpose(1, 2))
        if angles is not None and self.config.position == "rotary":
            key = rotate(key, angles)
        return key, value.unflatten(-1, (groups, -1)).transpose(1, 2)

    def _merge(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Heads ``(B, H, N, e)`` back to tokens ``(B, N, width)``."""
        mixed = self.output_norm(mixed).transpose(1, 2).flatten(2)
        if self.gate is not None:
            mixed = mixed * functional.silu(self.gate(x))
        output: Tensor = self.output(mixed)
        return output

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return f"causal={self.causal}, heads={self.config.heads}, key_heads={self.config.groups}"


def positions(x: Tensor, key_mask: Tensor | None, start: Tensor | None) -> Tensor:
    """Positions of tokens ``(B, N, width)``: ``(N,)``, or ``(B, N)`` where rows differ; padding has none.

    Args:
        key_mask: bool ``(B, N)``, True = real. start: int64 ``(B,)``, real tokens before these.
    """
    if key_mask is None:
        places = torch.arange(x.shape[1], device=x.device)
    else:
        places = (key_mask.cumsum(1) - 1).clamp(min=0)
    return places if start is None else places + start[:, None]
