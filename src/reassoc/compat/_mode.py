"""Two ways of computing, chosen by name and said once."""

from __future__ import annotations

import sys

MODES = (None, "exact")
_WORDS = {
    None: "this library's operator: no epsilon, masks hide keys (legacy=None)",
    "exact": "the arithmetic of the original, its epsilons and masks included (legacy='exact')",
}
_said: set[tuple[str, str]] = set()


def check_mode(library: str, legacy: str | None) -> str | None:
    """The mode itself; the first time that a library uses it, one line on standard error says so.

    Raises:
        ValueError: an unknown mode.
    """
    if legacy not in MODES:
        raise ValueError(
            f"legacy must be None (the clean operator) or 'exact' (the original's), got {legacy!r}"
        )
    say_once(library, _WORDS[legacy])
    return legacy


def say_once(library: str, words: str) -> None:
    """One line on standard error, the first time."""
    if (library, words) not in _said:
        _said.add((library, words))
        print(f"reassoc.compat.{library}: {words}", file=sys.stderr)
