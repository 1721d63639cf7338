"""What every attention layer shares: projections, convolution, norms, positions, gate."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._checks import check_mask, check_tensor
from .config import AttentionConfig
from .convolution import ShortConvolution
from .heads import HeadNorm, Heads
from .rotary import Rotary, rotate
from .state import Memory, MixerState


class Mixer(nn.Module):
    """Base of :class:`LinearAttention` and :class:`SoftmaxAttention`: tokens in, tokens out.

    Args:
        width: size of a token. config: see :class:`AttentionConfig`.
        causal: a token sees itself and earlier ones; otherwise all tokens, or with ``context`` all of that.
        layer: number of the layer, which random maps take their draw from.

    Raises:
        ValueError: sizes that do not fit.
    """

    memory_kind: type[Memory]

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
        self.query_norm = HeadNorm(self.dim) if config.query_key_norm else nn.Identity()
        self.key_norm = HeadNorm(self.dim) if config.query_key_norm else nn.Identity()
        self.output_norm = HeadNorm(self.value_dim) if config.output_norm else nn.Identity()
        self.gate = nn.Linear(width, heads * self.value_dim, bias=False) if config.output_gate else None

    def _attend(
        self,
        heads: Heads,
        key_mask: Tensor | None,
        memory: Memory | None,
        keep: bool,
    ) -> tuple[Tensor, Memory | None]:
        """``(B, H, N, e)``, and with ``keep`` what is remembered afterwards."""
        raise NotImplementedError

    def _step(self, heads: Heads, memory: Memory) -> tuple[Tensor, Memory]:
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
            ValueError: a state without causality or of another layer, a context beside causality,
                convolution or rotary positions, or shapes that do not fit.
        """
        self._check("x", x, ("B", "N"))
        if not self.causal and (state is not None or return_state):
            raise ValueError("a state belongs to causal attention; for a context use remember and look_up")
        source = x
        if context is not None:
            self._require_unordered()
            self._check("context", context, (x.shape[0], "M"))
            source = context
        check_mask("key_mask", key_mask, (source.shape[0], source.shape[1]), x.device)
        if state is not None:
            self._check_state(state, x.shape[0])
        memory = None if state is None else state.memory
        angles = None
        if self.rotary is not None:
            start = None if memory is None else memory.length
            angles = self.rotary(positions(x, key_mask, start))
        heads, recent = self._heads(x, source, angles, key_mask, None if state is None else state.recent)
        mixed, after = self._attend(heads, key_mask, memory, return_state)
        output = self._merge(mixed, x)
        if not return_state:
            return output
        assert after is not None
        return output, MixerState(after, recent)

    def step(self, x: Tensor, state: MixerState) -> Tensor:
        """One token ``(B, 1, width)``: what the causal call gives at this position; ``state`` is advanced."""
        self._check("x", x, ("B", 1))
        self._check_state(state, x.shape[0])
        angles = None if self.rotary is None else self.rotary(state.memory.length[:, None])
        heads, recent = self._heads(x, x, angles, None, state.recent)
        mixed, memory = self._step(heads, state.memory)
        output = self._merge(mixed, x)
        state.memory, state.recent = memory, recent  # only now: an error above leaves the state as it was
        return output

    def look_up(self, x: Tensor, memory: Memory) -> Tensor:
        """Tokens ``(B, N, width)`` over a remembered context (cross-attention while decoding)."""
        self._require_unordered()
        self._check("x", x, ("B", "N"))
        return self._merge(self._read(self._queries(self.query(x), None), memory), x)

    def _check(self, name: str, x: Tensor, sizes: tuple[int | str, ...]) -> None:
        check_tensor(name, x, (*sizes, self.query.in_features))

    def _check_state(self, state: MixerState, batch: int) -> None:
        """A state of this layer, as far as shapes tell; the memory knows its map and rule."""
        if not isinstance(state, MixerState):
            raise TypeError(f"state must be a MixerState of return_state=True, got {type(state).__name__}")
        if not isinstance(state.memory, self.memory_kind):
            raise ValueError(
                f"state holds {type(state.memory).__name__}, this layer needs {self.memory_kind.__name__}: "
                "it was made by another model"
            )
        wanted = None
        if self.convolution is not None:
            wanted = (batch, self.convolution.kernel - 1, self.convolution.channels)
        recent = None if state.recent is None else tuple(state.recent.shape)
        if recent != wanted or state.memory.length.shape[0] != batch:
            raise ValueError(
                f"state is of {state.memory.length.shape[0]} sequences and recent inputs {recent}, this call "
                f"needs {batch} and {wanted}: it was made by another model, or for another batch"
            )

    def _require_unordered(self) -> None:
        if self.causal or self.convolution is not None or self.rotary is not None:
            raise ValueError(
                "a context needs causal=False, convolution=0 and position='none': the places of its tokens "
                "are not those of x"
            )

    def _heads(
        self,
        x: Tensor,
        source: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        key_mask: Tensor | None,
        recent: Tensor | None,
    ) -> tuple[Heads, Tensor | None]:
        """Queries of x, keys and values of the source; and what a convolution will need of them next."""
        query, keys = self.query(x), self.key_value(source)
        if self.convolution is not None:
            mixed, recent = self.convolution(torch.cat([query, keys], dim=-1), key_mask, recent)
            query, keys = mixed.split([query.shape[-1], keys.shape[-1]], dim=-1)
        key, value = self._keys_values(keys, angles)
        return Heads(self._queries(query, angles), key, value, source, angles), recent

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
