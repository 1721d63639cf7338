"""Options that are lists: comma-separated numbers and words."""

from __future__ import annotations

from typing import TypeVar

Number = TypeVar("Number", int, float)


def numbers(option: str, text: str | None, kind: type[Number]) -> list[Number] | None:
    """The numbers of an option, ``None`` if it was not given."""
    from ..lab import InputError

    if text is None:
        return None
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option}: expected {what} separated by commas, got {text!r}")
    return found


def words(option: str, text: str | None) -> list[str] | None:
    """The words of an option, without doubles; ``None`` if it was not given."""
    from ..lab import InputError

    if text is None:
        return None
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise InputError(f"{option}: expected names separated by commas, got {text!r}")
    return found
