"""Multi-head attention: some heads linear, others softmax over a local window."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .fast_attention import FastAttention
from .kernels import RELU
from .pieces import OperatorMemory, spans
from .positions import apply_rotary_pos_emb, rotate
from .stabilized import StabilizedMemory


class Attention(nn.Module):
    """Queries from the tokens, keys and values from them or from a context.

    Args:
        dim: size of a token, a multiple of ``heads``. causal: see :class:`FastAttention`.
        heads: number of heads. dim_head: size of each; ``None``: ``dim // heads``.
        local_heads: how many of them are softmax over windows of ``local_window_size`` tokens.
        nb_features, generalized_attention, kernel_fn, no_projection, legacy: see :class:`FastAttention`.
        feature_redraw_interval: there for old calls; :class:`ProjectionUpdater` redraws.
        dropout: of the output. qkv_bias, attn_out_bias: biases of the linear layers.

    Raises:
        ValueError: sizes that do not fit. ImportError: local heads without the package local-attention.
    """

    def __init__(
        self,
        dim: int,
        causal: bool = False,
        heads: int = 8,
        dim_head: int | None = 64,
        local_heads: int = 0,
        local_window_size: int = 256,
        nb_features: int | None = None,
        feature_redraw_interval: int | None = 1000,
        generalized_attention: bool = False,
        kernel_fn: Callable[[Tensor], Tensor] = RELU,
        dropout: float = 0.0,
        no_projection: bool = False,
        qkv_bias: bool = False,
        attn_out_bias: bool = True,
        *,
        legacy: str | None = None,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads={heads}, got {dim}")
        if not 0 <= local_heads <= heads:
            raise ValueError(f"local_heads must be from 0 to heads={heads}, got {local_heads}")
        dim_head = dim // heads if dim_head is None else dim_head
        inner = dim_head * heads
        self.fast_attention = FastAttention(
            dim_head, nb_features, causal=causal, generalized_attention=generalized_attention,
            kernel_fn=kernel_fn, no_projection=no_projection, legacy=legacy,
        )  # fmt: skip
        self.heads = heads
        self.global_heads = heads - local_heads
        self.local_attn = None
        if local_heads:
            self.local_attn = _local_attention(local_window_size, causal, dropout, dim_head, local_heads)
        self.to_q = nn.Linear(dim, inner, bias=qkv_bias)
        self.to_k = nn.Linear(dim, inner, bias=qkv_bias)
        self.to_v = nn.Linear(dim, inner, bias=qkv_bias)
        self.to_out = nn.Linear(inner, dim, bias=attn_out_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,  # (B, N, dim)
        pos_emb: Tensor | None = None,  # (1, N, dim_head): sines, then cosines
        context: Tensor | None = None,  # (B, M, dim)
        mask: Tensor | None = None,  # bool (B, N), True = real
        context_mask: Tensor | None = None,  # bool (B, M), True = real
        **kwargs: Any,
    ) -> Tensor:  # (B, N, dim)
        """Attention to the context, or without one to the tokens themselves.

        ``context_mask`` is for the keys of linear heads; without a context ``mask`` stands in for it.
        """
        cross = context is not None
        keys = x if context is None else context
        key_mask = mask if context_mask is None and not cross else context_mask
        memory = self._memory(x, keys)
        if memory is not None:
            return self._dropped(self._in_pieces(x, keys, key_mask, None if cross else pos_emb, memory))
        q, k, v = self._heads(self.to_q, x), self._heads(self.to_k, keys), self._heads(self.to_v, keys)
        outputs = []
        if self.global_heads:
            split = [t[:, : self.global_heads] for t in (q, k, v)]
            if pos_emb is not None and not cross:
                split[:2] = apply_rotary_pos_emb(split[0], split[1], pos_emb)
            outputs.append(self.fast_attention(*split, key_mask))
        if self.local_attn is not None:
            if cross:
                raise ValueError("local heads need queries and keys at the same positions, so no context")
            split = [t[:, self.global_heads :] for t in (q, k, v)]
            outputs.append(self.local_attn(*split, input_mask=mask))
        return self._dropped(self._joined(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)))

    def _memory(self, x: Tensor, keys: Tensor) -> OperatorMemory | StabilizedMemory | None:
        """What sums up the keys; ``None``: they are taken at once."""
        whole = self.local_attn is not None or keys.shape[0] != x.shape[0] or not keys.shape[1]
        if whole or self._watched():
            return None
        return self.fast_attention.memory(x.shape[0] * self.heads, max(x.shape[1], keys.shape[1]), x.dtype)

    def _in_pieces(
        self,
        x: Tensor,
        keys: Tensor,
        key_mask: Tensor | None,
        pos_emb: Tensor | None,
        memory: OperatorMemory | StabilizedMemory,
    ) -> Tensor:
        """Without gradients: the keys summed up first, then the queries."""
        for part in spans(*keys.shape[:2]):
            k, v = (self._heads(linear, keys[:, part]) for linear in (self.to_k, self.to_v))
            k = k if pos_emb is None else rotate(k, pos_emb[:, part])
            with torch.autocast(x.device.type, enabled=False):
                memory.add(k, v, None if key_mask is None else key_mask[:, part])
        outputs = []
        for part in spans(*x.shape[:2]):
            q = self._heads(self.to_q, x[:, part])
            q = q if pos_emb is None else rotate(q, pos_emb[:, part])
            with torch.autocast(x.device.type, enabled=False):
                read = memory.read(q)
            outputs.append(self._joined(read))
        return torch.cat(outputs, dim=1)

    def _watched(self) -> bool:
        """Whether somebody's hook, or forward in place of ours, wants to see whole calls."""
        if type(self.fast_attention) is not FastAttention or "forward" in vars(self.fast_attention):
            return True
        if _global_forward_hooks or _global_forward_pre_hooks:
            return True
        return any(m._forward_hooks or m._forward_pre_hooks for m in self.modules() if m is not self)

    def _heads(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """``(B, N, dim) -> (B, H, N, dim_head)``."""
        heads: Tensor = linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads

    def _joined(self, heads: Tensor) -> Tensor:
        """``(B, H, N, dim_head) -> (B, N, dim)``."""
        out: Tensor = self.to_out(heads.transpose(1, 2).flatten(2))
        return out

    def _dropped(self, output: Tensor) -> Tensor:
        """Dropout of the whole, so that the same seed drops the same whichever way was taken."""
        dropped: Tensor = self.dropout(output)
        return dropped


class SelfAttention(Attention):
    """:class:`Attention` that takes no context."""

    def forward(self, *args: Any, context: Tensor | None = None, **kwargs: Any) -> Tensor:
        """As :meth:`Attention.forward`; ``ValueError`` if there is a context."""
        if context is not None:
            raise ValueError("SelfAttention takes no context; use CrossAttention")
        return super().forward(*args, **kwargs)


class CrossAttention(Attention):
    """:class:`Attention` that needs a context."""

    def forward(self, *args: Any, context: Tensor | None = None, **kwargs: Any) -> Tensor:
        """As :meth:`Attention.forward`; ``ValueError`` without a context."""
        if context is None:
            raise ValueError("CrossAttention needs a context; use SelfAttention")
        return super().forward(*args, **{**kwargs, "context": context})


def _local_attention(window: int, causal: bool, dropout: float, dim_head: int, heads: int) -> nn.Module:
    """The module of the package local-attention, set up as in the original."""
    try:
        package = import_module("local_attention")
    except ImportError as error:
        raise ImportError("local attention heads need a package: pip install local-attention") from error
    module: nn.Module = package.LocalAttention(
        window_size=window,
        causal=causal,
        autopad=True,
        dropout=dropout,
        look_forward=int(not causal),
        rel_pos_emb_config=(dim_head, heads),
    )
    return module
