"""One call of the native library: tensors into pointers and strides, results into new tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._library import library

KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # csrc/call.h
MAPS = {"identity": "given", "elu+1": "elu1", "relu": "relu", "relu^2": "relu2"}


class Inputs(NamedTuple):
    """The tensors of a call; any dtype of :data:`KINDS`, logarithms and features included.

    Attributes:
        query, key: ``(B, H, N, r)``, ``(B, G, M, r)``: features, or what the map makes into features;
            ``None`` where every mantissa is one.
        query_log, key_log: ``(.., r or 1)``: logarithms of the features, ``None`` where they have none.
        value: ``(B, G, M, e)``, without a column for the normalizer.
        log_decay: ``(B, G, M, 1 or r)``. beta: ``(B, G, M)``, for the delta rules.
        key_mask: bool ``(B, M)``. boundaries: int64 ``(n + 1,)``, packed sequences.
        memory: ``(B or n, G, r, c)``, scale: ``(B or n, G, r)``: the state before, in the accumulating dtype.
        query_matrix, key_matrix: ``(r, k)`` or ``(G, r, k)`` in the accumulating dtype, without gradient.
            Where given, the logarithms are ``query_log @ query_matrix.mT`` with ``(.., k)`` of them.
        query_boundaries: as boundaries, which are then those of the keys; with a window only.
    """

    query: Tensor | None
    query_log: Tensor | None
    key: Tensor | None
    key_log: Tensor | None
    value: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    key_mask: Tensor | None = None
    boundaries: Tensor | None = None
    memory: Tensor | None = None
    scale: Tensor | None = None
    query_matrix: Tensor | None = None
    key_matrix: Tensor | None = None
    query_boundaries: Tensor | None = None

    @property
    def any_query(self) -> Tensor:
        """Whichever query tensor is there."""
        found = self.query if self.query is not None else self.query_log
        assert found is not None
        return found

    @property
    def sequences(self) -> int:
        """B, or n packed ones."""
        return self.value.shape[0] if self.boundaries is None else self.boundaries.shape[0] - 1

    @property
    def width(self) -> int:
        """Number of features r."""
        if self.key_matrix is not None:
            return self.key_matrix.shape[-2]
        parts = (self.query, self.query_log, self.key, self.key_log)
        return max(part.shape[-1] for part in parts if part is not None)


class Options(NamedTuple):
    """How to compute.

    Attributes:
        causal: as in the front door.
        map: a key of :data:`MAPS`, applied to query and key inside.
        sum_normalize: divide every feature vector by its sum, inside.
        normalizer: z is kept, as a last column of memory.
        divide: return quotients; else reads, with the denominator as a last column where ``normalizer``.
        eps: added to the denominator. fill: what a zero denominator gives.
        dtype: name of the output's, ``"float32"`` and so on.
        window: 0, or a number of positions; then causal, queries aligned with the last keys, and no state.
    """

    causal: bool
    map: str
    sum_normalize: bool
    normalizer: bool
    divide: bool
    eps: float
    fill: float
    dtype: str
    window: int = 0


class Results(NamedTuple):
    """What a call returns: ``(B, H, N, e or c)``, and ``None`` where there is no such thing.

    Attributes:
        out: quotients, or reads. denominator: ``(B, H, N)``. log_row: ``(B, H, N)``, see
            :class:`reassoc.kernels.answer.Answer`.
        memory, scale: the state after; ``None`` with a window.
    """

    out: Tensor
    denominator: Tensor | None
    log_row: Tensor | None
    memory: Tensor | None
    scale: Tensor | None


def accumulating(inputs: Inputs) -> torch.dtype:
    """float64 where an input is, else float32."""
    wide = torch.float64 in (inputs.any_query.dtype, inputs.value.dtype)
    return torch.float64 if wide else torch.float32


def prepared(inputs: Inputs) -> Inputs:
    """Components side by side, and whole tensors where the library takes no strides."""

    def whole(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.contiguous()

    def rows(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()

    kept = {"query", "query_log", "key", "key_log", "value", "log_decay"}
    parts = {name: rows(part) if name in kept else whole(part) for name, part in inputs._asdict().items()}
    return Inputs(**parts)  # type: ignore[arg-type]


def require_fitting(inputs: Inputs, options: Options) -> None:
    """``ValueError`` unless tensors fit each other: the library takes addresses and trusts the sizes."""
    query, value, memory = inputs.any_query, inputs.value, inputs.memory
    groups, width = value.shape[1], inputs.width
    fits = query.shape[0] == value.shape[0] and query.shape[1] % groups == 0
    for like, parts in (
        (query, (inputs.query, inputs.query_log)),
        (value, (inputs.key, inputs.key_log, inputs.log_decay, inputs.beta)),
    ):
        fits = fits and all(part is None or part.shape[:3] == like.shape[:3] for part in parts)
    if memory is not None:
        columns = value.shape[-1] + options.normalizer
        fits = fits and memory.shape == (inputs.sequences, groups, width, columns)
    if not fits:
        shapes = {name: tuple(part.shape) for name, part in inputs._asdict().items() if part is not None}
        raise ValueError(f"native call: shapes that do not fit each other: {shapes}")


def empty_results(inputs: Inputs, options: Options) -> Results:
    """Tensors of the right shapes and dtypes to write into; also what a compiler assumes."""
    query, value = inputs.any_query, inputs.value
    batch, heads, length = query.shape[:3]
    groups = value.shape[1]
    columns = value.shape[-1] + options.normalizer
    dtype = accumulating(inputs)
    out = value.new_empty(
        batch,
        heads,
        length,
        value.shape[-1] if options.divide else columns,
        dtype=getattr(torch, options.dtype),
    )
    row = None if inputs.key_log is None else value.new_empty(batch, heads, length, dtype=dtype)
    denominator = value.new_empty(batch, heads, length, dtype=dtype) if options.divide else None
    memory = scale = None
    if not options.window:
        memory = value.new_empty(inputs.sequences, groups, inputs.width, columns, dtype=dtype)
        scale = None if row is None else value.new_empty(*memory.shape[:3], dtype=dtype)
    return Results(out, denominator, row, memory, scale)


def forward(inputs: Inputs, options: Options, into: Results | None = None) -> Results:
    """Run the library; ``into`` spares new memory, whose first touch costs as much as a read of it."""
    require_fitting(inputs, options)
    inputs, results = prepared(inputs), empty_results(inputs, options) if into is None else into
    if into is None:
        _in_large_pages(results.out)
    call = _call(inputs, options, results)
    if results.memory is not None:
        call.memory_out = results.memory.data_ptr()
    if results.scale is not None:
        call.scale_out = results.scale.data_ptr()
    _library().forward(call)
    return results


def backward(
    inputs: Inputs,
    options: Options,
    results: Results,
    d_out: Tensor,
    d_memory: Tensor | None,
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of the inputs that are wanted, in their order; ``results`` are those of the forward call."""
    inputs = prepared(inputs)
    call = _call(inputs, options, results)
    d_out = d_out.contiguous()
    call.d_out = _view(d_out)
    if d_memory is not None:
        d_memory = d_memory.contiguous()
        call.d_memory_out = d_memory.data_ptr()
    gradients = []
    for name, part, want in zip(Inputs._fields, inputs, wanted, strict=True):
        if not want:
            continue
        assert part is not None
        gradient = _in_large_pages(torch.empty(part.shape, dtype=part.dtype))
        gradients.append(gradient)
        if name == "memory":
            call.d_memory = gradient.data_ptr()
        else:
            setattr(call, f"d_{name}", _view(gradient[..., None] if name == "beta" else gradient))
    _library().backward(call)
    return gradients


