"""Speed and memory of linear attention against peers: right results only, ratios first."""

from .run import Results, bench, forget_parts
from .settings import DEFAULT_PROBLEMS, DIRECTIONS, RULES, Problem, Settings
from .tables import write_tables

__all__ = [
    "DEFAULT_PROBLEMS",
    "DIRECTIONS",
    "RULES",
    "Problem",
    "Results",
    "Settings",
    "bench",
    "forget_parts",
    "write_tables",
]
