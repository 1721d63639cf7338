"""Queries, keys and values worth looking at, small enough to check by hand."""

from __future__ import annotations

from typing import NamedTuple

Rows = tuple[tuple[float, ...], ...]


class Preset(NamedTuple):
    """A place to start: what to see there, the numbers, and the feature map that shows it."""

    label: str
    note: str
    query: Rows  # (queries, d)
    key: Rows  # (n, d)
    value: Rows  # (n, e)
    map: str


_RUNNING: Rows = ((0, 1), (1, 0), (1, 1), (0, 2))

PRESETS: dict[str, Preset] = {
    "exact": Preset(
        "Four exact keys",
        "Every number is whole. Switch the query: the state stays, only the read changes.",
        ((1, 0), (0, 1), (1, 1), (2, -1)),
        ((2, 1), (-1, 2), (1, -1), (0, 3)),
        ((3,), (-2,), (1,), (4,)),
        "identity",
    ),
    "general": Preset(
        "General",
        "With one key, attention can only return its value. Move the prefix on and watch the kernel average.",
        ((0.5, 1), (1, -0.5)),
        ((1, 0), (0, 1), (-1, 0.5), (0.5, -1)),
        ((1,), (2,), (3,), (-1,)),
        "elu+1",
    ),
    "negative": Preset(
        "All keys negative",
        "ReLU turns every key into zeros, so nothing is left to divide by. ELU+1 keeps a tail.",
        ((0.5, 1), (1, 0)),
        ((-1, -0.5), (-2, -1), (-0.25, -3)),
        ((1,), (2,), (3,)),
        "relu",
    ),
    "running": Preset(
        "Running example",
        "Four tokens with values of size two. Query t and prefix t together are causal attention.",
        ((1, 0), (0, 1), (1, 1), (2, 0)),
        _RUNNING,
        ((1, 0), (0, 1), (1, 1), (2, 0)),
        "elu+1",
    ),
    "orthogonal": Preset(
        "Orthogonal keys",
        "Reading with a stored key gives its value exactly: no other key answers. Then try ELU+1.",
        ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        ((1,), (-2,), (3,)),
        "identity",
    ),
    "mixed": Preset(
        "Mixed signs for DPFP",
        "DPFP multiplies neighbouring rectified entries: zeros in a key can make all its features vanish.",
        ((1.5, -0.8), (1, 1), (-0.5, 1.2)),
        ((0, 1), (1.5, -0.8), (-0.5, 1.2), (1, 1), (0.3, 0.7)),
        ((1,), (2,), (3,), (4,), (5,)),
        "dpfp",
    ),
    "hostile": Preset(
        "Tiny denominator",
        "Signed scores that nearly cancel: a tiny denominator makes a huge output. The third key cancels it.",
        ((1, 0), (0, 1)),
        ((1, 0), (-0.9990234375, 1), (-0.0009765625, 2)),
        ((1,), (2,), (3,)),
        "identity",
    ),
}
