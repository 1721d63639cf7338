"""What layers of transformers may ask for beyond softmax(scale q k^T) v: known here without importing it."""

from __future__ import annotations

from collections.abc import Mapping

_EXTRAS = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "a position bias",
}


def beyond_softmax(arguments: Mapping[str, object]) -> str | None:
    """The first such thing among the further arguments of an attention function, in words."""
    return next((what for name, what in _EXTRAS.items() if arguments.get(name) is not None), None)
