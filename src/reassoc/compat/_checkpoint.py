"""Weights from files of unknown origin: tensors by name, or one line that says why not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .._errors import InputError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Names under which training loops keep the weights beside optimizers and counters; the first found wins.
WRAPPERS = ("state_dict", "model_state_dict", "model", "weights")


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of one written by ``torch.save``, on the CPU.

    The file is untrusted: nothing in it is executed; names that are not printable, tensors that claim more
    numbers than the file holds, and numbers that are not finite are refused.

    Raises:
        InputError: not readable, no weights, or something beside tensors that torch will not load.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file" if not path.exists() else f"{path}: not an ordinary file")
    tensors = read_safetensors(path) if _is_safetensors(path) else _unwrapped(path, _torch_load(path))
    for name, tensor in tensors.items():
        if not name.isprintable():  # names are shown, and a terminal obeys control characters
            raise InputError(f"{path}: a tensor has the name {ascii(name)[:100]}, which is not printable")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise InputError(f"{path}: tensor {name!r} is not an ordinary one; save a plain state dict")
        if tensor.dtype not in (*FLOATS, *INTEGERS, torch.bool):
            raise InputError(f"{path}: tensor {name!r} is {tensor.dtype}, a kind of number not known here")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise InputError(f"{path}: tensor {name!r} claims more numbers than the file holds for it")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InputError(f"{path}: tensor {name!r} holds NaN or infinity")
    return tensors


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        InputError: it is missing, or none.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({_line(error)})") from error


def _is_safetensors(path: Path) -> bool:
    """By content: eight bytes of length, then JSON. Files of torch.save begin as zip archives or pickles."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _torch_load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # whatever a broken or hostile file makes the unpickler do
        if "weights_only" in str(error) or "Unsupported" in str(error):
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = f" ({named[1]})" if named else ""
            raise InputError(
                f"{path}: holds more than tensors{what}, and loading that could run code from the file. Have "
                "the state dict saved alone where it was made or, if you trust who made it, do so here: "
                "loaded = torch.load(path, weights_only=False), then torch.save(loaded['state_dict'], "
                "other_path), or loaded.state_dict() of a whole module"
            ) from error
        raise InputError(
            f"{path}: neither a safetensors file nor one of torch.save ({_line(error)})"
        ) from error


def _unwrapped(path: Path, loaded: Any) -> dict[str, Tensor]:
    """The weights in what was saved: a state dict, or one kept beside other things."""
    if isinstance(loaded, Mapping):
        for part in [*(loaded.get(name) for name in WRAPPERS), loaded]:
            if isinstance(part, Mapping):
                tensors = {str(name): t for name, t in part.items() if isinstance(t, Tensor)}
                if tensors:
                    return tensors
    raise InputError(f"{path}: no state dict in it; expected names with tensors, got {type(loaded).__name__}")


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
