"""An encoder-decoder with kernel attention in self- and cross-attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from .block import Block, attention, initialize
from .config import ModelConfig, check_count
from .state import MixerState


@dataclass(frozen=True)
class EncoderDecoderConfig(ModelConfig):
    """Everything that decides the shape of an :class:`EncoderDecoder`.

    The rule and convolution of its attention hold for the decoder's self-attention; a whole source has no
    order to forget or overwrite by, so encoder and cross-attention sum.

    Attributes:
        source_vocabulary, target_vocabulary: numbers of token ids. The others: see :class:`ModelConfig`.

    Raises:
        ValueError: sizes that cannot be, or positions that an encoder cannot have.
    """

    source_vocabulary: int
    target_vocabulary: int
    layers: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention.position == "rotary-after":
            raise ValueError("rotary-after needs causal attention, which an encoder has not: use rotary")


class EncoderDecoder(nn.Module):
    """Source tokens and the target so far in, logits of the next target token out.

    Args:
        config: see :class:`EncoderDecoderConfig`.

    Source: Vaswani et al. 2017, with the attention of Katharopoulos et al. 2020.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        width, dropout = config.width, config.dropout
        hidden = config.hidden_size
        whole = replace(config.attention, convolution=0, window=None)
        if config.attention.rule != "sum":
            # What the rule was normalized by need not suit a sum.
            whole = replace(whole, rule="sum", normalize=None)
        across = replace(whole, position="none")
        self.source_embedding = nn.Embedding(config.source_vocabulary, width)
        self.target_embedding = nn.Embedding(config.target_vocabulary, width)
        places = config.learned_positions
        self.source_positions = nn.Embedding(places, width) if places else None
        self.target_positions = nn.Embedding(places, width) if places else None
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(
            Block(width, hidden, whole, causal=False, layer=layer, dropout=dropout)
            for layer in range(config.layers)
        )
        self.decoder = nn.ModuleList(
            Block(
                width, hidden, config.attention, layer=config.layers + layer, dropout=dropout,
                cross=attention(width, across, causal=False, layer=2 * config.layers + layer),
            )
            for layer in range(config.layers)
        )  # fmt: skip
        self.encoder_norm = nn.LayerNorm(width)
        self.norm = nn.LayerNorm(width)
        initialize(self, 2 * config.layers)

    def forward(self, source: Tensor, target: Tensor, *, source_mask: Tensor | None = None) -> Tensor:
        """Logits at every position of the target.

        Args:
            source: int64 ``(B, M)``. target: int64 ``(B, N)``, beginning with the start token; padding
                belongs at its end, where no real position sees it.
            source_mask: bool ``(B, M)``, True = real.

        Returns:
            ``(B, N, target_vocabulary)``.

        Raises:
            ValueError: more positions than were learned.
        """
        context = self.encode(source, source_mask)
        x = self._embed(target, self.target_embedding, self.target_positions, 0)
        for block in self.decoder:
            x, _ = block(x, context=context, context_mask=source_mask)
        return self._logits(x)

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Source tokens ``(B, M)`` as a context ``(B, M, width)``."""
        x = self._embed(source, self.source_embedding, self.source_positions, 0)
        for block in self.encoder:
            x, _ = block(x, key_mask=source_mask)
        context: Tensor = self.encoder_norm(x)
        return context

    @torch.no_grad()
    def generate(
        self, source: Tensor, *, start: int, stop: int, limit: int, source_mask: Tensor | None = None
    ) -> Tensor:
        """The most probable target, token by token; the source is read once and kept as a state.

        Args:
            source: int64 ``(B, M)``. source_mask: bool ``(B, M)``, True = real.
            start, stop: token ids around a target. limit: longest target.

        Returns:
            int64 ``(B, n)``, n at most ``limit``: without ``start``, filled with ``stop`` behind the end.
        """
        check_count("limit", limit, least=0)
        context = self.encode(source, source_mask)
        memories = [block.cross.remember(context, source_mask) for block in self.decoder]  # type: ignore[union-attr, operator]
        states: list[MixerState] = []
        tokens = source.new_full((source.shape[0], 1), start)
        done = tokens[:, 0] != tokens[:, 0]
        found: list[Tensor] = []
        for place in range(limit):
            x = self._embed(tokens, self.target_embedding, self.target_positions, place)
            for number, (block, memory) in enumerate(zip(self.decoder, memories, strict=True)):
                if place == 0:  # the first token makes the states
                    x, state = block(x, context=context, context_mask=source_mask, return_state=True)
                    states.append(state)
                else:
                    x = block.step(x, states[number], memory)  # type: ignore[operator]
            picked = self._logits(x)[:, -1].argmax(-1).masked_fill(done, stop)
            found.append(picked)
            done = done | (picked == stop)
            if bool(done.all()):
                break
            tokens = picked[:, None]
        return torch.stack(found, dim=1) if found else tokens[:, :0]

    def _embed(
        self, tokens: Tensor, embedding: nn.Embedding, places: nn.Embedding | None, start: int
    ) -> Tensor:
        x: Tensor = embedding(tokens)
        if places is not None:
            end = start + tokens.shape[1]
            if end > places.num_embeddings:
                raise ValueError(
                    f"position {end - 1} has no embedding: learned_positions={places.num_embeddings}. Use "
                    "shorter sequences or a smaller limit, or rotary or no positions"
                )
            x = x + places.weight[start:end]
        output: Tensor = self.dropout(x)
        return output

    def _logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.target_embedding.weight)
