"""Experiments: how far kernels are from softmax, measured on the user's own data."""

from .._errors import InputError
from ._sites import Site
from .activations import (
    Activations,
    load_activations,
    merge_activations,
    sample_path,
    save_activations,
)
from .answer import Answer, answers
from .fidelity import Results, fidelity
from .synthetic import synthetic
from .tables import write_tables

__all__ = [
    "Activations",
    "Answer",
    "InputError",
    "Results",
    "Site",
    "answers",
    "fidelity",
    "load_activations",
    "merge_activations",
    "sample_path",
    "save_activations",
    "synthetic",
    "write_tables",
]
