"""Language models that differ in their attention only: trained, judged, compared."""

from .models import load_model
from .ranks import Ranks, ranks
from .run import Results, compare, forget_parts
from .settings import Settings
from .study import study
from .text import Text, read

__all__ = [
    "Ranks",
    "Results",
    "Settings",
    "Text",
    "compare",
    "forget_parts",
    "load_model",
    "ranks",
    "read",
    "study",
]
