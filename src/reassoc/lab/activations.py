"""The activation file: what attention layers of a model saw, in one safetensors file.

Tensors, for each site (an attention layer): `{site}.query` (H, N, d), `{site}.key` (G, N, d), `{site}.value`
(G, N, e) of one floating-point dtype, `{site}.cu_seqlens` (n + 1,) int32. Metadata, all strings:

- `format`: "reassoc-activations-1"
- `sites`: JSON, `{site: {"causal": bool, "scale": float, "model": str, "layer": int, "key_heads": [int],
  "query_heads": [int]}}`
- `provenance`: JSON, an object with whatever says where the numbers come from

A file without this metadata that holds `query`, `key` and `value` (and perhaps `cu_seqlens`) is one site,
"input".
"""

import hashlib
import importlib.resources
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from .._errors import InputError
from .._files import atomic_write
from ._metadata import FORMAT, describe, read_metadata, site_from
from ._sites import Site, check_site

_PARTS = ("query", "key", "value", "cu_seqlens")


@dataclass(frozen=True, eq=False)
class Activations:
    """A loaded activation file: its sites in the order of the file's metadata, and where they come from."""

    sites: tuple[Site, ...]
    provenance: dict[str, Any]
    sha256: str  # of the file's bytes


def load_activations(path: str | os.PathLike[str]) -> Activations:
    """Read an activation file, or a plain safetensors file with `query`, `key` and `value`.

    The file is taken as untrusted: nothing in it is executed, and everything is checked before it is
    returned. A plain file is one sequence unless it holds `cu_seqlens`, not causal, with scale d ** -0.5.

    **Raises** `InputError`: the file is missing, unreadable, damaged, of another format, or its tensors do
    not fit together or hold NaN or infinity.
    """
    path = Path(path)
    digest = _sha256(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            names = set(file.keys())
            # Cloned, because the tensors otherwise stay views of a file that may change under them.
            if {"query", "key", "value"} <= names and "sites" not in metadata:
                read = {part: file.get_tensor(part).clone() for part in _PARTS if part in names}
                return Activations((_plain_site(path, read),), {}, digest)
            infos, provenance = read_metadata(str(path), metadata)
            sites = []
            for name, info in infos.items():
                for part in _PARTS:
                    if f"{name}.{part}" not in names:
                        raise InputError(
                            f"{path}: tensor {f'{name}.{part}'!r} is missing, though the file lists site "
                            f"{name!r}; expected query, key, value and cu_seqlens. Capture again"
                        )
                read = {part: file.get_tensor(f"{name}.{part}").clone() for part in _PARTS}
                sites.append(site_from(str(path), name, info, read))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({_first_line(error)})") from error
    return Activations(tuple(sites), provenance, digest)


def save_activations(
    path: str | os.PathLike[str], sites: Iterable[Site], provenance: Mapping[str, Any]
) -> None:
    """Write an activation file, whole or not at all. The same data give the same bytes.

    **Raises** `InputError`: a site that `load_activations` would refuse, two sites of one name, or a file
    that cannot be written. `TypeError` or `ValueError`: a provenance that JSON cannot hold.
    """
    sites = tuple(sites)
    if not sites:
        raise InputError(f"{path}: nothing to save; expected at least one site")
    tensors: dict[str, Tensor] = {}
    infos: dict[str, dict[str, Any]] = {}
    for site in sites:
        if site.name in infos:
            raise InputError(f"{path}: two sites are named {site.name!r}; give each capture its own prefix")
        check_site(site, str(path))
        infos[site.name] = describe(site)
        for part in _PARTS:
            tensor = getattr(site, part).detach().cpu()
            tensor = tensor.to(torch.int32) if part == "cu_seqlens" else tensor
            # A compact copy of its own: safetensors refuses strided tensors and shared memory.
            tensors[f"{site.name}.{part}"] = tensor.clone(memory_format=torch.contiguous_format)
    metadata = {
        "format": FORMAT,
        "sites": json.dumps(infos, allow_nan=False),
        "provenance": json.dumps(provenance, sort_keys=True, allow_nan=False),
    }
    content = _canonical(to_bytes(tensors, metadata=metadata))
    try:
        with atomic_write(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise InputError(f"{path}: cannot write the file ({error.strerror or error})") from error


def merge_activations(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Join activation files into one, sites in the order given; the provenances become a list, `captures`.

    **Raises** `InputError`: a file that cannot be loaded, a site name in two of them, or `out` not writable.
    """
    parts = [load_activations(path) for path in paths]
    provenance = {"captures": [part.provenance for part in parts]}
    save_activations(out, [site for part in parts for site in part.sites], provenance)


def sample_path() -> Path:
    """Return the path of the small activation file that comes with the library; see PROVENANCE.md there."""
    return Path(str(importlib.resources.files("reassoc.lab") / "data" / "sample.safetensors"))


def _sha256(path: Path) -> str:
    if path.is_dir():
        raise InputError(f"{path}: is a folder; expected an activation file (.safetensors)")
    if not path.exists():
        raise InputError(f"{path}: no such file; make one with `reassoc capture`")
    if not path.is_file():
        raise InputError(f"{path}: not an ordinary file; expected an activation file (.safetensors)")
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            size = 0
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise InputError(f"{path}: cannot read the file ({error.strerror or error})") from error
    if not size:
        raise InputError(f"{path}: the file is empty (0 bytes); make one with `reassoc capture`")
    return digest.hexdigest()


def _plain_site(path: Path, read: dict[str, Tensor]) -> Site:
    query, key = read["query"], read["key"]
    site = Site(
        name="input",
        query=query,
        key=key,
        value=read["value"],
        cu_seqlens=read.get("cu_seqlens", torch.tensor([0, query.shape[-2] if query.ndim > 1 else 0])),
        causal=False,
        scale=query.shape[-1] ** -0.5 if query.numel() else 1.0,
        model=path.stem,
        layer=None,
        key_heads=tuple(range(key.shape[0] if key.ndim else 0)),
        query_heads=tuple(range(query.shape[0] if query.ndim else 0)),
    )
    check_site(site, str(path), label="")
    return replace(site, cu_seqlens=site.cu_seqlens.to(torch.int32))


def _canonical(content: bytes) -> bytes:
    # safetensors writes its metadata in the arbitrary order of a hash map. Sorted, equal data are equal
    # bytes.
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the data that follow stay aligned to 8 bytes
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
