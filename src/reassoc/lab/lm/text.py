"""The text that models are trained on: bytes or the tokens of a tokenizer, cut into three in order."""

from __future__ import annotations

import hashlib
import importlib.resources
import lzma
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._errors import InputError

EMBEDDED = "king-james"
SPLITS = {"training": 0.90, "validation": 0.95, "test": 1.0}  # each ends at this share of the bytes
BYTES = 256


@dataclass(frozen=True)
class Split:
    """Tokens int64 ``(n,)`` of a part of the text, and how many bytes all but the first of them stand for."""

    tokens: Tensor
    bytes: int


@dataclass(frozen=True)
class Text:
    """A text as a language model sees it.

    Attributes:
        name: of the file, without folder. sha256: of the bytes of the text. vocabulary: number of tokens
            that there are. tokenizer: name and SHA-256 of the tokenizer's file, ``None`` for bytes.
        training, validation, test: in the order of the text.
    """

    name: str
    sha256: str
    vocabulary: int
    tokenizer: dict[str, str] | None
    training: Split
    validation: Split
    test: Split
    _tokenizer: Any = None

    def before(self, part: str) -> Tensor:
        """Tokens just before the validation or test part, as many as that has (or as there are)."""
        earlier = self.training if part == "validation" else self.validation
        return earlier.tokens[-len(getattr(self, part).tokens) :]

    def words(self, tokens: list[int]) -> str:
        """Tokens as text; bytes that are no UTF-8 become replacement characters."""
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
        return bytes(tokens).decode("utf-8", "replace")


def read(path: Path | None = None, tokenizer: Path | None = None) -> Text:
    """Read and cut a text: the first 90 % of its bytes for training, 5 % for validation, 5 % for test.

    Args:
        path: a file of any bytes; with a tokenizer, of UTF-8. Default: the embedded text.
        tokenizer: a ``tokenizer.json`` of Hugging Face's tokenizers. Default: tokens are bytes.

    Raises:
        InputError: files that are missing or not what they should be; the package ``tokenizers`` missing.
    """
    content = _content(path)
    name = EMBEDDED if path is None else path.name
    ends = [0] + [int(len(content) * share) for share in SPLITS.values()]
    if tokenizer is not None:
        ends = [_character(content, end) for end in ends]
    parts = [content[start:stop] for start, stop in pairwise(ends)]
    digest = hashlib.sha256(content).hexdigest()
    about: dict[str, str] | None = None
    maker: Any = None
    if tokenizer is None:
        cut, vocabulary = [_whole(part) for part in parts], BYTES
    else:
        maker, about = load_tokenizer(tokenizer)
        cut, vocabulary = [_tokens(maker, part, name) for part in parts], maker.get_vocab_size(True)
    training, validation, test = cut
    return Text(name, digest, vocabulary, about, training, validation, test, maker)


def load_tokenizer(path: Path) -> tuple[Any, dict[str, str]]:
    """A tokenizer from its JSON file, and its name and SHA-256.

    Raises:
        InputError: the file is missing or is no such file; the package ``tokenizers`` is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise InputError("--tokenizer needs the package tokenizers: pip install 'reassoc[lab]'") from None
    content = _bytes(path, "a tokenizer.json")
    try:
        made = Tokenizer.from_str(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 (byte {error.start}); expected a tokenizer.json") from None
    except Exception as error:  # its own errors are plain exceptions
        raise InputError(f"{path}: not a tokenizer.json of Hugging Face's tokenizers ({error})") from None
    # A saved tokenizer may have either switched on.
    made.no_padding()
    made.no_truncation()
    return made, {"name": path.name, "sha256": hashlib.sha256(content).hexdigest()}


def _content(path: Path | None) -> bytes:
    if path is not None:
        return _bytes(path, "a text file")
    embedded = importlib.resources.files("reassoc.lab") / "data" / f"{EMBEDDED}.txt.xz"
    return lzma.decompress(embedded.read_bytes())


def _bytes(path: Path, what: str) -> bytes:
    if path.is_dir():
        raise InputError(f"{path}: is a folder; expected {what}")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected {what}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); expected {what}") from None


def _character(content: bytes, end: int) -> int:
    """The beginning of the UTF-8 character that a cut would divide."""
    while 0 < end < len(content) and content[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _whole(part: bytes) -> Split:
    tokens = torch.tensor(list(part), dtype=torch.int64)
    return Split(tokens, max(0, len(part) - 1))


def _tokens(maker: Any, part: bytes, name: str) -> Split:
    try:
        text = part.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"0x{part[error.start]:02x}"
        raise InputError(
            f"{name}: not UTF-8 text ({error.reason}: {wrong}), which a tokenizer needs; convert the file, "
            "or leave --tokenizer out to train on its bytes"
        ) from None
    found = maker.encode(text, add_special_tokens=False)
    first = found.offsets[0][1] if found.ids else 0
    return Split(torch.tensor(found.ids, dtype=torch.int64), len(text[first:].encode()))
