"""The panels by name: what each computes, from which controls, and the answer as JSON."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .._errors import InputError
from . import approximation, capacity, cost, reassociation
from .controls import Control, shown
from .tables import TABLES


class Panel(NamedTuple):
    """What is computed for one part of the page."""

    compute: Callable[[Mapping[str, str]], dict[str, Any]]
    controls: tuple[Control, ...]
    tables: tuple[str, ...] = ()  # parameters that hold numbers of the visitor's own


PANELS: dict[str, Panel] = {
    "reassociation": Panel(reassociation.reassociation, reassociation.CONTROLS, TABLES),
    "cost": Panel(cost.cost, cost.CONTROLS),
    "approximation": Panel(approximation.approximation, approximation.CONTROLS),
    "capacity": Panel(capacity.capacity, capacity.CONTROLS),
    "overwriting": Panel(capacity.overwriting, capacity.OVERWRITING),
}
PAGE_ONLY = ("query", "prefix")  # which part of an answer is shown: the server does not need to know
_DIGITS = 9  # the page prints six


def answer(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """What a panel shows, as JSON; NaN and infinities as text.

    Args:
        name: of a panel. pairs: parameters as they came; those of other panels do not matter.

    Raises:
        InputError: a parameter that is unknown, comes twice or cannot be read.
    """
    known = {each for panel in PANELS.values() for each in (*(c.name for c in panel.controls), *panel.tables)}
    given: dict[str, str] = {}
    for parameter, value in pairs:
        if parameter not in known and parameter not in PAGE_ONLY:
            raise InputError(f"unknown parameter {shown(parameter)}; known: {', '.join(sorted(known))}")
        if parameter in given:
            raise InputError(f"{parameter} is given twice")
        given[parameter] = value
    panel = PANELS[name]
    own = {*(control.name for control in panel.controls), *panel.tables}
    return _answer(name, tuple(sorted((each, value) for each, value in given.items() if each in own)))


@functools.lru_cache(maxsize=256)
def _answer(name: str, given: tuple[tuple[str, str], ...]) -> str:
    return dumps(PANELS[name].compute(dict(given)))


def dumps(value: Any) -> str:
    """Strict JSON, numbers to nine digits."""
    return json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        rounded = float(f"{value:.{_DIGITS}g}")
        return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded
    return value
