"""What one attention layer saw, and the test of whether that makes sense.

Symbols: H query heads, G key heads (H a multiple of G; query head h reads key head h // (H // G)), N tokens
of all sequences together, n sequences, d the size of queries and keys, e the size of values.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .._errors import InputError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Site:
    """Queries, keys and values of one attention layer, as its softmax attention received them.

    Sequences are packed one after another; tokens of different sequences never attend to each other.
    """

    name: str
    query: Tensor  # (H, N, d) floating point, position encoding applied, NOT multiplied by scale
    key: Tensor  # (G, N, d) same dtype
    value: Tensor  # (G, N, e) same dtype
    cu_seqlens: Tensor  # (n + 1,) int32: sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1]
    causal: bool
    scale: float  # factor of the scores before the softmax, usually d ** -0.5
    model: str
    layer: int | None  # index in the model, where there is a model
    key_heads: tuple[int, ...]  # (G,) indices in the model
    query_heads: tuple[int, ...]  # (H,) indices in the model

    def sequences(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield query (H, m, d), key (G, m, d), value (G, m, e) of each sequence of length m, as views."""
        bounds = self.cu_seqlens.tolist()
        for start, stop in pairwise(bounds):
            yield self.query[:, start:stop], self.key[:, start:stop], self.value[:, start:stop]


def check_site(site: Site, file: str, label: str | None = None) -> None:
    """Raise `InputError` unless the site is complete, consistent and finite.

    **Arguments**

    - `file`: what the message starts with, the file's name.
    - `label`: how the file names the site's tensors: `{label}.query`. Empty for a file with bare names; the
        site's own name if not given.
    """
    label = site.name if label is None else label

    def fail(part: str, problem: str) -> InputError:
        return InputError(f"{file}: tensor {f'{label}.{part}' if label else part!r} {problem}")

    parts = {"query": site.query, "key": site.key, "value": site.value}
    for part, tensor in parts.items():
        if tensor.ndim != 3:
            raise fail(
                part, f"has shape {tuple(tensor.shape)}; expected three dimensions (heads, tokens, head size)"
            )
        if tensor.dtype not in _FLOATS:
            raise fail(part, f"is {_dtype(tensor)}; expected float16, bfloat16, float32 or float64")
        if tensor.dtype != site.query.dtype:
            raise fail(
                part, f"is {_dtype(tensor)} but the query is {_dtype(site.query)}; store all three alike"
            )
        if 0 in tensor.shape:
            raise fail(
                part, f"is empty, shape {tuple(tensor.shape)}; expected at least one head and one token"
            )
    H, N, d = site.query.shape
    G = site.key.shape[0]
    if H % G:
        raise fail("query", f"has {H} heads, which is not a multiple of the key's {G} heads")
    if tuple(site.key.shape) != (G, N, d):
        raise fail("key", f"has shape {tuple(site.key.shape)}; expected ({G}, {N}, {d}) to go with the query")
    if tuple(site.value.shape[:2]) != (G, N):
        raise fail(
            "value", f"has shape {tuple(site.value.shape)}; expected ({G}, {N}, any) to go with the key"
        )
    _check_bounds(site.cu_seqlens, N, fail)
    if not (math.isfinite(site.scale) and site.scale > 0):
        raise InputError(f"{file}: site {site.name!r} has scale {site.scale}; expected a positive number")
    for what, heads, count in (("key_heads", site.key_heads, G), ("query_heads", site.query_heads, H)):
        if len(heads) != count:
            raise InputError(f"{file}: site {site.name!r} lists {len(heads)} {what}; expected {count}")
    for part, tensor in parts.items():
        nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        if nans or infinities:
            raise fail(
                part,
                f"holds {nans} NaN and {infinities} infinite values among {tensor.numel()}; expected finite "
                "numbers. Capture again, in a dtype with more range if these overflowed",
            )


def _check_bounds(cu_seqlens: Tensor, N: int, fail: Callable[[str, str], InputError]) -> None:
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 2:
        raise fail(
            "cu_seqlens",
            f"is {_dtype(cu_seqlens)} of shape {tuple(cu_seqlens.shape)}; expected int32 (sequences + 1,)",
        )
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise fail("cu_seqlens", f"starts at {bounds[0]}; expected 0")
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise fail(
                "cu_seqlens", f"decreases from {start} to {stop} at position {i + 1}; expected it to grow"
            )
    if bounds[-1] != N:
        raise fail("cu_seqlens", f"ends at {bounds[-1]}; expected {N}, the number of tokens of the query")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
