"""Parallel text: read from files, divided without overlap, as bytes for a model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..._errors import InputError

# Bytes are 0 to 255: any text fits, and nothing is unknown.
PADDING, START, STOP = 256, 257, 258
VOCABULARY = 259
FEWEST = 10  # pairs, so that each split gets at least one

Pair = tuple[str, str]


class Splits(NamedTuple):
    """Pairs to train on, to watch and to judge on; no source is in two of them."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


def read_pairs(path: Path) -> list[Pair]:
    """Pairs of a file with one pair a line, a tab between source and target.

    Raises:
        InputError: no text in UTF-8, an empty file, a line that is no pair. OSError: it cannot be read.
    """
    found = []
    for number, line in enumerate(_lines(path, "--pairs"), 1):
        parts = line.split("\t")
        if len(parts) != 2 or not all(part.strip() for part in parts):
            have = {1: "no tab", 2: "a side empty"}.get(len(parts), f"{len(parts) - 1} tabs")
            have = have if line.strip() else "an empty line"
            raise InputError(f"--pairs: {path.name} line {number}: expected SOURCE<tab>TARGET, got {have}")
        found.append((parts[0], parts[1]))
    return found


def read_sides(source: Path, target: Path) -> list[Pair]:
    """Pairs of two files, line by line.

    Raises:
        InputError: as :func:`read_pairs`, and files of different length. OSError: one cannot be read.
    """
    left, right = _lines(source, "--source"), _lines(target, "--target")
    if len(left) != len(right):
        raise InputError(
            f"--source, --target: expected as many lines in each, got {len(left):,} in {source.name} and "
            f"{len(right):,} in {target.name}"
        )
    for number, pair in enumerate(zip(left, right, strict=True), 1):
        for option, path, text in zip(("--source", "--target"), (source, target), pair, strict=True):
            if not text.strip():
                raise InputError(f"{option}: {path.name} line {number}: expected text, got an empty line")
    return list(zip(left, right, strict=True))


def check_pairs(pairs: list[Pair], limit: int) -> None:
    """Raise ``InputError`` if there are too few, or some are longer than the limit in bytes."""
    sources = len({source for source, _ in pairs})
    if sources < FEWEST:
        raise InputError(
            f"expected at least {FEWEST} different sources, to train and to judge, got {sources}"
        )
    long = [i for i, pair in enumerate(pairs) if max(len(text.encode()) for text in pair) > limit]
    if long:
        longest = max(len(text.encode()) for pair in pairs for text in pair)
        raise InputError(
            f"--limit: {len(long):,} of {len(pairs):,} pairs are longer than {limit:,} bytes, the first in "
            f"line {long[0] + 1}: remove them, or give --limit {longest} (more memory, slower)"
        )


def divide(pairs: list[Pair], held_out: int, seed: int) -> Splits:
    """Divide by source: a source with several targets goes to one split with all of them.

    Args:
        pairs: at least :data:`FEWEST` sources. held_out: sources to watch, and as many to judge on; at most
            a tenth of all each. seed: of the division.
    """
    by_source: dict[str, list[Pair]] = {}
    for pair in dict.fromkeys(pairs):
        by_source.setdefault(pair[0], []).append(pair)
    groups = list(by_source.values())
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(held_out, len(groups) // FEWEST)
    parts = order[2 * count :], order[:count], order[count : 2 * count]
    return Splits(*([pair for index in part for pair in groups[index]] for part in parts))


def encode(texts: list[str]) -> Tensor:
    """Bytes of each text, padded at the end: int64 ``(B, longest)``."""
    rows = [torch.tensor(list(text.encode()), dtype=torch.long) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def decode(tokens: Tensor) -> list[str]:
    """Texts of int64 ``(B, N)``, each up to its first stop; bytes that are no text become "\ufffd"."""
    found = []
    for row in tokens.tolist():
        row = row[: row.index(STOP)] if STOP in row else row
        found.append(bytes(token for token in row if token < PADDING).decode("utf-8", "replace"))
    return found


def _lines(path: Path, option: str) -> list[str]:
    data = path.read_bytes()
    if not data.strip():
        raise InputError(f"{option}: {path.name} is empty: expected a pair of texts in every line")
    try:
        # Not splitlines, which also ends a line at characters that a text may well contain.
        lines = data.removeprefix(b"\xef\xbb\xbf").decode().split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{option}: {path.name} line {line} is not UTF-8 (byte {data[error.start]:#04x}): convert it"
        ) from None
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]
