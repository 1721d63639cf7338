"""Options that are texts: files, and which part of them."""

from __future__ import annotations

from pathlib import Path


def part(option: str, text: str) -> tuple[float, float]:
    """The two fractions of ``A:B``."""
    from ..lab import InputError

    try:
        start, stop = map(float, text.split(":"))
        if 0 <= start < stop <= 1:
            return start, stop
    except ValueError:
        pass
    raise InputError(f"{option} is {text!r}; expected two fractions in order, such as 0:0.9")


def texts(paths: list[Path], fractions: tuple[float, float]) -> dict[str, str]:
    """By file name, the part of each file's bytes between two fractions.

    A character that a cut falls into belongs to neither side.
    """
    from ..lab import InputError
    from ..lab._text import read_text

    found: dict[str, str] = {}
    for path in paths:
        if path.name in found:
            raise InputError(f"{path}: a second text named {path.name}; names tell texts apart")
        content = read_text(path).encode()
        start, stop = (int(len(content) * share) for share in fractions)
        found[path.name] = content[start:stop].decode("utf-8", "ignore")
    return found


def disjoint(
    trained: list[Path], used: tuple[float, float], tests: list[Path], kept: tuple[float, float]
) -> None:
    """Raise `InputError` if a file is trained and tested on, and the parts overlap."""
    from ..lab import InputError

    own = {path.resolve() for path in trained}
    for path in tests:
        if path.resolve() in own and used[0] < kept[1] and kept[0] < used[1]:
            raise InputError(
                f"{path}: --part {used[0]:g}:{used[1]:g} and --test-part {kept[0]:g}:{kept[1]:g} overlap; a "
                "figure on text that was trained on says nothing"
            )
