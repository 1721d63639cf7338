"""Decode steps of the native backend: one call of the library, on the state where it lies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ._fused import fused_map
from ._gates import check_beta, expand_decay
from ._normalize import settle
from ._prepare import Keys, Queries, Settings
from ._state import AttentionState, require_scale
from .kernels import transformed
from .kernels._library import library
from .kernels.native.call import KINDS, MAPS
from .kernels.native.operator import readable, recorded


def decode(
    query: Tensor,  # (B, H, 1, d)
    key: Tensor,  # (B, G, 1, d)
    value: Tensor,  # (B, G, 1, e)
    s: Settings,
    state: AttentionState,
    key_mask: Tensor | None,
    call: tuple[object, ...],  # what the caller named, for the next step
    prepared: tuple[Queries, Keys] | None,  # features, for a map that the library does not compute itself
) -> Tensor | None:
    """The step, or ``None`` where the library has no form of it and the state is as it was."""
    if torch.compiler.is_compiling():
        return None
    dtype = s.accumulate(query.dtype)
    name = fused_map(s)
    gates = expand_decay(s.rule, key, s.map.feature_dim, dtype)
    beta = check_beta(s.rule, key, dtype)
    empty: Tensor | None = None
    watched = (query, key, value, gates, beta, state._memory, *s.map.parameters())
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in watched):
        return None
    if not readable(query, key, value, gates, beta, key_mask, state._memory):
        return None
    gates = None if gates is None else gates if gates.stride(-1) == 1 else gates.contiguous()
    if prepared is not None:
        queries, ready = prepared
        parts = (queries.features, ready.features)
        if queries.log_row is not None or any(None not in part for part in parts):
            return None
        exponential, empty = ready.features.log is not None, queries.empty
        left, right = (part.tensor for part in parts)
        if right.shape[-1] != s.map.feature_dim or left.shape[-1] != s.map.feature_dim:
            return None  # one logarithm for a whole vector
        value = value.to(dtype)
    else:
        exponential, left, right = name == "exp", query, key
    if s.rule.family == "additive":
        require_scale(exponential, state._scale)
    if s.undefined == "raise" or (exponential and not (s.has_z and s.eps == 0.0)):
        return None  # a row may be refused, or its true scale matters
    decoder = _decoder(left, right, value, gates, beta, s, name, exponential)
    memory, scale = state._parts(dtype)
    held = (state._memory, state._lost, state._scale, state._length)
    same = memory is state._memory and all(t is None or t.is_contiguous() for t in held)
    if not (same and state._owned and state._lost is not None and _writable(memory)):
        lost = torch.zeros_like(memory) if state._lost is None else state._lost.to(dtype)
        scale = None if scale is None else _own(scale)
        state._replace(_own(memory), scale, _own(state._length), None, _own(lost), owned=True)
    output = left.new_empty(*query.shape[:3], value.shape[-1])
    _run(decoder, state, left, right, value, gates, beta, key_mask, output)
    if empty is not None:
        output = settle(output, empty[..., None], s.undefined, "the query's features sum to zero")
    again = name is not None and gates is None and beta is None and key_mask is None
    state._again = Again(decoder, call, (query, key, value)) if again else None
    return output.to(query.dtype)


def _changed(state: AttentionState) -> None:
    """Tell autograd what the library wrote behind its back: a backward that saved it must fail, not err."""
    increment_version(state._memory)
    if state._scale is not None:
        increment_version(state._scale)


def _own(t: Tensor) -> Tensor:
    """A copy that nobody else holds, row after row."""
    return t.clone(memory_format=torch.contiguous_format)


def _writable(memory: Tensor) -> bool:
    """What inference mode made, only inference mode may overwrite."""
    return torch.is_inference_mode_enabled() or not memory.is_inference()


def _decoder(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor | None,
    beta: Tensor | None,
    s: Settings,
    name: str | None,
    exponential: bool,
) -> Any:
    native: Any = library()
    decoder = native.Decoder()
    decoder.batch, decoder.groups = key.shape[:2]
    decoder.share = query.shape[1] // key.shape[1]
    decoder.features, decoder.columns = key.shape[-1], value.shape[-1]
    decoder.wide = s.accumulate(query.dtype) == torch.float64
    decoder.normalizer = decoder.divide = s.has_z
    decoder.sum_normalize = name is not None and "sum" in s.normalize
    decoder.exponential = exponential
    decoder.map = getattr(native.Map, MAPS.get(name or "identity", "given"))
    decoder.kinds = (KINDS[query.dtype], *(0 if t is None else KINDS[t.dtype] for t in (beta, gates)))
    if gates is not None:
        decoder.gate_batch, decoder.gate_head = gates.stride()[:2]
        decoder.gate_width = gates.shape[-1]
    decoder.eps, decoder.fill = s.eps, math.nan if s.undefined == "nan" else 0.0
    decoder.threads = torch.get_num_threads()
    return decoder


def _run(
    decoder: Any,
    state: AttentionState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    output: Tensor,
) -> None:
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    beta = None if beta is None else beta.contiguous()
    mask = None if key_mask is None else key_mask.contiguous()
    assert state._lost is not None
    decoder.step(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        0 if beta is None else beta.data_ptr(),
        0 if gates is None else gates.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        state._memory.data_ptr(),
        state._lost.data_ptr(),
        0 if state._scale is None else state._scale.data_ptr(),
        state._length.data_ptr(),
        output.data_ptr(),
    )
    _changed(state)


class Again:
    """The next step of the same kind: what :func:`decode` checked is compared, not checked again.

    For the maps that the library computes itself and a rule without gates: such a step takes a few
    microseconds, and checking everything anew would take many times that.
    """

    __slots__ = ("call", "decoder", "dtype", "shapes")

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of a state, or a pickled one, starts without: its first step is checked.
        return type(None), ()

    def __init__(
        self, decoder: Any, call: tuple[object, ...], tensors: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self.decoder, self.call = decoder, call
        self.shapes, self.dtype = tuple(t.shape for t in tensors), tensors[0].dtype

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, call: tuple[object, ...], state: AttentionState
    ) -> Tensor | None:
        """The step, or ``None`` where anything is not as it was: then it is to be checked."""
        same = type(call[3]) is float and call == self.call and state._owned
        if not same or torch.compiler.is_compiling() or transformed() or recorded():
            return None
        recording, dtype = torch.is_grad_enabled(), self.dtype
        for t, shape in zip((query, key, value), self.shapes, strict=True):
            if type(t) is not Tensor or t.shape != shape or t.dtype != dtype or not t.is_cpu:
                return None
            if not t.is_contiguous() or t.is_neg() or (recording and t.requires_grad):
                return None
        memory, lost, scale = state._memory, state._lost, state._scale
        if lost is None or not _writable(memory):
            return None
        output = value.new_empty(self.shapes[0][:3] + self.shapes[2][3:])
        self.decoder.step(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), 0, 0, 0, memory.data_ptr(), lost.data_ptr(),
            0 if scale is None else scale.data_ptr(), state._length.data_ptr(), output.data_ptr(),
        )  # fmt: skip
        _changed(state)
        return output