def _in_large_pages(t: Tensor) -> Tensor:
    """The same tensor, its memory yet untouched."""
    _library().large_pages(t.data_ptr(), t.numel() * t.element_size())
    return t


def _library() -> Any:
    found = library()
    assert found is not None
    return found


def _view(t: Tensor) -> Any:
    batch, head, position, _ = t.stride()
    return _library().View(t.data_ptr(), batch, head, position, KINDS[t.dtype], t.shape[-1])


def _call(inputs: Inputs, options: Options, results: Results) -> Any:
    native = _library()
    call = native.Call()
    query, value = inputs.any_query, inputs.value
    call.groups = value.shape[1]
    call.share = query.shape[1] // value.shape[1]
    call.queries, call.keys = query.shape[2], value.shape[2]
    call.features, call.columns = inputs.width, value.shape[-1]
    call.sequences = inputs.sequences
    call.wide = accumulating(inputs) == torch.float64
    call.window = options.window
    call.causal, call.normalizer, call.divide = options.causal, options.normalizer, options.divide
    call.sum_normalize, call.delta = options.sum_normalize, inputs.beta is not None
    call.map = getattr(native.Map, MAPS[options.map])
    call.eps, call.fill, call.threads = options.eps, options.fill, torch.get_num_threads()
    for name in ("query", "query_log", "key", "key_log", "value", "log_decay"):
        part = getattr(inputs, name)
        if part is not None:
            setattr(call, name, _view(part))
    if inputs.beta is not None:
        call.beta = _view(inputs.beta[..., None])
    for name in ("query_matrix", "key_matrix"):
        part = getattr(inputs, name)
        if part is not None:
            head = part.stride(0) if part.ndim == 3 else 0
            setattr(call, name, native.Matrix(part.data_ptr(), head, *part.shape[-2:]))
    for name in ("memory", "scale", "boundaries", "query_boundaries"):
        part = getattr(inputs, name)
        if part is not None:
            setattr(call, name, part.data_ptr())
    if inputs.key_mask is not None:
        call.mask = inputs.key_mask.data_ptr()
    call.out = _view(results.out)
    if results.denominator is not None:
        call.denominator = results.denominator.data_ptr()
    if results.log_row is not None:
        call.log_row = results.log_row.data_ptr()
    return call
