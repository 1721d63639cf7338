"""Associative recall: what each kind of attention can answer, for the memory it keeps."""

from .data import Size
from .report import study
from .run import Results, forget_parts, recall
from .settings import Settings, size

__all__ = ["Results", "Settings", "Size", "forget_parts", "recall", "size", "study"]
