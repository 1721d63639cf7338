"""The sentences of a recall report, computed from the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._page import count
from .._seeds import compared
from ..fidelity import Row
from ..recipes import recipe
from .data import Size
from .run import DIVERGED, Results

_WITHIN = 0.02  # accuracies this close are told as level: about two standard errors of 1,000 answers


def of_size(rows: list[Row], size: Size, text: str | None = None) -> list[Row]:
    """The rows of one size of test, and of one recipe."""
    return [
        row
        for row in rows
        if (row["tokens"], row["pairs"]) == size and (text is None or row["recipe"] == text)
    ]


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)


def by(rows: list[Row], key: str, value: str = "accuracy") -> dict[float, list[float]]:
    """Values of one column for each value of another."""
    groups: dict[float, list[float]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row[value])
    return groups


class Best(NamedTuple):
    """Of one recipe: the best mean accuracy over seeds; the smallest state level with it, its accuracy."""

    best: float
    accuracy: float
    row: Row


def _best(rows: list[Row]) -> Best:
    means = {dim: mean(values) for dim, values in by(rows, "head_dim").items()}
    best = max(means.values())
    dim = min(d for d, mean in means.items() if mean >= best - _WITHIN)
    return Best(best, means[dim], next(row for row in rows if row["head_dim"] == dim))


def answer(results: Results, chosen: list[Row], focus: Size, hardest: Size) -> list[str]:
    """What was found, the best recipe first.

    Args:
        results: everything. chosen: the rows at the best learning rates. focus: the size of test to compare
            at, the hardest of those trained on. hardest: of all.
    """
    texts = list(dict.fromkeys(row["recipe"] for row in chosen))
    found = {text: _best(of_size(chosen, focus, text)) for text in texts}
    order = sorted(texts, key=lambda text: (-found[text].best, found[text].row["state_bytes"]))
    linear = [text for text in order if not recipe(text).softmax]
    sentences = []
    for text in linear[:1]:
        _, accuracy, row = found[text]
        sentences.append(
            f"Of linear attention {text} recalls most: {accuracy:.0%} of the answers at {focus}, with "
            f"{count(row['state_bytes'])} bytes of state, whatever the length."
        )
    for text in order:
        _, accuracy, row = found[text]
        if text not in linear:
            sentences.append(
                f"Softmax attention ({text}) answers {accuracy:.0%} and keeps {count(row['state_bytes'])} "
                "bytes, which grow with every token."
            )
    if linear[1:]:
        rest = (
            f"{text} {found[text].accuracy:.0%} ({count(found[text].row['state_bytes'])} bytes)"
            for text in linear[1:]
        )
        sentences.append(f"The others, each at its best size: {', '.join(rest)}.")
    sentences += _convolutions(chosen, focus)
    sentences += _deltas(chosen, focus)
    if hardest != focus:
        harder = of_size(chosen, hardest)
        line = ", ".join(f"{text} {_again(harder, found[text].row):.0%}" for text in order)
        sentences.append(f"At {hardest}, which is harder, the same models answer: {line}.")
    bad = [
        f"{r['recipe']} (head size {r['head_dim']}, rate {r['rate']:g}, seed {r['seed']}, step {r['steps']})"
        for r in of_size(results.rows, focus)
        if r["ended"] == DIVERGED
    ]
    if bad:
        sentences.append(f"Training diverged, and was judged as it stood before: {', '.join(bad)}.")
    return sentences


def _again(rows: list[Row], like: Row) -> float:
    """Mean accuracy of the same recipe and head size among other rows."""
    keys = ("recipe", "head_dim")
    return mean([row["accuracy"] for row in rows if all(row[key] == like[key] for key in keys)])


def _convolutions(chosen: list[Row], focus: Size) -> list[str]:
    """A sentence for each recipe that is there with and without a convolution."""
    texts = list(dict.fromkeys(row["recipe"] for row in chosen))
    sentences = []
    for text in texts:
        parts = text.split(":")
        plain = ":".join(part for part in parts if not part.startswith("conv="))
        if plain != text and plain in texts:
            without, with_it = (_best(of_size(chosen, focus, name)).best for name in (plain, text))
            word = "matters" if with_it > without + _WITHIN else "does not help"
            tokens = next(part for part in parts if part.startswith("conv=")).removeprefix("conv=")
            sentences.append(
                f"A short convolution {word} for {plain}: {with_it:.0%} with one over {tokens} tokens, "
                f"{without:.0%} without."
            )
    return sentences


def _deltas(chosen: list[Row], focus: Size) -> list[str]:
    """A sentence for each map with sum and delta and otherwise equal options, at equal head sizes."""
    texts = list(dict.fromkeys(row["recipe"] for row in chosen))
    sentences = []
    for text in texts:
        parts = text.split(":")
        plain = ":".join(part for part in parts if part != "delta")
        if plain != text and plain in texts:
            sums, deltas = (by(of_size(chosen, focus, name), "head_dim") for name in (plain, text))
            figures = ", ".join(
                f"{mean(deltas[dim]):.0%} against {mean(sums[dim]):.0%} at head size {dim} "
                f"({compared(deltas[dim], sums[dim], _WITHIN)})"
                for dim in sorted(sums.keys() & deltas.keys())
            )
            sentences.append(f"The delta rule against the sum for {parts[0]}: {figures}.")
    return sentences
