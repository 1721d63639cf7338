"""The one small config that chooses an attention, and what it may say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from .._normalize import NORMALIZATIONS, POLICIES

MIXERS = ("linear", "softmax")
RULES = ("sum", "decay", "delta", "gated-delta")
DECAYS = ("token", "feature", "fixed")
POSITIONS = ("none", "rotary", "rotary-after")


@dataclass(frozen=True)
class AttentionConfig:
    """What an attention layer computes. Everything a checkpoint needs, as plain values.

    Attributes:
        mixer: ``"linear"``, or ``"softmax"``: the twin of the same shape, with a cache that grows.
        heads: number H of query heads. key_heads: G, a divisor of H; default H.
        head_dim: size d of a query and a key; default ``width // heads``. value_dim: e; default d.
        feature_map: a name of :func:`reassoc.feature_maps.names`. map_options: for
            :func:`reassoc.feature_maps.make`; a random map gets a draw of its own for each layer and
            key head, all from ``seed``.
        rule: ``"sum"``, ``"decay"``, ``"delta"`` or ``"gated-delta"``; the gates are learned from the tokens.
        decay: shape of the gate of ``"decay"`` and ``"gated-delta"``: per ``"token"`` and head
            (Mamba-2, Gated DeltaNet), per token and ``"feature"`` (GLA, KDA), or ``"fixed"`` for each
            head (RetNet).
        normalize: as in :func:`reassoc.linear_attention`; ``None`` means ``"attention"`` for the
            additive rules and ``"sum"`` for the delta rules.
        window: attend to the most recent ``window`` positions only.
        eps: added to the denominator. undefined: what a row with a zero denominator gives. ``"zero"``
            here, where it adds nothing to the residual stream; ``"nan"`` would end a training run.
        position: ``"none"``, ``"rotary"`` (queries and keys rotated before the map) or
            ``"rotary-after"`` (features rotated, denominator from the unrotated ones).
        rotary_base: of the rotary angles.
        convolution: kernel size of a causal depthwise convolution over queries, keys and values; 0: none.
        query_key_norm: normalize queries and keys by their root mean square, per head.
        output_norm: normalize outputs by their root mean square, per head.
        output_gate: multiply outputs by a learned SiLU gate of the token.
        backend: as in :func:`reassoc.linear_attention`.

    Raises:
        ValueError: a name that is none of these, or sizes that cannot be.
    """

    mixer: str = "linear"
    heads: int = 4
    key_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    feature_map: str = "elu+1"
    map_options: Mapping[str, Any] = field(default_factory=dict)
    rule: str = "sum"
    decay: str = "token"
    normalize: str | None = None
    window: int | None = None
    eps: float = 0.0
    undefined: str = "zero"
    position: str = "none"
    rotary_base: float = 10000.0
    convolution: int = 0
    query_key_norm: bool = False
    output_norm: bool = False
    output_gate: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name, valid in (("mixer", MIXERS), ("rule", RULES), ("decay", DECAYS), ("position", POSITIONS),
                            ("normalize", (None, *NORMALIZATIONS)), ("undefined", POLICIES)):  # fmt: skip
            if getattr(self, name) not in valid:
                names = ", ".join(str(one) for one in valid)
                raise ValueError(f"{name} must be one of {names}, got {getattr(self, name)!r}")
        if not isinstance(self.map_options, Mapping):
            raise ValueError(f"map_options must map names to values, got {self.map_options!r}")
        for name in ("heads", "key_heads", "head_dim", "value_dim", "window"):
            check_count(name, getattr(self, name), optional=name != "heads")
        check_count("convolution", self.convolution, least=0)
        check_number("eps", self.eps)
        check_number("rotary_base", self.rotary_base, least=1.0)
        if self.heads % (self.key_heads or self.heads):
            raise ValueError(f"heads must be a multiple of key_heads, got {self.heads} and {self.key_heads}")
        if self.mixer == "softmax" and self.position == "rotary-after":
            raise ValueError("rotary-after rotates features, which softmax attention has not: use rotary")
        if self.mixer == "linear" and self.window is not None and "delta" in self.rule:
            raise ValueError(
                f"rule {self.rule!r} has no window: what a token wrote depends on all before it. Use rule "
                "'gated-delta' without a window to forget, or 'sum' or 'decay' with one"
            )
        if self.mixer == "linear" and self.eps and "attention" not in self.normalization:
            raise ValueError(
                f"eps is added to a denominator, and normalize={self.normalization!r} has none: leave eps=0"
            )

    @property
    def groups(self) -> int:
        """Number G of key heads."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def normalization(self) -> str:
        """``normalize`` with the default of the rule filled in."""
        if self.normalize is not None:
            return self.normalize
        return "sum" if "delta" in self.rule else "attention"

    def sizes(self, width: int) -> tuple[int, int]:
        """Sizes (d, e) of a head in a model of that width.

        Raises:
            ValueError: the width is no multiple of the heads and no ``head_dim`` is given.
        """
        if self.head_dim is None and width % self.heads:
            raise ValueError(f"width {width} is not a multiple of {self.heads} heads: give head_dim")
        dim = width // self.heads if self.head_dim is None else self.head_dim
        return dim, dim if self.value_dim is None else self.value_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return _plain(self) | {"map_options": dict(self.map_options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionConfig:
        """What :meth:`to_dict` gave.

        Raises:
            ValueError: unknown or impossible fields.
        """
        return cls(**_known(cls, values))


_Config = TypeVar("_Config", bound="ModelConfig")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What all models have, beside their vocabularies.

    Attributes:
        width: size of a token. layers: number of blocks (of an encoder and of a decoder each).
        hidden: of the feed-forward networks; default ``4 * width``.
        learned_positions: number of positions with an embedding of their own; 0: none. A sequence,
            carried context included, cannot be longer.
        dropout: of what each part of a block adds.
        attention: of every layer.

    Raises:
        ValueError: sizes that cannot be.
    """

    width: int = 128
    layers: int = 4
    hidden: int | None = None
    learned_positions: int = 0
    dropout: float = 0.0
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in ("dropout", "attention")):
            least = 0 if name == "learned_positions" else 1
            check_count(name, getattr(self, name), optional=name == "hidden", least=least)
        check_number("dropout", self.dropout, least=0.0, below=1.0)
        self.attention.sizes(self.width)

    @property
    def hidden_size(self) -> int:
        """``hidden`` with its default filled in."""
        return 4 * self.width if self.hidden is None else self.hidden

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return _plain(self) | {"attention": self.attention.to_dict()}

    @classmethod
    def from_dict(cls: type[_Config], values: Mapping[str, Any]) -> _Config:
        """What :meth:`to_dict` gave.

        Raises:
            ValueError: unknown, missing or impossible fields.
        """
        given = _known(cls, values)
        return cls(**given | {"attention": AttentionConfig.from_dict(given.get("attention", {}))})


def _plain(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, exactly what a config class takes; ``ValueError`` names what is too much or missing."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} is made from names and values, got {values!r}")
    strange = sorted(str(name) for name in set(values) - {f.name for f in fields(kind)})
    if strange:
        raise ValueError(f"{kind.__name__} has no {', '.join(strange)}: made by another version?")
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{kind.__name__} needs {', '.join(missing)}")
    return dict(values)


def check_count(name: str, number: Any, *, optional: bool = False, least: int = 1) -> None:
    """``ValueError`` unless it is a whole number, at least ``least``, or ``None`` where that is allowed."""
    if optional and number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {number!r}")


def check_number(name: str, number: Any, *, least: float = -math.inf, below: float = math.inf) -> None:
    """``ValueError`` unless it is a finite number, at least ``least`` and less than ``below``."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {number!r}")
    if not least <= number < below:
        limits = f"at least {least:g}" if below == math.inf else f"at least {least:g} and less than {below:g}"
        raise ValueError(f"{name} must be {limits}, got {number!r}")
