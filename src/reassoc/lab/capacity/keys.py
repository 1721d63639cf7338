"""Stored keys for the closed form: from a file, or made to be easy, ordinary and hard to keep apart."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..._errors import InputError
from ..activations import load_activations

MOST_KEYS = 2048  # the closed form is cubic in them
CLUSTERS = 8
SPREAD = 0.5  # of a cluster, relative to its centre


class Stored(NamedTuple):
    """Keys of one head that a memory is to keep: ``key (N, d)``, float64, and ``value (N, e)`` if known."""

    name: str
    head: int
    key: Tensor
    value: Tensor | None = None


def made_keys(dim: int, counts: tuple[int, ...], seed: int) -> list[Stored]:
    """Three kinds of keys, all of norm ``sqrt(dim)`` or about that, for each number of keys.

    Orthogonal, for at most ``dim`` keys; Gaussian; and clustered: Gaussian around 8 Gaussian centres, half
    as far from them as those are from zero, then scaled to the same expected norm.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    found = []
    for count in counts:
        if count <= dim:
            basis = torch.linalg.qr(normal(dim, dim))[0]
            found.append(Stored("orthogonal", 0, basis[:count] * math.sqrt(dim)))
        found.append(Stored("Gaussian", 0, normal(count, dim)))
        centres = normal(CLUSTERS, dim)[torch.arange(count) % CLUSTERS]
        found.append(Stored("clustered", 0, (centres + SPREAD * normal(count, dim)) / math.hypot(1, SPREAD)))
    return found


def load_keys(path: Path) -> tuple[list[Stored], str]:
    """Keys of a safetensors file, and the file's SHA-256.

    The file holds ``key`` (N, d) or (heads, N, d) and perhaps ``value`` alike, or is an activation file of
    `reassoc capture`: then the keys of each head are those of its first sequence.

    Raises:
        InputError: missing, damaged, without ``key``, of wrong shapes, not finite, or with too many keys.
    """
    found: list[Stored] = []
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            if "sites" not in (file.metadata() or {}):
                if "key" not in names:
                    raise InputError(f"--keys: {path.name} has no tensor 'key', (N, d) or (heads, N, d)")
                value = file.get_tensor("value") if "value" in names else None
                found = list(_heads(path.stem, file.get_tensor("key"), value))
    except (SafetensorError, OSError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"--keys: {path} is not a readable safetensors file ({why})") from None
    if not found:
        for site in load_activations(path).sites:
            _, key, value = next(iter(site.sequences()))
            found += _heads(site.name, key, value)
    for stored in found:
        _check(path.name, stored)
    return found, digest


def _heads(name: str, key: Tensor, value: Tensor | None) -> Iterator[Stored]:
    key = key[None] if key.ndim == 2 else key
    value = value[None] if value is not None and value.ndim == 2 else value
    if key.ndim != 3 or 0 in key.shape or not key.is_floating_point():
        raise InputError(
            "--keys: 'key' must be floating point, (N, d) or (heads, N, d), got "
            f"{str(key.dtype).removeprefix('torch.')} {tuple(key.shape)}"
        )
    if value is not None and (value.ndim != 3 or value.shape[:2] != key.shape[:2] or not value.shape[2]):
        raise InputError(
            f"--keys: 'value' must be (heads, N, e) with the heads and N of 'key', got {tuple(value.shape)}"
        )
    for head in range(len(key)):
        yield Stored(name, head, key[head].double(), None if value is None else value[head].double())


def _check(file: str, stored: Stored) -> None:
    count = len(stored.key)
    if not 2 <= count <= MOST_KEYS:
        raise InputError(f"--keys: {file} has {count:,} keys a head; expected 2 to {MOST_KEYS:,}: cut it")
    for tensor in (stored.key, stored.value):
        if tensor is not None and not bool(tensor.isfinite().all()):
            raise InputError(f"--keys: {file}: head {stored.head} of {stored.name!r} has NaN or infinity")
