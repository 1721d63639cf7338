"""Checkpoints of training: the same command goes on from them to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..._errors import InputError
from .container import read, write
from .trainer import Trainer

FORMAT = "reassoc-lm-checkpoint-1"


def file_name(recipe: str, seed: int) -> str:
    """Of a run: no colon, which some file systems refuse. No map has an underscore, so names stay apart."""
    return f"{recipe.replace(':', '_')}-seed{seed}.safetensors"


def save(path: Path, trainer: Trainer, key: dict[str, Any]) -> None:
    """Write a checkpoint; every process takes part, the first one writes.

    Args:
        key: what decides the numbers of the run, as JSON holds it.

    Raises:
        InputError: it cannot be written; an earlier one is as it was.
    """
    tensors, about = trainer.tensors()
    if trainer.ranks.first:
        write(path, tensors, {"format": FORMAT, "key": key, **about}, "checkpoint")
    trainer.ranks.wait()


def resume(path: Path, trainer: Trainer, key: dict[str, Any]) -> bool:
    """Go on from a checkpoint, if there is one.

    Raises:
        InputError: it is damaged, or of another run: what differs is named.
    """
    if not path.exists():
        return False
    tensors, about = read(path, FORMAT, "checkpoint")
    for name, value in key.items():
        found = about.get("key", {}).get(name) if isinstance(about.get("key"), dict) else None
        if found != value:
            raise InputError(
                f"{path}: made with another {name} ({_difference(found, value)}); repeat the command that "
                "made it, choose another --out, or remove the file to start again"
            )
    try:
        trainer.load(tensors, about)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise InputError(f"{path}: damaged checkpoint ({line}); remove it to start this run again") from None
    return True


def _difference(found: Any, value: Any) -> str:
    """In few words: the entries that differ, where both are objects."""
    if isinstance(found, dict) and isinstance(value, dict):
        names = [n for n in {**value, **found} if found.get(n) != value.get(n)]
        return ", ".join(_difference_of(n, found.get(n), value.get(n)) for n in names[:3])
    return f"{_short(found)} instead of {_short(value)}"


def _difference_of(name: str, found: Any, value: Any) -> str:
    if isinstance(found, dict) and isinstance(value, dict):
        return _difference(found, value)
    return f"{name} {_short(found)} instead of {_short(value)}"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
