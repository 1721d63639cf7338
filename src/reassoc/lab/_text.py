"""Text to token sequences of a fixed length, with the special tokens that belong around a text."""

from pathlib import Path
from typing import Any

from .._errors import InputError


def read_text(path: Path) -> str:
    """Return a file's text; `InputError` if it is missing, not a file, or not UTF-8."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; expected a text file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such text file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot read the text file ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); convert the file to UTF-8") from error


def token_sequences(
    tokenizer: Any, text: str, name: str, tokens: int, sequence_length: int
) -> list[list[int]]:
    """Cut the beginning of a text into consecutive sequences of token ids.

    **Arguments**

    - `name`: of the text, for messages.
    - `tokens`: number of tokens of all sequences together, special tokens included.
    - `sequence_length`: tokens of each sequence, special tokens included; the last one may be shorter.

    **Raises** `InputError`: the text has too few tokens, or a sequence has no room for a token of the text.
    """
    # Padding and truncation are named, because a saved tokenizer may have either switched on.
    plain = {"padding": False, "truncation": False, "verbose": False}
    prefix, suffix = _special_tokens(tokenizer, plain)
    special = len(prefix) + len(suffix)
    lengths = [sequence_length] * (tokens // sequence_length)
    if tokens % sequence_length:
        lengths.append(tokens % sequence_length)
    if min(lengths) <= special:
        raise InputError(
            f"{tokens} tokens in sequences of {sequence_length} make a sequence of {min(lengths)}, which the "
            f"{special} special tokens of this model fill; choose --tokens as a multiple of "
            f"--sequence-length, and that above {special}"
        )
    ids = tokenizer(text, add_special_tokens=False, **plain)["input_ids"]
    needed = tokens - special * len(lengths)
    if len(ids) < needed:
        raise InputError(
            f"{name}: the text has {len(ids)} tokens of this model; {needed} are needed for --tokens "
            f"{tokens}. Give a longer text or a smaller number"
        )
    sequences, start = [], 0
    for length in lengths:
        stop = start + length - special
        sequences.append([*prefix, *ids[start:stop], *suffix])
        start = stop
    return sequences


def _special_tokens(tokenizer: Any, plain: dict[str, bool]) -> tuple[list[int], list[int]]:
    # Found by looking, which works for every tokenizer, fast or not.
    bare = tokenizer("a", add_special_tokens=False, **plain)["input_ids"]
    full = tokenizer("a", **plain)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise InputError(
        "this model's tokenizer does not put its special tokens around a text, which is not supported"
    )
