"""What one comparison of language models trains, checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..._errors import InputError
from ...nn import LanguageModel, LanguageModelConfig
from ..recipes import Recipe
from .text import Text

LARGEST = 1 << 31


@dataclass(frozen=True)
class Settings:
    """Equal for all models of a comparison.

    Attributes:
        width, layers, heads: of every model. segment: tokens that a step takes of each stream.
        batch: streams that the training text is cut into. steps: of training.
        rate: learning rate after the warm-up, falling along a cosine to a tenth of it. warmup: steps.
        clip: largest norm of a gradient. dropout: share of activations dropped in training.
        weight_decay: of matrices, not of vectors.
    """

    width: int = 128
    layers: int = 2
    heads: int = 4
    segment: int = 256
    batch: int = 4
    steps: int = 1200
    rate: float = 3e-3
    warmup: int = 100
    clip: float = 1.0
    dropout: float = 0.0
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        """Raises InputError: naming the option, what was expected and what came."""
        for name in ("width", "layers", "heads", "segment", "batch", "steps"):
            size = getattr(self, name)
            if not 1 <= size < LARGEST:
                raise InputError(f"--{name}: expected a whole number from 1 to {LARGEST - 1}, got {size}")
        if self.width % self.heads:
            raise InputError(f"--width: {self.width} is not a multiple of {self.heads} heads")
        if not 0 <= self.warmup < LARGEST:
            raise InputError(f"--warmup: expected a number of steps, got {self.warmup}")
        for name, number in (("rate", self.rate), ("clip", self.clip)):
            if not 0 < number < math.inf:
                raise InputError(f"--{name}: expected a number above 0, got {number}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"--dropout: expected a share from 0 to below 1, got {self.dropout}")

    def model(self, recipe: Recipe, vocabulary: int, seed: int) -> LanguageModel:
        """A recipe's model, untrained; its weights come from torch's random numbers."""
        config = LanguageModelConfig(
            vocabulary=vocabulary,
            width=self.width,
            layers=self.layers,
            learned_positions=self.segment if recipe.learned else 0,
            dropout=self.dropout,
            attention=recipe.sized(heads=self.heads, seed=seed),
        )
        return LanguageModel(config)

    def check_recipe(self, recipe: Recipe) -> None:
        """Raises InputError: the recipe cannot be made in these sizes, or not called."""
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                tokens = torch.zeros(1, 2, dtype=torch.int64)
                self.model(recipe, 1, 0)(tokens, return_states=recipe.carried)
        except (TypeError, ValueError) as error:
            raise InputError(f"recipe {recipe.name!r} does not fit: {error}") from None

    def check_text(self, text: Text) -> None:
        """Raises InputError: the text is too short for one segment a stream, or to be judged on."""
        needed = self.batch * self.segment + 1
        if len(text.training.tokens) < needed:
            raise InputError(
                f"{text.name}: its training part (the first 90 %) has {len(text.training.tokens):,} tokens; "
                f"{needed:,} are needed for one segment of {self.segment} in each of {self.batch} streams. "
                "Give a longer text, or a smaller --segment or --batch"
            )
        for name, split in (("validation", text.validation), ("test", text.test)):
            if len(split.tokens) < 2:
                raise InputError(f"{text.name}: its {name} part (5 %) has no 2 tokens; give a longer text")

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dict(vars(self))
