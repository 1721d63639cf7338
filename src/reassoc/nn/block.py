"""The Transformer block: attention and a feed-forward network, each added to the residual stream."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from .config import AttentionConfig
from .linear import LinearAttention
from .mixer import Mixer
from .softmax import SoftmaxAttention
from .state import MixerState


def attention(width: int, config: AttentionConfig, *, causal: bool = True, layer: int = 0) -> Mixer:
    """The attention layer that a config names; arguments as for :class:`LinearAttention`."""
    kind = LinearAttention if config.mixer == "linear" else SoftmaxAttention
    return kind(width, config, causal=causal, layer=layer)


class FeedForward(nn.Module):
    """``(..., width) -> (..., width)`` through a hidden layer with GELU.

    Source: Vaswani et al. 2017; Hendrycks and Gimpel 2016.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Every token by itself."""
        output: Tensor = self.down(functional.gelu(self.up(x)))
        return output


class Block(nn.Module):
    """A pre-norm Transformer block, ``(B, N, width) -> (B, N, width)``.

    Args:
        width: size of a token. hidden: of the feed-forward network. dropout: of what each half adds.
        config, causal, layer: of the attention.
        cross: a second attention over a context in between.

    Source: Vaswani et al. 2017, with the norms first (Xiong et al. 2020).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        config: AttentionConfig,
        *,
        causal: bool = True,
        layer: int = 0,
        dropout: float = 0.0,
        cross: Mixer | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention(width, config, causal=causal, layer=layer)
        self.cross_norm = None if cross is None else nn.LayerNorm(width)
        self.cross = cross
        self.feed_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        state: MixerState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, MixerState | None]:
        """One block over tokens ``(B, N, width)``; arguments as for :meth:`Mixer.forward`.

        Args:
            context: ``(B, M, width)`` for the cross-attention. context_mask: bool ``(B, M)``, True = real.

        Returns:
            ``(B, N, width)``, and the state if asked for.
        """
        after: MixerState | None = None
        options: dict[str, Any] = {"key_mask": key_mask, "state": state}
        mixed = self.attention(self.attention_norm(x), return_state=return_state, **options)
        if return_state:
            mixed, after = mixed
        x = x + self.dropout(mixed)
        if self.cross is not None and self.cross_norm is not None:
            looked = self.cross(self.cross_norm(x), context=context, key_mask=context_mask)
            x = x + self.dropout(looked)
        return x + self.dropout(self.feed_forward(self.feed_norm(x))), after

    def step(self, x: Tensor, state: MixerState, memory: Any = None) -> Tensor:
        """One token ``(B, 1, width)``; ``state`` is advanced. ``memory``: of ``cross.remember``."""
        x = x + self.attention.step(self.attention_norm(x), state)
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross.look_up(self.cross_norm(x), memory)
        output: Tensor = x + self.feed_forward(self.feed_norm(x))
        return output


def initialize(module: nn.Module, layers: int) -> None:
    """Small weights, smaller still where a residual branch ends, so that depth adds no variance.

    Call it on a whole model, before anything is loaded. Gates, convolutions and maps keep their own start.

    Source: Radford et al. 2019 (GPT-2), section 2.3.
    """
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        elif isinstance(part, Mixer):
            for linear in (part.query, part.key_value):
                nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(part.output.weight, std=0.02 * (2 * layers) ** -0.5)
        elif isinstance(part, FeedForward):
            nn.init.xavier_uniform_(part.up.weight)
            nn.init.normal_(part.down.weight, std=0.02 * (2 * layers) ** -0.5)
            for linear in (part.up, part.down):
                nn.init.zeros_(linear.bias)
