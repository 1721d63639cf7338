"""What a conversion costs: pretrained models, converted or not, side by side on the same tokens."""

from .report import study
from .run import Results, evaluate, forget_parts
from .settings import Settings

__all__ = ["Results", "Settings", "evaluate", "forget_parts", "study"]
