"""Handlers of events, each behind a filter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from .event import Event
from .filters import event_class

Handler = Callable[[Any], Any]


class EventDispatcher:
    """Hands events to the handlers whose filter lets them pass, in the order of listening."""

    _dispatchers: ClassVar[dict[str, EventDispatcher]] = {}

    def __init__(self) -> None:
        self._listeners: dict[Handler, Callable[[Any], Any]] = {}

    def listen(self, event_filter: type[Event] | Callable[[Any], Any], event_handler: Handler) -> None:
        """Call ``event_handler(event)`` for events that pass; a handler has one filter, the last given.

        Args:
            event_filter: a class of events, a filter of filters.py, or any function of an event.
            event_handler: what to call.
        """
        if isinstance(event_filter, type) and issubclass(event_filter, Event):
            event_filter = event_class(event_filter)
        self._listeners[event_handler] = event_filter

    def remove(self, event_handler: Handler) -> None:
        """Forget a handler, if it is known."""
        self._listeners.pop(event_handler, None)

    def clear(self) -> None:
        """Forget all handlers."""
        self._listeners.clear()

    def dispatch(self, event: Event) -> None:
        """Hand out one event."""
        for handler, passes in list(self._listeners.items()):  # a handler may remove itself
            if passes(event):
                handler(event)

    @property
    def _silent(self) -> bool:
        """Whether nobody would hear an event, so that none need be made."""
        return type(self).dispatch is EventDispatcher.dispatch and not self._listeners

    @classmethod
    def get(cls, key: str | EventDispatcher = "") -> EventDispatcher:
        """The dispatcher of that name, made at its first use; a dispatcher is its own name."""
        if isinstance(key, EventDispatcher):
            return key
        if key not in cls._dispatchers:
            cls._dispatchers[key] = cls()
        return cls._dispatchers[key]
