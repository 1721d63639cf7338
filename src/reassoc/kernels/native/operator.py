"""The native library as an operator: for autograd, and for compilers, which see shapes and no data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import Parameter

from ..traced import spread
from .call import Inputs, Options, Results, backward, empty_results, forward

_TENSORS = len(Inputs._fields)


def run(inputs: Inputs, options: Options) -> Results:
    """Run the library; through the operator only where somebody watches."""
    if not torch.compiler.is_compiling():
        watched = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        if not watched and readable(*inputs):
            return forward(inputs, options)
    return _unpack(inputs, _forward(*inputs, *options), options)


def recorded() -> bool:
    """Whether somebody keeps a record of operations: a dispatch mode, or ``torch.jit.trace``."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._get_tracing_state() is not None


def readable(*tensors: Tensor | None) -> bool:
    """Whether tensors are what their memory holds, and nobody keeps a record of what is done with them."""
    return not recorded() and not any(
        t is not None and (type(t) not in (Tensor, Parameter) or t.is_neg() or t._is_zerotensor())
        for t in tensors
    )


def _pack(results: Results) -> list[Tensor]:
    return [part for part in results if part is not None]


def _unpack(inputs: Inputs, parts: list[Tensor], options: Options) -> Results:
    exponential, state = inputs.key_log is not None, not options.window
    return Results(*spread(parts, [True, options.divide, exponential, state, exponential and state]))  # type: ignore[arg-type]


@custom_op("reassoc::native", mutates_args=())
def _forward(
    query: Tensor | None,
    query_log: Tensor | None,
    key: Tensor | None,
    key_log: Tensor | None,
    value: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    boundaries: Tensor | None,
    memory: Tensor | None,
    scale: Tensor | None,
    query_matrix: Tensor | None,
    key_matrix: Tensor | None,
    query_boundaries: Tensor | None,
    causal: bool,
    map: str,
    sum_normalize: bool,
    normalizer: bool,
    divide: bool,
    eps: float,
    fill: float,
    dtype: str,
    window: int,
) -> list[Tensor]:
    inputs = Inputs(
        query, query_log, key, key_log, value, log_decay, beta, key_mask, boundaries, memory, scale,
        query_matrix, key_matrix, query_boundaries,
    )  # fmt: skip
    options = Options(causal, map, sum_normalize, normalizer, divide, eps, fill, dtype, window)
    return _pack(forward(inputs, options))


@_forward.register_fake
def _(*arguments: object) -> list[Tensor]:
    inputs, options = Inputs(*arguments[:_TENSORS]), Options(*arguments[_TENSORS:])  # type: ignore[arg-type]
    return _pack(empty_results(inputs, options))


@custom_op("reassoc::native_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    d_memory: Tensor | None,
    results: list[Tensor],
    inputs: list[Tensor],
    present: list[bool],
    wanted: list[bool],
    causal: bool,
    map: str,
    sum_normalize: bool,
    normalizer: bool,
    divide: bool,
    eps: float,
    fill: float,
    dtype: str,
    window: int,
) -> list[Tensor]:
    parts = Inputs(*spread(inputs, present))  # type: ignore[arg-type]
    options = Options(causal, map, sum_normalize, normalizer, divide, eps, fill, dtype, window)
    return backward(parts, options, _unpack(parts, results, options), d_out, d_memory, wanted)


@_backward.register_fake
def _(
    d_out: Tensor,
    d_memory: Tensor | None,
    results: list[Tensor],
    inputs: list[Tensor],
    present: list[bool],
    wanted: list[bool],
    *options: object,
) -> list[Tensor]:
    return [
        torch.empty_like(p, memory_format=torch.contiguous_format)
        for p, want in zip(spread(inputs, present), wanted, strict=True)
        if want and p is not None
    ]


def _no_second_derivative(ctx: object, *grads: object) -> None:
    raise RuntimeError("reassoc: the native backend has no second derivative; use backend='torch' for one")


_backward.register_autograd(_no_second_derivative)


def _setup(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: list[Tensor]
) -> None:
    tensors = [t for t in inputs[:_TENSORS] if isinstance(t, Tensor)]
    ctx.save_for_backward(*tensors, *output)
    ctx.present = [t is not None for t in inputs[:_TENSORS]]  # type: ignore[attr-defined]
    ctx.options = Options(*inputs[_TENSORS:])  # type: ignore[attr-defined, arg-type]


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, grads: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    present, options = ctx.present, ctx.options  # type: ignore[attr-defined]
    saved = list(ctx.saved_tensors)  # type: ignore[attr-defined]
    count = sum(present)
    inputs, results = saved[:count], saved[count:]
    wanted = list(ctx.needs_input_grad[:_TENSORS])  # type: ignore[attr-defined]
    # A scale carries no gradient: whatever it is, the product with its memory is the same.
    wanted[Inputs._fields.index("scale")] = False
    index = 1 + options.divide + present[Inputs._fields.index("key_log")]
    d_out, d_memory = grads[0], None if options.window else grads[index]
    if d_out is None:
        d_out = torch.zeros_like(results[0])
    found = iter(_backward(d_out, d_memory, results, inputs, present, wanted, *options))
    return (*(next(found) if want else None for want in wanted), *(None for _ in options))


_forward.register_autograd(_differentiate, setup_context=_setup)
