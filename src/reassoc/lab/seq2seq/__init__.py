"""Translation with kernel attention in encoder, decoder and between them, against the softmax twin."""

from .numbers import numbers
from .pairs import read_pairs, read_sides
from .report import study
from .run import Results, forget_parts, seq2seq, translate
from .settings import Settings

__all__ = [
    "Results",
    "Settings",
    "forget_parts",
    "numbers",
    "read_pairs",
    "read_sides",
    "seq2seq",
    "study",
    "translate",
]
