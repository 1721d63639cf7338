"""What a parameter may be."""

from __future__ import annotations

from collections.abc import Callable as Function
from typing import Any

from ..events import EventDispatcher


class Spec:
    """A type of parameter: ``predicate(x)`` returns the value to use, or raises ``ValueError``."""

    def __init__(self, predicate: Function[[Any], Any], name: str = "CustomSpec") -> None:
        self._predicate, self._name = predicate, name

    def __repr__(self) -> str:
        return self._name

    def check(self, x: Any) -> bool:
        """Whether ``x`` is acceptable."""
        try:
            self.get(x)
        except ValueError:
            return False
        return True

    def get(self, x: Any) -> Any:
        """The value to use for ``x``.

        Raises:
            ValueError: not acceptable.
        """
        return self._predicate(x)


class Choice(Spec):
    """One of ``choices``."""

    def __init__(self, choices: Any) -> None:
        self._choices = choices
        super().__init__(self._chosen, f"Choice({choices!r})")

    def _chosen(self, x: Any) -> Any:
        if x not in self._choices:
            raise ValueError(f"expected one of {self._choices!r}, got {x!r}")
        return x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choice) and bool(self._choices == other._choices)

    __hash__ = None  # type: ignore[assignment]


class Optional(Spec):
    """What ``spec`` takes, or ``None``, for which ``default`` is used."""

    def __init__(self, spec: Spec, default: Any = None) -> None:
        self._other_spec, self._default = spec, default
        super().__init__(self._given, f"Optional[{spec!r}, {default!r}]")

    def _given(self, x: Any) -> Any:
        return self._default if x is None else self._other_spec.get(x)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Optional) and self._other_spec == other._other_spec
        return same and bool(self._default == other._default)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def _function(x: Any) -> Any:
    if not callable(x):
        raise ValueError(f"expected something to call, got {x!r}")
    return x


def _dispatcher(x: Any) -> Any:
    if not isinstance(x, str | EventDispatcher):
        raise ValueError(f"expected an EventDispatcher or the name of one, got {x!r}")
    return x


Int = Spec(int, "Int")
Float = Spec(float, "Float")
Bool = Spec(bool, "Bool")
Callable = Spec(_function, "Callable")
EventDispatcherInstance = Spec(_dispatcher, "EventDispatcherInstance")
LEGACY = Optional(Choice(("exact",)))  # of this library: see compat/_mode.py
