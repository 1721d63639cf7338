"""What a visitor may set: one list, from which the page builds its inputs and the server its checks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from .._errors import InputError

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_SHOWN = 40  # characters of a wrong value that a message repeats


@dataclass(frozen=True)
class Control:
    """One input of a panel.

    Attributes:
        name: of the parameter in the address. label: beside the input. values: in order; of a choice those
            allowed, of a range the places of the slider, and the address may name any number between.
        words: of a choice, what the page calls each value. default: one of the values.
        grid: the values that an exported page holds. whole: of a range, whether only integers make sense.
        when: another control and its values under which this one means anything; else it is left out.
    """

    name: str
    label: str
    values: tuple[str, ...]
    default: str
    words: tuple[str, ...] = ()
    grid: tuple[str, ...] = ()
    whole: bool = False
    when: tuple[str, tuple[str, ...]] | None = None

    def to_json(self) -> dict[str, Any]:
        """As the page wants it."""
        return asdict(self)

    def read(self, text: str) -> str:
        """The value in one spelling.

        Raises:
            InputError: not one of the choices, not a number, or outside the range.
        """
        if self.words:
            if text not in self.values:
                raise InputError(f"{self.name} must be one of {', '.join(self.values)}; got {shown(text)}")
            return text
        value = number(self.name, text)
        low, high = float(self.values[0]), float(self.values[-1])
        if self.whole and value != int(value):
            raise InputError(f"{self.name} must be a whole number, got {shown(text)}")
        if not low <= value <= high:
            raise InputError(f"{self.name} must lie between {low:g} and {high:g}, got {shown(text)}")
        return text if text in self.values else repr(int(value) if value == int(value) else value)


def choice(name: str, label: str, words: Mapping[str, str], default: str | None = None) -> Control:
    """One of several values, the first the default if none is named."""
    values = tuple(words)
    return Control(name, label, values, default or values[0], tuple(words.values()), values)


def numbers(
    name: str,
    label: str,
    values: tuple[float, ...],
    default: float,
    grid: tuple[float, ...] = (),
    **more: Any,
) -> Control:
    """A slider over ascending numbers."""
    spelled = [tuple(f"{value:.12g}" for value in some) for some in (values, grid or values)]
    return Control(
        name,
        label,
        spelled[0],
        f"{default:.12g}",
        grid=spelled[1],
        whole=all(v == int(v) for v in values),
        **more,
    )


def number(name: str, text: str) -> float:
    """A finite number in plain notation.

    Raises:
        InputError: anything else, NaN and infinities among them.
    """
    if not _NUMBER.fullmatch(text) or math.isinf(float(text)):
        raise InputError(f"{name} must be a number such as 0.5 or -2e-3, got {shown(text)}")
    return float(text)


def shown(text: str) -> str:
    """A value as a message repeats it: quoted, escaped, cut."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


def settle(controls: tuple[Control, ...], given: Mapping[str, str]) -> dict[str, str]:
    """The value of every control that means anything, defaults included, in order.

    Raises:
        InputError: see :meth:`Control.read`.
    """
    found: dict[str, str] = {}
    for control in controls:
        if _meant(control, found):
            found[control.name] = control.read(given.get(control.name, control.default))
    return found


def grid(controls: tuple[Control, ...]) -> Iterator[dict[str, str]]:
    """Every combination that an exported page holds, once."""
    seen = set()
    for values in product(*(control.grid for control in controls)):
        given = dict(zip((control.name for control in controls), values, strict=True))
        found = settle(controls, given)
        if key(found) not in seen:
            seen.add(key(found))
            yield found


def key(settings: Mapping[str, str]) -> str:
    """A name for settings; the page makes the same from its controls."""
    return "&".join(f"{name}={value}" for name, value in settings.items())


def _meant(control: Control, found: Mapping[str, str]) -> bool:
    return control.when is None or found.get(control.when[0]) in control.when[1]
