"""The default task: numbers in English words, to be written in digits. Every answer can be checked."""

from __future__ import annotations

import torch

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
COUNT, BELOW = 8_000, 10_000  # enough to learn from in a minute, and to judge on


def numbers(count: int = COUNT, seed: int = 0, below: int = BELOW) -> list[tuple[str, str]]:
    """Pairs such as ``("three hundred and five", "305")``, no number twice.

    The logarithm of a number is uniform, so short ones are not drowned by the many long ones; where few are
    short they are nearly all there.

    Args:
        count: pairs wanted. seed: of numbers and forms. below: numbers are smaller than this.

    Returns:
        At most ``count`` pairs: fewer where the range has not that many.
    """
    chance = torch.Generator().manual_seed(seed)
    drawn = below ** torch.rand(10 * count, generator=chance, dtype=torch.float64)
    found = list(dict.fromkeys((drawn.long() - 1).tolist()))[:count]
    forms = torch.randint(16, (len(found),), generator=chance).tolist()
    return [
        (spell(n, conjunction=f & 1 > 0, hyphen=f & 2 > 0, article=f & 4 > 0, hundreds=f & 8 > 0), str(n))
        for n, f in zip(found, forms, strict=True)
    ]


def spell(
    number: int,
    *,
    conjunction: bool = True,
    hyphen: bool = True,
    article: bool = False,
    hundreds: bool = False,
) -> str:
    """A number from 0 to 999,999 in words.

    Args:
        number: to be spelled. conjunction: "three hundred and five" instead of "three hundred five".
        hyphen: "twenty-one" instead of "twenty one". article: "a hundred" instead of "one hundred", at the
            start. hundreds: "twelve hundred" instead of "one thousand two hundred".
    """
    joint = " and " if conjunction else " "
    dash = "-" if hyphen else " "
    if hundreds and 1100 <= number < 10_000 and number // 100 % 10:
        text = f"{_tens(number // 100, dash)} hundred" + _rest(number % 100, joint, dash)
    elif number < 1000:
        text = _below_thousand(number, joint, dash)
    else:
        text = f"{_below_thousand(number // 1000, joint, dash)} thousand"
        rest = number % 1000
        text += _rest(rest, joint, dash) if rest < 100 else f" {_below_thousand(rest, joint, dash)}"
    if article and text.startswith(("one hundred", "one thousand")):
        return f"a{text.removeprefix('one')}"
    return text


def _tens(number: int, dash: str) -> str:
    if number < 20:
        return _SMALL[number]
    return _TENS[number // 10] + (f"{dash}{_SMALL[number % 10]}" if number % 10 else "")


def _below_thousand(number: int, joint: str, dash: str) -> str:
    if number < 100:
        return _tens(number, dash)
    return f"{_SMALL[number // 100]} hundred" + _rest(number % 100, joint, dash)


def _rest(number: int, joint: str, dash: str) -> str:
    return f"{joint}{_tens(number, dash)}" if number else ""
