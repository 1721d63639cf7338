"""What one translation experiment trains, checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..._errors import InputError
from ..recipes import recipe

DEFAULT_RECIPES = (
    "softmax:learned", "elu+1:learned", "elu+1:delta:learned", "favor+:learned", "dpfp-1:delta:learned",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One experiment: every recipe with every seed, at equal sizes and steps.

    Attributes:
        recipes: as :func:`reassoc.lab.recipes.recipe` reads them. seeds: of weights, maps and batches.
        width, layers, heads: of the model, as many layers in the encoder as in the decoder.
        batch: pairs of a step. steps: of training. rate: learning rate. weight_decay: of matrices.
        every: steps between looks at the validation loss. held_out: sources to watch, and as many to judge
            on, at most a tenth of all each. limit: bytes of the longest source or target.
        tokenize: how sacrebleu cuts a text into words: ``"13a"`` for languages with spaces, ``"char"``.
    """

    recipes: tuple[str, ...] = DEFAULT_RECIPES
    seeds: tuple[int, ...] = (0, 1)
    width: int = 64
    layers: int = 2
    heads: int = 4
    batch: int = 16
    steps: int = 1500
    rate: float = 5e-3
    weight_decay: float = 0.01
    every: int = 100
    held_out: int = 500
    limit: int = 256
    tokenize: str = "char"

    def __post_init__(self) -> None:
        """Raises InputError: naming the option, what was expected and what came."""
        for name in ("width", "layers", "heads", "batch", "steps", "every", "held_out", "limit"):
            size = getattr(self, name)
            if not 1 <= size <= 1 << 20:
                option = name.replace("_", "-")
                raise InputError(f"--{option}: expected a whole number from 1 to {1 << 20}, got {size}")
        if self.width % self.heads:
            raise InputError(f"--width: {self.width} is not a multiple of {self.heads} heads")
        for name in ("recipes", "seeds"):
            if not getattr(self, name):
                raise InputError(f"--{'models' if name == 'recipes' else name}: give at least one")
        if min(self.seeds) < 0 or max(self.seeds) >= 1 << 31:
            got = ",".join(map(str, self.seeds))
            raise InputError(f"--seeds: expected 0 or more and below 2^31, got {got}")
        if not 0 < self.rate < math.inf:
            raise InputError(f"--rate: expected a number above 0, got {self.rate}")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"--weight-decay: expected 0 or more, got {self.weight_decay}")
        for text in self.recipes:
            if recipe(text).carried:
                raise InputError(f"recipe {text!r}: carried is for `reassoc lm`; pairs have no segments")

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dict(vars(self))
