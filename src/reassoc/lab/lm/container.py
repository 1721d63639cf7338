"""Tensors and one JSON object in a safetensors file: what checkpoints and finished models are kept in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..._errors import InputError
from ..._files import atomic_write

_KEY = "reassoc-lm"  # one key only: safetensors writes several in no fixed order


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any], what: str) -> None:
    """Replace a file whole, or leave the earlier one.

    Args:
        what: the file in words, for the message.

    Raises:
        InputError: it cannot be written, for example because no space is left.
    """
    content = save({name: t.detach().contiguous() for name, t in tensors.items()}, {_KEY: json.dumps(about)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        kept = "; the earlier one is as it was, and the same command goes on from it" if path.exists() else ""
        reason = error.strerror or error
        raise InputError(f"{path}: the {what} cannot be written ({reason}){kept}. Make room there") from None


def read(path: Path, format: str, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and the JSON object; tensors are copies of their own.

    Args:
        format: that the object must name. what: the file in words, for the message.

    Raises:
        InputError: missing, unreadable, damaged, or something else.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected a {what} of `reassoc lm`")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path}: damaged, or not a {what} of `reassoc lm` ({line})") from None
    if not isinstance(about, dict) or about.get("format") != format:
        raise InputError(f"{path}: not a {what} of `reassoc lm` of this version ({format})")
    return tensors, about
