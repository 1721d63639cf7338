"""What happens inside a model, told to whoever listens."""

from .event import AttentionEvent, Event, IntermediateOutput, QKVEvent
from .event_dispatcher import EventDispatcher

__all__ = ["AttentionEvent", "Event", "EventDispatcher", "IntermediateOutput", "QKVEvent"]
