"""The torch backend as one opaque operator, for use under ``torch.compile``.

The chunked forms look at the data (which chunks span too many powers of ten, how long packed
sequences are), so a compiler cannot trace them; as an operator with known output shapes they need not
be traced. Its backward is a second operator, which recomputes from the inputs. A backward of that is
refused by torch: there is no formula for it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from .additive import chunked as additive_chunked
from .additive import problem as additive
from .answer import Answer
from .delta import chunked as delta_chunked
from .delta import problem as delta

Problem = additive.Problem | delta.Problem
# Operators take no objects: a family travels by its name, a problem as tensors and whole numbers.
FAMILIES: dict[str, tuple[type[Problem], Callable[[Any], Answer]]] = {
    "additive": (additive.Problem, additive_chunked.additive),
    "delta": (delta.Problem, delta_chunked.delta),
}


def _restore(family: str, inputs: list[Tensor], present: list[bool], options: list[int]) -> Problem:
    return FAMILIES[family][0].restore(spread(inputs, present), options)


def spread(inputs: list[Tensor], present: list[bool]) -> list[Tensor | None]:
    """Optional tensors again, from those there are: operators take no ``None`` in a list."""
    remaining = iter(inputs)
    return [next(remaining) if there else None for there in present]


@custom_op("reassoc::solve", mutates_args=())
def _forward(family: str, inputs: list[Tensor], present: list[bool], options: list[int]) -> list[Tensor]:
    answer = FAMILIES[family][1](_restore(family, inputs, present, options))
    return [part.clone(memory_format=torch.contiguous_format) for part in answer if part is not None]


@_forward.register_fake
def _(family: str, inputs: list[Tensor], present: list[bool], options: list[int]) -> list[Tensor]:
    problem = _restore(family, inputs, present, options)
    return [problem.value.new_empty(shape) for shape in problem.answer_shapes() if shape is not None]


@custom_op("reassoc::solve_backward", mutates_args=())
def _backward(
    family: str,
    grads: list[Tensor],
    inputs: list[Tensor],
    present: list[bool],
    wanted: list[bool],
    options: list[int],
) -> list[Tensor]:
    parts = [part.detach().requires_grad_(want) for part, want in zip(inputs, wanted, strict=True)]
    with _recording():
        answer = FAMILIES[family][1](_restore(family, parts, present, options))
    sources = [part for part, want in zip(parts, wanted, strict=True) if want]
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
    family: str,
    grads: list[Tensor],
    inputs: list[Tensor],
    present: list[bool],
    wanted: list[bool],
    options: list[int],
) -> list[Tensor]:
    return [part.new_empty(part.shape) for part, want in zip(inputs, wanted, strict=True) if want]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    family, tensors, present, options = inputs
    ctx.save_for_backward(*tensors)
    ctx.about = family, present, options


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    family, present, options = ctx.about
    wanted = list(ctx.needs_input_grad[1])
    incoming = [g.contiguous() for g in grads]
    found = iter(_backward(family, incoming, list(ctx.saved_tensors), present, wanted, options))
    return None, [next(found) if want else None for want in wanted], None, None


_forward.register_autograd(_differentiate, setup_context=_setup)


def traced(family: str, problem: Problem) -> Answer:
    """A family's torch backend through the operator."""
    if isinstance(problem, additive.Problem) and problem.scale is not None:
        # A scale carries no gradient: whatever it is, the product with its memory is the same.
        problem = problem._replace(scale=problem.scale.detach())
    tensors, options = problem.flatten()
    present = [part is not None for part in tensors]
    parts = iter(_forward(family, [part for part in tensors if part is not None], present, options))
    return Answer(*(None if shape is None else next(parts) for shape in problem.answer_shapes()))  # type: ignore[arg-type]
