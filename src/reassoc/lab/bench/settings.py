"""What one benchmark compares: cases, sizes and how often, checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ... import backends, feature_maps
from ..._errors import InputError
from ..candidates import Candidate, candidates

RULES = ("sum", "decay", "delta", "gated-delta", "kda")
DIRECTIONS = ("forward", "backward", "step")
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NORMALIZATIONS = ("attention", "sum", "sum+attention", "none")
LONGEST = 1 << 22  # more tokens than fit any memory here: a typing mistake


@dataclass(frozen=True)
class Problem:
    """What a contender computes: two contenders with the same problem give the same numbers.

    Attributes:
        map: a feature map as in :mod:`reassoc.lab.candidates`; ``"softmax"`` with rule ``""`` is softmax
            attention itself.
        rule: one of :data:`RULES`; ``kda`` is the gated delta rule with a decay per key feature.
    """

    map: str
    rule: str

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.map} {self.rule}".strip()

    @property
    def delta(self) -> bool:
        """Whether it is of the delta family: causal only, a write strength per token."""
        return self.rule in ("delta", "gated-delta", "kda")

    @property
    def decays(self) -> bool:
        """Whether a token decays the state."""
        return self.rule in ("decay", "gated-delta", "kda")


# As they are published and used: gated and delta layers read identity features without a denominator.
DEFAULT_PROBLEMS = (
    Problem("elu+1", "sum"), Problem("favor+", "sum"), Problem("identity", "decay"),
    Problem("identity", "delta"), Problem("identity", "gated-delta"),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One benchmark. Tensors are ``(batch, heads, tokens, head_dim | value_dim)``, key heads as many.

    Attributes:
        lengths: tokens of a call, or for steps the keys seen before. problems: what is computed.
        directions: of :data:`DIRECTIONS`; ``backward`` is forward and backward together.
        backends: of :func:`reassoc.linear_attention`. peers: names; ``None`` is every installed one.
        features: number of features of random maps; ``None``: ceil(d ln d).
        normalize: of our calls; ``None``: what is published for the map and rule.
        threads: of torch. repeats: rounds. limit: seconds that one call may take.
    """

    lengths: tuple[int, ...] = (256, 1024, 4096)
    problems: tuple[Problem, ...] = DEFAULT_PROBLEMS
    directions: tuple[str, ...] = DIRECTIONS
    backends: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] | None = None
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    value_dim: int = 64
    features: int | None = None
    normalize: str | None = None
    causal: bool = True
    dtype: str = "float32"
    threads: int = 1
    repeats: int = 7
    seed: int = 0
    limit: float = 2.0

    def __post_init__(self) -> None:
        """Raises InputError: naming the option, what was expected and what came."""
        sizes = {
            "batch": self.batch, "heads": self.heads, "head-dim": self.head_dim, "threads": self.threads,
            "value-dim": self.value_dim, "repeats": self.repeats,
        }  # fmt: skip
        if self.features is not None:
            sizes["features"] = self.features
        for name, size in sizes.items():
            if not 1 <= size <= 1 << 20:
                raise InputError(f"--{name}: expected a whole number from 1 to {1 << 20}, got {size}")
        if not self.lengths or any(not 1 <= n <= LONGEST for n in self.lengths):
            got = ",".join(map(str, self.lengths))
            raise InputError(f"--lengths: expected numbers of tokens from 1 to {LONGEST}, got {got}")
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"--seed: expected 0 or more and below 2^63, got {self.seed}")
        if not 0 < self.limit < math.inf:
            raise InputError(f"--limit: expected a number of seconds above 0, got {self.limit}")
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.normalize is not None and self.normalize not in NORMALIZATIONS:
            known = ", ".join(NORMALIZATIONS)
            raise InputError(f"--normalize: expected one of {known}, got {self.normalize!r}")
        one_of("--directions", self.directions, DIRECTIONS)
        if not self.causal and self.directions == ("step",):
            raise InputError("--bidirectional: a decode step is causal; measure forward or backward")
        one_of("--rules", [p.rule for p in self.problems], RULES)
        have = backends()
        one_of("--backends", self.backends, ("auto", *(name for name in have if name != "reference")))
        for name in self.backends:
            if have.get(name, "available") != "available":
                raise InputError(f"--backends: {name} is not available here: {have[name]}")
        for problem in self.problems:
            self.feature_map(problem.map)

    def candidate(self, name: str) -> Candidate:
        """The feature map's name, checked, with its number of features."""
        width = self.features or math.ceil(self.head_dim * math.log(max(2, self.head_dim)))
        if name.startswith("trig") or "hyperbolic" in name:
            width += width % 2 if self.features is None else 0  # these have features in pairs
        try:
            return candidates([name], [width])[0]
        except InputError as error:
            raise InputError(str(error).replace("--widths", "--features")) from None

    def feature_map(self, name: str) -> feature_maps.FeatureMap:
        """The map, with a set of projections for each head where it is random; not yet calibrated."""
        candidate = self.candidate(name)
        try:
            return candidate.build(self.head_dim, self.heads, self.head_dim**-0.5, self.seed)
        except ValueError as error:
            raise InputError(f"--maps: {name} does not fit head size {self.head_dim}: {error}") from None

    def normalization(self, problem: Problem) -> str:
        """What our call divides by: as published, unless told.

        Delta rules write with features that sum to one (Schlag et al. 2021), or keys of norm one where
        features may be negative, so that a write cannot amplify.
        """
        if self.normalize is not None:
            return self.normalize
        if not problem.delta:
            return "none" if problem.map == "identity" else "attention"
        return "sum" if self.feature_map(problem.map).nonnegative else "none"

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return vars(self) | {"problems": [[p.map, p.rule] for p in self.problems]}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Settings:
        """What :meth:`to_json` gave, also after a way through JSON."""
        lists: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return cls(**lists | {"problems": tuple(Problem(*p) for p in stored["problems"])})


def one_of(option: str, got: tuple[str, ...] | list[str], known: tuple[str, ...]) -> None:
    """Refuse an empty list, and what is not known."""
    wrong = [name for name in got if name not in known]
    if wrong or not got:
        what = repr(wrong[0]) if wrong else "nothing"
        raise InputError(f"{option}: expected a list of {', '.join(known)}; got {what}")
