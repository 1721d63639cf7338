"""The torch backend as one opaque operator, for use under ``torch.compile``.

The chunked form looks at the data (which chunks span too many powers of ten, how long packed
sequences are), so a compiler cannot trace it; as an operator with known output shapes it needs not
to. Its backward is a second operator, which recomputes from the inputs. A backward of that is
refused by torch: there is no formula for it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..._features import Features
from .chunked import additive
from .problem import Answer, Problem

Parts = list[Tensor | None]


def _problem(features: Parts, value: Tensor, others: Parts, causal: bool, window: int | None) -> Problem:
    log_decay, key_mask, cu_queries, cu_keys, memory, scale = others
    return Problem(
        Features(features[0], features[1]),
        Features(features[2], features[3]),
        value,
        log_decay,
        key_mask,
        cu_queries,
        cu_keys,
        memory,
        scale,
        causal,
        window,
    )


@torch.library.custom_op("reassoc::additive", mutates_args=())
def _forward(
    qm: Tensor | None,
    ql: Tensor | None,
    km: Tensor | None,
    kl: Tensor | None,
    value: Tensor,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    cu_queries: Tensor | None,
    cu_keys: Tensor | None,
    memory: Tensor | None,
    scale: Tensor | None,
    causal: bool,
    window: int | None,
) -> list[Tensor]:
    others = [log_decay, key_mask, cu_queries, cu_keys, memory, scale]
    answer = additive(_problem([qm, ql, km, kl], value, others, causal, window))
    return [part.clone(memory_format=torch.contiguous_format) for part in answer if part is not None]


@_forward.register_fake
def _(
    qm: Tensor | None,
    ql: Tensor | None,
    km: Tensor | None,
    kl: Tensor | None,
    value: Tensor,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    cu_queries: Tensor | None,
    cu_keys: Tensor | None,
    memory: Tensor | None,
    scale: Tensor | None,
    causal: bool,
    window: int | None,
) -> list[Tensor]:
    query = qm if qm is not None else ql
    assert query is not None
    width = max(part.shape[-1] for part in (qm, ql, km, kl) if part is not None)
    shapes: list[tuple[int | torch.SymInt, ...]] = [(*query.shape[:3], value.shape[-1])]
    exponential = ql is not None or kl is not None
    if exponential:
        shapes.append(tuple(query.shape[:3]))
    if window is None:
        batch = value.shape[0] if cu_queries is None else cu_queries.shape[0] - 1
        shapes.append((batch, value.shape[1], width, value.shape[-1]))
        if exponential:
            shapes.append((batch, value.shape[1], width))
    return [value.new_empty(shape) for shape in shapes]


@torch.library.custom_op("reassoc::additive_backward", mutates_args=())
def _backward(
    grads: list[Tensor],
    inputs: list[Tensor],
    present: list[bool],
    wanted: list[bool],
    causal: bool,
    window: int | None,
) -> list[Tensor]:
    remaining = iter(inputs)
    parts: Parts = [next(remaining) if there else None for there in present]
    for index, want in enumerate(wanted):
        part = parts[index]
        if part is not None:
            parts[index] = part.detach().requires_grad_(want)
    value = parts[4]
    assert value is not None
    with _recording():
        answer = additive(_problem(parts[:4], value, parts[5:], causal, window))
    sources = [part for part, want in zip(parts, wanted, strict=True) if want and part is not None]
    outputs = [part for part in answer if part is not None]
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    if sources and answer.read.numel() and not answer.read.requires_grad:
        # Better no gradient than zeros, should a release of torch change how operators nest.
        raise RuntimeError("reassoc: this torch release does not record inside an operator; do not compile")
    if not pairs:
        return [source.new_zeros(source.shape) for source in sources]
    targets, incoming = zip(*pairs, strict=True)
    with _recording():  # a checkpointed segment recomputes, and records again
        found = torch.autograd.grad(targets, sources, incoming, allow_unused=True, materialize_grads=True)
    return [grad.detach().contiguous() for grad in found]


@contextmanager
def _recording() -> Iterator[None]:
    """Record gradients inside an operator, where the dispatcher has switched that off for the thread."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        yield


@_backward.register_fake
def _(
    grads: list[Tensor],
    inputs: list[Tensor],
    present: list[bool],
    wanted: list[bool],
    causal: bool,
    window: int | None,
) -> list[Tensor]:
    remaining = iter(inputs)
    parts = [next(remaining) if there else None for there in present]
    return [p.new_empty(p.shape) for p, want in zip(parts, wanted, strict=True) if want and p is not None]


def _setup(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: list[Tensor]
) -> None:
    tensors = [t for t in inputs[:11] if isinstance(t, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.present = [t is not None for t in inputs[:11]]  # type: ignore[attr-defined]
    ctx.options = inputs[11:]  # type: ignore[attr-defined]


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, grads: list[Tensor]
) -> tuple[Tensor | None, ...]:
    saved = list(ctx.saved_tensors)  # type: ignore[attr-defined]
    present, needed = ctx.present, list(ctx.needs_input_grad[:11])  # type: ignore[attr-defined]
    # A scale carries no gradient: whatever it is, the product with its memory is the same.
    needed[10] = False
    incoming = [g.contiguous() for g in grads]
    found = iter(_backward(incoming, saved, present, needed, *ctx.options))  # type: ignore[attr-defined]
    return (*(next(found) if want else None for want in needed), None, None)


_forward.register_autograd(_differentiate, setup_context=_setup)


def traced(problem: Problem) -> Answer:
    """As :func:`.chunked.additive`, through the operator."""
    p = problem
    parts = iter(
        _forward(
            *p.query, *p.key, p.value, p.log_decay, p.key_mask, p.cu_queries, p.cu_keys, p.memory, p.scale,
            p.causal, p.window,
        )
    )  # fmt: skip
    read = next(parts)
    row = next(parts) if p.exponential else None
    memory = next(parts) if p.window is None else None
    scale = next(parts) if p.window is None and p.exponential else None
    return Answer(read, row, memory, scale)
