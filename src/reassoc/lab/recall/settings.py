"""What one recall experiment trains and tests, checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..._errors import InputError
from ..recipes import recipe
from .data import Size, check_size

DEFAULT_RECIPES = (
    "softmax:conv=3", "elu+1:conv=3", "elu+1:delta:conv=3", "elu+1:gated-delta:conv=3", "favor+:conv=3",
    "favor+:delta:conv=3", "dpfp-1:delta:conv=3",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One experiment: every recipe at every head size, learning rate and seed.

    Attributes:
        recipes: as :func:`reassoc.lab.recipes.recipe` reads them. head_dims: sizes of a head; they set the
            size of the state, the width of the model stays. rates: learning rates; the one with the best
            accuracy on validation sequences is judged. seeds: of weights, maps and training sequences.
        train: sizes of training sequences, in turns. test: sizes to judge at.
        vocabulary: V. width, layers, heads: of the model, whose feed-forward networks are as wide as it
            is (the original has none). output_norm: whether outputs of attention are normalized per head.
        batch: sequences of a step. steps: at most.
        every: steps between evaluations. stop: validation accuracy that ends training.
        weight_decay: of matrices. count: sequences of each size to judge on.
    """

    recipes: tuple[str, ...] = DEFAULT_RECIPES
    head_dims: tuple[int, ...] = (4, 8, 16)
    rates: tuple[float, ...] = (2e-2,)
    seeds: tuple[int, ...] = (0, 1)
    train: tuple[Size, ...] = (Size(32, 4), Size(32, 8))
    test: tuple[Size, ...] = (Size(32, 4), Size(32, 8), Size(64, 8), Size(64, 16))
    vocabulary: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 2
    output_norm: bool = True
    batch: int = 16
    steps: int = 1500
    every: int = 100
    stop: float = 0.99
    weight_decay: float = 0.1
    count: int = 256

    def __post_init__(self) -> None:
        """Raises InputError: naming the option, what was expected and what came."""
        for name in ("width", "layers", "heads", "batch", "steps", "every", "count"):
            size = getattr(self, name)
            if not 1 <= size <= 1 << 20:
                raise InputError(f"--{name}: expected a whole number from 1 to {1 << 20}, got {size}")
        for name in ("recipes", "head_dims", "rates", "seeds", "train", "test"):
            if not getattr(self, name):
                option = "models" if name == "recipes" else name.replace("_", "-")
                raise InputError(f"--{option}: give at least one")
        if min(self.head_dims) < 1 or max(self.head_dims) > 1 << 12:
            raise InputError(f"--head-dims: expected sizes from 1 to {1 << 12}, got {_list(self.head_dims)}")
        if min(self.seeds) < 0 or max(self.seeds) >= 1 << 31:
            raise InputError(f"--seeds: expected 0 or more and below 2^31, got {_list(self.seeds)}")
        if not all(0 < rate < math.inf for rate in self.rates):
            raise InputError(f"--rates: expected numbers above 0, got {_list(self.rates)}")
        if not 0 < self.stop <= 1:
            raise InputError(f"--stop: expected an accuracy above 0 and at most 1, got {self.stop}")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"--weight-decay: expected 0 or more, got {self.weight_decay}")
        for option, sizes in (("--train", self.train), ("--test", self.test)):
            for size in sizes:
                check_size(size, self.vocabulary, option)
        for text in self.recipes:
            if recipe(text).carried:
                raise InputError(f"recipe {text!r}: carried is for `reassoc lm`; questions have no segments")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, in training or test."""
        return max(size.tokens for size in (*self.train, *self.test))

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it, sizes as ``TOKENS:PAIRS``."""
        return vars(self) | {"train": [str(s) for s in self.train], "test": [str(s) for s in self.test]}


def size(option: str, text: str) -> Size:
    """A size as the command line has it, ``TOKENS:PAIRS``."""
    try:
        tokens, pairs = (int(part) for part in text.split(":"))
    except ValueError:
        raise InputError(f"{option}: expected TOKENS:PAIRS such as 64:8, got {text!r}") from None
    return Size(tokens, pairs)


def _list(values: tuple[Any, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)
