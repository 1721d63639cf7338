"""A decoder language model that streams: constant memory with linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor, nn

from .._checks import check_mask
from .block import Block, initialize
from .config import ModelConfig, check_count, check_number
from .mixer import positions
from .state import ModelState


@dataclass(frozen=True)
class LanguageModelConfig(ModelConfig):
    """Everything that decides the shape of a :class:`LanguageModel`.

    Attributes:
        vocabulary: number of token ids. The others: see :class:`ModelConfig`.
    """

    vocabulary: int


class LanguageModel(nn.Module):
    """A decoder-only Transformer: token ids in, logits of the next token out.

    The output weights are those of the embedding.

    Args:
        config: see :class:`LanguageModelConfig`.

    Example:
        >>> import torch
        >>> from reassoc.nn import LanguageModel, LanguageModelConfig
        >>> model = LanguageModel(LanguageModelConfig(vocabulary=256, layers=2))
        >>> model(torch.randint(256, (1, 50))).shape
        torch.Size([1, 50, 256])
        >>> [token.shape for token in model.generate(torch.randint(256, (1, 50)), 2)]
        [torch.Size([1]), torch.Size([1])]
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = (
            nn.Embedding(config.learned_positions, config.width) if config.learned_positions else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config.width, config.hidden_size, config.attention, layer=layer, dropout=config.dropout)
            for layer in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        initialize(self, config.layers)

    @overload
    def forward(
        self, tokens: Tensor, *, key_mask: Tensor | None = ..., states: ModelState | None = ...,
        return_states: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, tokens: Tensor, *, key_mask: Tensor | None = ..., states: ModelState | None = ...,
        return_states: Literal[True],
    ) -> tuple[Tensor, ModelState]: ...  # fmt: skip

    def forward(
        self,
        tokens: Tensor,
        *,
        key_mask: Tensor | None = None,
        states: ModelState | None = None,
        return_states: bool = False,
    ) -> Tensor | tuple[Tensor, ModelState]:
        """Logits at every position.

        Args:
            tokens: int64 ``(B, N)``. key_mask: bool ``(B, N)``, True = real; padding at either end.
            states: go on after what they have seen. Pass ``states.detach()`` to train on the next
                segment of a text without cutting its context.
            return_states: also return the states after the last token.

        Returns:
            ``(B, N, vocabulary)``, and with ``return_states`` a :class:`ModelState`.

        Raises:
            ValueError: more positions than were learned, or states of another model.
        """
        x = self._embed(tokens, key_mask, states)
        after = []
        for number, block in enumerate(self.blocks):
            before = None if states is None else states.layers[number]
            x, state = block(x, key_mask=key_mask, state=before, return_state=return_states)
            after.append(state)
        logits = self._logits(x)
        return (logits, ModelState(after)) if return_states else logits

    def step(self, tokens: Tensor, states: ModelState) -> Tensor:
        """Logits ``(B, 1, vocabulary)`` after one more token, int64 ``(B, 1)``; ``states`` are advanced."""
        x = self._embed(tokens, None, states)
        for block, state in zip(self.blocks, states.layers, strict=True):
            x = block.step(x, state)  # type: ignore[operator]
        return self._logits(x)

    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        states: ModelState | None = None,
        key_mask: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Continue a text, token by token, as they are asked for; no gradients.

        Args:
            tokens: int64 ``(B, N)``, N at least 1: the text, or what comes after ``states``.
            count: tokens to generate. temperature: divides the logits before sampling; 0 takes the
                most probable token. generator: of the samples; default torch's own.
            states: go on after what they have seen. They are advanced, past all tokens but the one given
                last: begin a later call with that one.
            key_mask: bool ``(B, N)``, True = real; for texts of different length, padded on the left.

        Yields:
            int64 ``(B,)``: the next token of each sequence.

        Raises:
            ValueError: no token to start from, a temperature below 0, or padding on the right.
        """
        if tokens.ndim != 2 or tokens.shape[1] < 1:
            raise ValueError(f"generate needs tokens (B, N) with N at least 1, got {tuple(tokens.shape)}")
        check_count("count", count, least=0)
        check_number("temperature", temperature, least=0.0)
        if key_mask is not None and not bool(key_mask[:, -1:].all()):
            raise ValueError("generate goes on after the last token, which key_mask hides: pad on the left")
        with torch.no_grad():
            logits, after = self(tokens, key_mask=key_mask, states=states, return_states=True)
        if states is None:
            states = after
        else:
            states.layers = after.layers
        picked: Tensor | None = None
        for _ in range(count):
            if picked is not None:  # read when the next one is asked for: nobody needs what follows the last
                with torch.no_grad():
                    logits = self.step(picked[:, None], states)
            picked = _pick(logits[:, -1], temperature, generator)
            yield picked

    def _embed(self, tokens: Tensor, key_mask: Tensor | None, states: ModelState | None) -> Tensor:
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have shape (B, N), got {tuple(tokens.shape)}")
        if states is not None and len(states.layers) != len(self.blocks):
            raise ValueError(f"states have {len(states.layers)} layers, this model has {len(self.blocks)}")
        x: Tensor = self.embedding(tokens)
        check_mask("key_mask", key_mask, (tokens.shape[0], tokens.shape[1]), tokens.device)
        if self.positions is not None:
            places = positions(x, key_mask, None if states is None else states.length)
            # Without a mask and a state they are what the shape says, and nothing is read back for it.
            last = tokens.shape[1] - 1
            if places.ndim == 2:
                last = int(places.max()) if places.numel() else -1
            if last >= self.config.learned_positions:
                raise ValueError(
                    f"position {last} has no embedding: learned_positions="
                    f"{self.config.learned_positions}. Use shorter sequences, or rotary or no positions"
                )
            x = x + self.positions(places)
        output: Tensor = self.dropout(x)
        return output

    def _logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def _pick(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0.0:
        return logits.argmax(-1)
    chances = (logits / temperature).softmax(-1)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]
