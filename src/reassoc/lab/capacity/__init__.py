"""How many associations a memory keeps apart: in closed form, and by the field's retrieval experiment."""

from .keys import load_keys
from .report import study
from .run import Results, capacity, forget_parts
from .settings import Settings

__all__ = ["Results", "Settings", "capacity", "forget_parts", "load_keys", "study"]
