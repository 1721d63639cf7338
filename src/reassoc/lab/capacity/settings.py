"""What a capacity experiment does, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..._errors import InputError
from .cases import Case, case
from .keys import MOST_KEYS
from .train import Run

CLOSED = "closed"
PARTS = (CLOSED, "1", "2")
# Setting -> case -> numbers of pairs. As documented: at least two below and two above where the features end,
# which are 64, 128 and 256.
FULL: dict[int, dict[str, tuple[int, ...]]] = {
    1: {
        "softmax": (40, 100, 200, 300),
        "elu+1": (20, 40, 60, 80, 100, 200),
        "dpfp-1": (60, 100, 120, 140, 200, 260),
        "dpfp-2": (100, 200, 260, 300, 400),
        "favor+:features=128": (20, 40, 60, 100),
    },
    2: {
        "elu+1:delta": (20, 60, 100),
        "dpfp-1": (20, 60, 100),
        "dpfp-1:delta": (20, 60, 100),
        "dpfp-2:delta": (20, 60, 100),
    },
}
QUICK: dict[int, dict[str, tuple[int, ...]]] = {
    1: {
        "softmax": (40, 100, 200),
        "elu+1": (20, 40, 60, 80, 100),
        "dpfp-1": (60, 100, 140),
        "favor+:features=128": (20,),
    },
    2: {"elu+1:delta": (20, 60), "dpfp-1": (20, 60), "dpfp-1:delta": (20, 60)},
}
DEFAULT_CLOSED = (
    "elu+1", "elu+1:delta", "dpfp-1", "dpfp-1:delta", "dpfp-2", "dpfp-2:delta", "favor+:features=128",
    "favor+:delta:features=128",
)  # fmt: skip
DEFAULT_PAIRS = (20, 60, 100)
CLOSED_PAIRS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Settings:
    """One experiment.

    Attributes:
        parts: which of ``"closed"``, ``"1"``, ``"2"``. models: case texts, ``None`` for the default of each
            part. pairs: numbers N of pairs, likewise. seeds: of weights, sequences and random maps.
        full: whether the defaults are those of the documented experiment, or a quick choice of them.
        dim: d of keys and queries. limit: training steps at most.
    """

    parts: tuple[str, ...] = PARTS
    models: tuple[str, ...] | None = None
    pairs: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = (0,)
    full: bool = False
    dim: int = 64
    limit: int = 20_000

    def __post_init__(self) -> None:
        """Raises InputError: naming the option, what was expected and what came."""
        lists = {"setting": self.parts, "models": self.models, "pairs": self.pairs, "seeds": self.seeds}
        for option, given in lists.items():
            if given is not None and not given:
                raise InputError(f"--{option}: give at least one")
        wrong = [part for part in self.parts if part not in PARTS]
        if wrong:
            raise InputError(f"--setting: expected a list of {', '.join(PARTS)}; got {wrong[0]!r}")
        for found in self.pairs or ():
            if not 2 <= found <= MOST_KEYS:
                raise InputError(f"--pairs: expected numbers from 2 to {MOST_KEYS:,}, got {found}")
        if min(self.seeds) < 0 or max(self.seeds) >= 1 << 32:  # torch looks at 32 bits
            raise InputError("--seeds: expected whole numbers from 0, below 2^32")
        if not 2 <= self.dim <= 1024:
            raise InputError(f"--dim: expected the size of a key, from 2 to 1,024, got {self.dim}")
        if self.limit < 1:
            raise InputError(f"--max-steps: expected at least 1, got {self.limit}")
        check_cases([case(text) for text in self.models or ()], self.dim)
        if not self.runs() and not self.closed():
            raise InputError(
                "--models: softmax has no memory of features, so no closed form; add another model"
            )

    def runs(self) -> list[Run]:
        """Every model to train, in the order of the report."""
        found: dict[Run, None] = {}
        for setting, usual in (FULL if self.full else QUICK).items():
            if str(setting) not in self.parts:
                continue
            for text in usual if self.models is None else self.models:
                for count in self.pairs or usual.get(case(text).name, DEFAULT_PAIRS):
                    for seed in self.seeds:
                        found[Run(setting, case(text), count, seed)] = None
        return list(found)

    def closed_pairs(self) -> tuple[int, ...]:
        """Numbers of keys that the closed form is computed for, where no file gives them."""
        return CLOSED_PAIRS if self.pairs is None else self.pairs

    def closed(self) -> list[Case]:
        """The cases of the closed form; softmax has no memory of features."""
        if CLOSED not in self.parts:
            return []
        texts = DEFAULT_CLOSED if self.models is None else self.models
        return list({case(text): None for text in texts if not case(text).softmax})


def check_cases(cases: Sequence[Case], dim: int) -> None:
    """Raise InputError if one has a map that keys of this size cannot have."""
    for found in cases:
        try:
            if not found.softmax:
                found.build(dim, 0)
        except ValueError as error:
            raise InputError(f"--models: {found.name} does not fit keys of size {dim}: {error}") from None
