"""Attention to be trained, as named on the command line: ``MAP[:RULE][:NORMALIZATION][:OPTION...]``.

MAP is a name of :func:`reassoc.feature_maps.names`, or ``softmax`` for softmax attention itself (the feature
map of that name is ``softmax-features``). What follows it comes in any order:

====================  ==============================================================================
RULE                  ``sum`` (default), ``decay`` (per token), ``gla`` (decay per token and
                      feature), ``retention`` (fixed decay), ``delta``, ``gated-delta``, ``kda`` (a
                      gated delta rule with decay per feature)
NORMALIZATION         ``attention``, ``sum``, ``sum+attention``, ``none``. Default: ``attention``;
                      for delta rules ``sum``, or ``none`` where features can be negative
``features=N``        number r of features of a random map
``iid``               independent instead of orthogonal projections
``redraw=N``          new projections every N training steps
``carried``           the context goes on over segments of the training text, without gradient
``rotary``            positions rotate queries and keys before the map
``rotary-after``      positions rotate features; the denominator stays as it is
``learned``           learned positions
``conv=N``            causal depthwise convolution of N tokens on queries, keys and values
====================  ==============================================================================

``sum`` is both a rule and a normalization: without another rule it is the rule, and given twice it is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .. import feature_maps
from .._errors import InputError
from ..nn import AttentionConfig
from .candidates import RANDOM

SOFTMAX = "softmax"
SOFTMAX_FEATURES = "softmax-features"
# Rule of a recipe -> rule and decay of the configuration.
RULES = {
    "sum": ("sum", "token"), "decay": ("decay", "token"), "gla": ("decay", "feature"),
    "retention": ("decay", "fixed"), "delta": ("delta", "token"), "gated-delta": ("gated-delta", "token"),
    "kda": ("gated-delta", "feature"),
}  # fmt: skip
NORMALIZATIONS = ("attention", "sum", "sum+attention", "none")
CONTEXTS = ("truncated", "carried")
POSITIONS = ("rotary", "rotary-after")
FLAGS = ("carried", "iid", "learned", *POSITIONS)
NUMBERS = {"conv": 64, "features": 1 << 16, "redraw": 1 << 31}  # each with the largest that makes sense
# Fitted to data before use: landmark cannot be called without, favor++ would silently be favor+.
_FITTED = ("favor++", "landmark")


@dataclass(frozen=True)
class Recipe:
    """One attention to be trained.

    Attributes:
        name: as the user wrote it, in canonical order and without what is the default anyway.
        attention: everything but sizes and seed; :meth:`sized` fills those in.
        carried: whether training carries context over segments. redraw: steps between draws of random
            features, or ``None``. learned: whether the model learns positions.
    """

    name: str
    attention: AttentionConfig
    carried: bool = False
    redraw: int | None = None
    learned: bool = False

    def sized(self, *, heads: int, key_heads: int | None = None, seed: int = 0) -> AttentionConfig:
        """The configuration for a model: so many heads, and random maps drawn from the seed."""
        options = dict(self.attention.map_options)
        if self.random:
            options["seed"] = seed
        return replace(self.attention, heads=heads, key_heads=key_heads, map_options=options)

    @property
    def softmax(self) -> bool:
        """Whether it is softmax attention itself."""
        return self.attention.mixer == "softmax"

    @property
    def random(self) -> bool:
        """Whether its features are drawn."""
        return not self.softmax and self.attention.feature_map in RANDOM


class Grid(NamedTuple):
    """The product of choices: recipe texts, and what was left out with the reason."""

    texts: list[str]
    left_out: list[str]


def recipe(text: str) -> Recipe:
    """Read one recipe.

    Raises:
        InputError: unknown or contradictory parts; what is valid is listed.

    Example:
        >>> recipe("favor+:carried:delta:features=64").name
        'favor+:delta:features=64:carried'
    """
    base, *parts = [part.strip() for part in text.strip().split(":")]
    _check_map(base, text)
    rule, normalize, options = _sort(parts, text)
    if base == SOFTMAX:
        return _softmax(text, rule, normalize, options)
    name = SOFTMAX if base == SOFTMAX_FEATURES else base
    shown = [base]
    rule = rule or "sum"
    kind, decay = RULES[rule]
    usual = _usual(name, kind)
    shown += [rule] if rule != "sum" or normalize == "sum" else []
    shown += [normalize] if normalize not in (None, usual) else []
    given: dict[str, Any] = {}
    for option in ("features", "iid", "redraw"):
        if option in options and name not in RANDOM:
            raise InputError(f"recipe {text!r}: {option} is for random maps: {', '.join(_random())}")
    if "features" in options:
        each = feature_maps.make(name, 8, num_features=1).feature_dim
        if options["features"] % each:
            raise InputError(f"recipe {text!r}: {name} has features in groups of {each}; choose a multiple")
        given["num_features"] = options["features"] // each
    if "iid" in options:
        given["orthogonal"] = False
    attention = _config(
        text, feature_map=name, map_options=given, rule=kind, decay=decay, normalize=normalize or usual,
        position=_position(options, text), convolution=options.get("conv", 0),
    )  # fmt: skip
    return _finished(":".join([*shown, *_written(options)]), attention, options, text)


def recipes(texts: Sequence[str]) -> list[Recipe]:
    """Each recipe once, in the order given.

    Raises:
        InputError: as :func:`recipe`; an empty list.
    """
    found = {made.name: made for made in map(recipe, texts)}
    if not found:
        raise InputError("--models: give at least one recipe, for example softmax,elu+1,elu+1:delta")
    return list(found.values())


def grid(
    maps: Sequence[str],
    rules: Sequence[str] = ("sum",),
    normalizations: Sequence[str | None] = (None,),
    contexts: Sequence[str] = ("truncated",),
) -> Grid:
    """The product of maps (with options, if any), rules, normalizations and contexts as recipe texts.

    Softmax has no rule and no normalization, so it is there once. Left out is what means nothing: softmax
    with carried context, and features that can be negative divided by their sum.

    Args:
        normalizations: ``None`` is the default of each rule. contexts: ``"truncated"``, ``"carried"``.

    Raises:
        InputError: an unknown name.
    """
    for option, got, known in (
        ("--rules", rules, tuple(RULES)),
        ("--normalize", [n for n in normalizations if n is not None], NORMALIZATIONS),
        ("--context", contexts, CONTEXTS),
    ):
        wrong = [name for name in got if name not in known]
        if wrong:
            raise InputError(f"{option}: unknown {wrong[0]!r}; known: {', '.join(known)}")
    texts: dict[str, None] = {}
    left_out: dict[str, None] = {}
    for text in maps:
        base, _, options = text.strip().partition(":")
        recipe(text)  # what is wrong with a map by itself is a mistake, not a combination to leave out
        pairs = [("", None)] if base == SOFTMAX else [(r, n) for r in rules for n in normalizations]
        for rule, normalize in pairs:
            for context in contexts:
                parts = [base, rule, normalize or "", options, context if context == "carried" else ""]
                name = ":".join(part for part in parts if part)
                signed = base != SOFTMAX and not _nonnegative(_map_name(base))
                if normalize in ("sum", "sum+attention") and signed:
                    left_out[f"{name}: features that can be negative have no sum to divide by"] = None
                    continue
                try:
                    texts[recipe(name).name] = None
                except InputError as error:
                    left_out[f"{name}: {str(error).split(': ', 1)[-1]}"] = None
    return Grid(list(texts), list(left_out))


def usual_normalization(recipe: Recipe) -> str:
    """What divides where a recipe does not say: as its rule is published, for features of this sign."""
    return _usual(recipe.attention.feature_map, recipe.attention.rule)


def _usual(feature_map: str, rule: str) -> str:
    if "delta" not in rule:
        return "attention"
    return "sum" if _nonnegative(feature_map) else "none"


def _random() -> list[str]:
    return [name for name in RANDOM if name not in _FITTED]


def _map_name(base: str) -> str:
    return SOFTMAX if base == SOFTMAX_FEATURES else base


def _nonnegative(name: str) -> bool:
    return feature_maps.make(name, 8).nonnegative


def _check_map(base: str, text: str) -> None:
    known = [SOFTMAX, SOFTMAX_FEATURES]
    known += [name for name in feature_maps.names() if name != SOFTMAX and name not in _FITTED]
    if base in _FITTED:
        raise InputError(
            f"recipe {text!r}: {base} is fitted to data before use and cannot be trained from a draw; "
            "take favor+ instead"
        )
    shift = base.removeprefix("dpfp-")
    if base not in known and not (base != shift and shift.isdecimal() and int(shift) > 0):
        raise InputError(f"recipe {text!r}: unknown map {base!r}; known: {', '.join(known)} (dpfp-n, any n)")


def _sort(parts: list[str], text: str) -> tuple[str | None, str | None, dict[str, int]]:
    """Rule, normalization, and options by name (1 for one without a number)."""
    rule = normalize = None
    options: dict[str, int] = {}
    sums = 0
    for part in parts:
        word, equals, value = part.partition("=")
        if part == "sum":
            sums += 1
        elif part in RULES and rule is None:
            rule = part
        elif part in NORMALIZATIONS and normalize is None:
            normalize = part
        elif part in (*RULES, *NORMALIZATIONS) or word in options:
            raise InputError(f"recipe {text!r}: {part!r} contradicts or repeats an earlier part")
        elif part in FLAGS:
            options[part] = 1
        elif equals and word in NUMBERS:
            if not (value.isdecimal() and value.isascii() and 1 <= int(value) <= NUMBERS[word]):
                most = f"{NUMBERS[word]:,}"
                raise InputError(f"recipe {text!r}: {word}= takes a whole number from 1 to {most}")
            options[word] = int(value)
        else:
            known = [*RULES, *NORMALIZATIONS[2:], "attention", *(f"{n}=N" for n in NUMBERS), *FLAGS]
            raise InputError(f"recipe {text!r}: unknown part {part!r}; known: {', '.join(known)}")
    if sums and rule is None:
        rule, sums = "sum", sums - 1
    if sums and normalize is None:
        normalize, sums = "sum", sums - 1
    if sums:
        raise InputError(f"recipe {text!r}: 'sum' contradicts or repeats an earlier part")
    return rule, normalize, options


def _softmax(text: str, rule: str | None, normalize: str | None, options: dict[str, int]) -> Recipe:
    for wrong in (
        rule,
        normalize,
        *(o for o in ("features", "iid", "redraw", "rotary-after") if o in options),
    ):
        if wrong:
            raise InputError(f"recipe {text!r}: softmax attention has no {wrong}; use a feature map")
    if "carried" in options:
        raise InputError(
            f"recipe {text!r}: softmax attention would carry a cache that grows with the text; "
            "carried context needs a feature map"
        )
    attention = _config(
        text, mixer="softmax", position=_position(options, text), convolution=options.get("conv", 0)
    )
    return _finished(":".join([SOFTMAX, *_written(options)]), attention, options, text)


def _position(options: dict[str, int], text: str) -> str:
    chosen = [name for name in (*POSITIONS, "learned") if name in options]
    if len(chosen) > 1:
        raise InputError(f"recipe {text!r}: {' and '.join(chosen)} exclude each other")
    return chosen[0] if chosen and chosen[0] in POSITIONS else "none"


def _finished(name: str, attention: AttentionConfig, options: dict[str, int], text: str) -> Recipe:
    carried, learned = "carried" in options, "learned" in options
    if carried and learned:
        raise InputError(f"recipe {text!r}: learned positions end with a segment; take rotary with carried")
    return Recipe(name, attention, carried, options.get("redraw"), learned)


def _config(text: str, **fields: Any) -> AttentionConfig:
    try:
        return AttentionConfig(**fields)
    except (TypeError, ValueError) as error:
        raise InputError(f"recipe {text!r}: {error}") from None


def _written(options: dict[str, int]) -> list[str]:
    numbers = [f"{name}={options[name]}" for name in ("features", "redraw", "conv") if name in options]
    return numbers + [name for name in ("iid", *POSITIONS, "learned", "carried") if name in options]
