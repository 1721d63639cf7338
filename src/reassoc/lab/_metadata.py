"""The metadata of an activation file: JSON in, checked values out (the file is untrusted)."""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import InputError
from ._sites import Site, check_site

FORMAT = "reassoc-activations-1"


def describe(site: Site) -> dict[str, Any]:
    """Return what the metadata says of a site; `site_from` reads it back."""
    return {
        "causal": site.causal,
        "scale": site.scale,
        "model": site.model,
        "layer": site.layer,
        "key_heads": site.key_heads,
        "query_heads": site.query_heads,
    }


def read_metadata(file: str, metadata: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects `sites` (not empty) and `provenance`, or raise `InputError` naming `file`."""
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{file}: its format is {metadata.get('format')!r}; expected {FORMAT!r} (made by `reassoc "
            "capture`), or a file with the tensors 'query', 'key' and 'value'"
        )
    sites = _json_object(file, metadata, "sites")
    if not sites:
        raise InputError(f"{file}: metadata 'sites' lists no site; expected at least one. Capture again")
    return sites, _json_object(file, metadata, "provenance")


def site_from(file: str, name: str, info: Any, tensors: dict[str, Tensor]) -> Site:
    """Build and check a site.

    **Arguments**

    - `info`: the site's entry in the metadata, of whatever type the JSON held. `causal` and `scale` are
      required.
    - `tensors`: `query`, `key`, `value` and `cu_seqlens` as read.

    **Raises** `InputError` that names `file`, the site and the entry or tensor.
    """
    if not isinstance(info, dict):
        raise InputError(f"{file}: site {name!r} is described by {info!r:.60}; expected a JSON object")

    def wrong(entry: str, expected: str) -> InputError:
        return InputError(f"{file}: site {name!r} has {entry} {info.get(entry)!r:.60}; expected {expected}")

    def heads(entry: str, tensor: Tensor) -> tuple[int, ...]:
        value = info.get(entry, list(range(tensor.shape[0] if tensor.ndim else 0)))
        if not (isinstance(value, list) and all(type(head) is int for head in value)):
            raise wrong(entry, "a list of integers")
        return tuple(value)

    causal, scale = info.get("causal"), info.get("scale")
    model, layer = info.get("model", ""), info.get("layer")
    # `type(...) is`, because JSON's true is a Python int and must not pass for one.
    if type(causal) is not bool:
        raise wrong("causal", "true or false")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale <= sys.float_info.max:
        raise wrong("scale", "a positive number")
    if type(model) is not str:
        raise wrong("model", "a string")
    if layer is not None and type(layer) is not int:
        raise wrong("layer", "an integer")
    site = Site(
        name=name,
        query=tensors["query"],
        key=tensors["key"],
        value=tensors["value"],
        cu_seqlens=tensors["cu_seqlens"],
        causal=causal,
        scale=float(scale),
        model=model,
        layer=layer,
        key_heads=heads("key_heads", tensors["key"]),
        query_heads=heads("query_heads", tensors["query"]),
    )
    check_site(site, file)
    return replace(site, cu_seqlens=site.cu_seqlens.to(torch.int32))


def _json_object(file: str, metadata: dict[str, str], entry: str) -> dict[str, Any]:
    try:
        content = json.loads(metadata.get(entry, "{}"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: metadata {entry!r} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: metadata {entry!r} is a JSON {type(content).__name__}; expected an object")
    return content
