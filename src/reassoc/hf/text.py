"""Text as the examples that calibration, distillation and evaluation take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._errors import InputError

Example = dict[str, Tensor]  # "input_ids" and "attention_mask", int64 (tokens,)


def blocks(tokenizer: Any, texts: Sequence[str], length: int) -> list[Example]:
    """Consecutive blocks of ``length`` tokens, no special tokens between: for models that write text.

    What is left at the end of a text is dropped; no block holds two texts.

    Raises:
        InputError: a text shorter than one block.
    """
    found: list[Example] = []
    for index, text in enumerate(texts):
        ids = torch.tensor(plain_ids(tokenizer, text), dtype=torch.int64)
        if len(ids) < length:
            raise InputError(
                f"text {index + 1} has {len(ids)} tokens of this model, a block takes {length}: give a "
                "longer text, or a smaller length"
            )
        found += [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids.split(length)]
        if len(found[-1]["input_ids"]) < length:
            del found[-1]
    return found


def lines(tokenizer: Any, texts: Sequence[str], length: int) -> list[Example]:
    """Every line that is not blank, with its special tokens, cut at ``length``: for encoders.

    Raises:
        InputError: a text without a line.
    """
    found: list[Example] = []
    for index, text in enumerate(texts):
        rows = [row for row in text.splitlines() if row.strip()]
        if not rows:
            raise InputError(f"text {index + 1} has no line that is not blank")
        ids = tokenizer(rows, truncation=True, max_length=length, padding=False, verbose=False)["input_ids"]
        for row in ids:
            kept = torch.tensor(row, dtype=torch.int64)
            found.append({"input_ids": kept, "attention_mask": torch.ones_like(kept)})
    return found


def examples(model: Any, tokenizer: Any, texts: Sequence[str], length: int) -> list[Example]:
    """:func:`blocks` for a model that writes text, :func:`lines` for one that does not."""
    return (blocks if model.can_generate() else lines)(tokenizer, texts, length)


def by_name(
    cut: Callable[[Any, Sequence[str], int], list[Example]],  # blocks, lines or examples of a model
    tokenizer: Any,
    texts: Mapping[str, str],
    length: int,
) -> dict[str, list[Example]]:
    """The examples of each text; an error names the text."""
    found = {}
    for name, text in texts.items():
        try:
            found[name] = cut(tokenizer, [text], length)
        except InputError as error:
            raise InputError(str(error).replace("text 1", name, 1)) from None
    return found


def padded(rows: Sequence[Example]) -> Example:
    """A batch ``(B, tokens)``: short rows are padded at the right, and masked."""
    longest = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.stack([torch.nn.functional.pad(row[name], (0, longest - len(row[name]))) for row in rows])
        for name in rows[0]
    }


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    # Padding and truncation are named, because a saved tokenizer may have either switched on.
    plain = {"add_special_tokens": False, "padding": False, "truncation": False, "verbose": False}
    ids: list[int] = tokenizer(text, **plain)["input_ids"]
    return ids
