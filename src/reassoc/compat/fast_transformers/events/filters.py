"""Predicates of events that combine with ``&``, ``|`` and ``~``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from .event import Event


class EventFilter:
    """A predicate of an event. Combines with other filters, classes of events and plain functions."""

    def __call__(self, event: Any) -> Any:
        """Whether the event passes."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(event)")

    def __and__(self, other: Any) -> EventFilter:
        second = _as_filter(other)
        return NotImplemented if second is None else CallableEventFilter(lambda e: self(e) and second(e))

    def __rand__(self, other: Any) -> EventFilter:
        first = _as_filter(other)
        return NotImplemented if first is None else CallableEventFilter(lambda e: first(e) and self(e))

    def __or__(self, other: Any) -> EventFilter:
        second = _as_filter(other)
        return NotImplemented if second is None else CallableEventFilter(lambda e: self(e) or second(e))

    def __ror__(self, other: Any) -> EventFilter:
        first = _as_filter(other)
        return NotImplemented if first is None else CallableEventFilter(lambda e: first(e) or self(e))

    def __invert__(self) -> EventFilter:
        return CallableEventFilter(lambda e: not self(e))


class CallableEventFilter(EventFilter):
    """A function of an event as a filter."""

    def __init__(self, event_filter: Callable[[Any], Any]) -> None:
        self._event_filter = event_filter

    def __call__(self, event: Any) -> Any:
        """What the function says."""
        return self._event_filter(event)


class LayerNameEventFilter(EventFilter):
    """Events of modules whose name inside ``root`` satisfies ``name_filter``; keeps no module alive."""

    def __init__(self, root: nn.Module, name_filter: Callable[[str], Any]) -> None:
        self._names = {weakref.ref(module): name for name, module in root.named_modules()}
        self._name_filter = name_filter

    def __call__(self, event: Any) -> Any:
        """Whether the source has such a name."""
        name = self._names.get(weakref.ref(event.source))
        return False if name is None else self._name_filter(name)


def event_class(klass: type) -> EventFilter:
    """Events of that class."""
    return CallableEventFilter(lambda event: isinstance(event, klass))


def from_layer(layer: nn.Module) -> EventFilter:
    """Events of that very module."""
    return CallableEventFilter(lambda event: event.source is layer)


def layer_name_contains(root: nn.Module, name: str) -> EventFilter:
    """Events of modules of ``root`` with ``name`` in their name."""
    return LayerNameEventFilter(root, lambda full: name in full)


def _as_filter(other: Any) -> EventFilter | None:
    if isinstance(other, EventFilter):
        return other
    if isinstance(other, type) and issubclass(other, Event):
        return event_class(other)
    return CallableEventFilter(other) if callable(other) else None
