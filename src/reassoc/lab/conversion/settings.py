"""What an evaluation measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..._errors import InputError


@dataclass(frozen=True)
class Settings:
    """What is measured of every model.

    Attributes:
        lengths: contexts in tokens; of an encoder, where lines are cut. ``None``: 256 and 1,024; 256.
        tokens: of each text, taken evenly from all of it, the same for all lengths.
        distances: tokens between a key and the question for it; none: recall is not measured.
        trials: questions at each distance.
    """

    lengths: tuple[int, ...] | None = None
    tokens: int = 16384
    distances: tuple[int, ...] = ()
    trials: int = 40

    def __post_init__(self) -> None:
        if self.lengths is not None and min((*self.lengths, 2)) < 2:
            raise InputError(f"--lengths: expected numbers of at least 2, got {list(self.lengths)}")
        if min((*self.distances, 1)) < 1:
            raise InputError(f"--distances: expected numbers of at least 1, got {list(self.distances)}")
        for name, value in (("--tokens", self.tokens), ("--trials", self.trials)):
            if value < 1:
                raise InputError(f"{name} is {value}; expected at least 1")

    def contexts(self, encoder: bool) -> tuple[int, ...]:
        """The lengths for a kind of model."""
        return self.lengths or ((256,) if encoder else (256, 1024))

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
