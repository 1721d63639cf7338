"""No speed for a wrong result: every contender's numbers against float64 before it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import linear_attention
from ...feature_maps import FeatureMap
from .contenders import Contender, Ready, UnsupportedError, fitted_map, rule_of
from .inputs import Inputs, make_inputs
from .settings import DTYPES, Settings

# Error budgets of this library against float64, relative (they are laws of its test suite). Gradients
# have three times as much; other libraries are asked for the right operator, not for our budget.
BUDGET = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
OTHERS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
GRADIENT = 3.0
QUADRATIC = 1024  # tokens at which what is quadratic is judged: softmax, gradients, all that is not causal
PIECE = 128  # tokens that the quadratic reference sees at once; the state carries the rest

Function = Callable[[Inputs], Tensor]


class Verdict(NamedTuple):
    """What the gate found.

    Attributes:
        error: largest deviation, relative. budget: what it may be. tokens: at how many it was judged.
        seconds: of the call, the first of its kind.
    """

    error: float
    budget: float
    tokens: int
    seconds: float

    @property
    def right(self) -> bool:
        """Whether the result may be timed; NaN is not."""
        return self.error <= self.budget


def judge(contender: Contender, settings: Settings, direction: str, length: int) -> Verdict:
    """Run the contender once and compare: outputs, and for ``backward`` every gradient.

    All heads of the first sequence. An output is judged relative to its own terms, ``sum_j w_ij |v_j|``,
    where weights are averages, otherwise to the largest output of its head; a gradient to the largest of
    its head.

    Raises:
        UnsupportedError: the contender has no such call, or the reference is not finite here.
    """
    quadratic = contender.reference is not None or not settings.causal
    if direction == "backward" or (direction == "forward" and quadratic):
        length = min(length, QUADRATIC)
    inputs = make_inputs(settings, contender.problem, length + (direction == "step"))
    ready = contender.ready(inputs, direction)
    weight = cotangent(settings, length)
    start = time.perf_counter()
    got = perform(ready, direction, arranged(weight, ready))
    seconds = time.perf_counter() - start
    phi = None if contender.reference is not None else fitted_map(settings, contender.problem)
    truth = _reference(contender, settings, phi)
    one = inputs.like(tuple(t[:1].double() for t in inputs.tensors))
    budget = (BUDGET if contender.exact else OTHERS)[DTYPES[settings.dtype]]
    if phi is not None:
        budget += 4 * torch.finfo(torch.float32).eps * _largest_log(phi, one)
    if direction == "backward":
        error = _gradient_error(got, ready, truth, one, weight[:1].double())
        return Verdict(error, GRADIENT * budget, length, seconds)
    rows = slice(-1, None) if direction == "step" else slice(None)
    if direction == "step" and phi is None:  # softmax: one row of weights, not all
        one = one._replace(query=one.query[:, :, rows])
    with torch.no_grad():
        if _averages(contender, settings, phi):
            both = torch.cat([one.value, one.value.abs()], dim=-1)
            want, scale = truth(one._replace(value=both))[:, :, rows].chunk(2, dim=-1)
        else:
            want = truth(one)[:, :, rows]
            scale = want.abs().amax((2, 3), keepdim=True)
    _require_finite(want)
    return Verdict(_worst(restore(got[0], ready)[:1], want, scale), budget, length, seconds)


def perform(ready: Ready, direction: str, weight: Tensor) -> tuple[Tensor, ...]:
    """What is timed: ``(output,)``, or the gradients by every leaf of ``sum(output * weight)``."""
    if direction != "backward":
        with torch.no_grad():
            return (ready.run(),)
    with torch.enable_grad():
        output = ready.run()
    return torch.autograd.grad(output, ready.leaves, weight)


def cotangent(settings: Settings, length: int) -> Tensor:
    """The fixed random weights of outputs that gradients are taken of: ``(B, H, N, e)``."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    shape = (settings.batch, settings.heads, length, settings.value_dim)
    return torch.randn(shape, generator=generator).to(DTYPES[settings.dtype])


def arranged(weight: Tensor, ready: Ready) -> Tensor:
    """The same in the contender's layout."""
    return weight.transpose(1, 2).contiguous() if ready.transposed else weight


def restore(tensor: Tensor, ready: Ready) -> Tensor:
    """From the contender's layout and scale to float64 ``(B, H, N, ...)``."""
    return (tensor.transpose(1, 2) if ready.transposed else tensor).detach().double() / ready.scale


def _reference(contender: Contender, settings: Settings, phi: FeatureMap | None) -> Function:
    """Float64 inputs to what the contender should give."""
    if phi is None:
        assert contender.reference is not None
        return contender.reference
    problem, normalize = contender.problem, settings.normalization(contender.problem)
    features = _Unlogged(phi)

    def truth(inputs: Inputs) -> Tensor:
        length = inputs.query.shape[2]
        state, outputs = None, []
        for start in range(0, length, PIECE if settings.causal else length):
            part = inputs.part(start, start + PIECE) if settings.causal else inputs
            output, state = linear_attention(
                *part[:3], features, rule=rule_of(problem, part), normalize=normalize, causal=settings.causal,
                state=state, return_state=True, backend="reference",
            )  # fmt: skip
            outputs.append(output)
        return torch.cat(outputs, dim=2)

    return truth


class _Unlogged(FeatureMap):
    """A map's features as plain numbers.

    Float64 holds them for these inputs, so the reference is exact without the logarithms of what is
    judged. Far quicker too: exponents per feature would make it form every feature of every pair.
    """

    def __init__(self, phi: FeatureMap) -> None:
        super().__init__(phi.dim, phi.feature_dim, phi.heads)
        self.phi, self.nonnegative = phi, phi.nonnegative

    def query(self, x: Tensor) -> Tensor:
        return self.phi.query(x)

    def key(self, x: Tensor) -> Tensor:
        return self.phi.key(x)

    def log_query_factor(self, x: Tensor) -> Tensor | None:
        return self.phi.log_query_factor(x)


def _averages(contender: Contender, settings: Settings, phi: FeatureMap | None) -> bool:
    """Whether outputs are averages of values: weights that are positive and add up to one."""
    if phi is None:
        return True  # softmax, and kernels of positive features
    problem = contender.problem
    return phi.nonnegative and not problem.delta and "attention" in settings.normalization(problem)


def _largest_log(phi: FeatureMap, inputs: Inputs) -> float:
    """Rounding of exponents: they cost as many units in the last place as they are large."""
    logs = (phi.query_features(inputs.query).log, phi.key_features(inputs.key).log)
    return max(0.0 if log is None else float(log.detach().abs().max()) for log in logs)


def _gradient_error(
    got: tuple[Tensor, ...], ready: Ready, truth: Function, inputs: Inputs, weight: Tensor
) -> float:
    leaves = tuple(t.requires_grad_() for t in inputs.tensors)
    want = torch.autograd.grad(truth(inputs), leaves[: len(got)], weight)
    for right in want:
        _require_finite(right)
    # A gradient that cancels (a single key gets all the weight, whatever the query) is judged beside the
    # others, which it is a difference of.
    floor = 1e-3 * max(float(right.abs().max()) for right in want)
    worst = []
    for mine, right in zip(got, want, strict=True):
        size = right.abs().flatten(2).amax(-1).clamp_min(floor)
        worst.append(_worst(restore(mine, ready)[:1], right, size.view(*size.shape, *[1] * (right.ndim - 2))))
    return float("nan") if any(w != w for w in worst) else max(worst)


def _require_finite(want: Tensor) -> None:
    if not want.isfinite().all():
        raise UnsupportedError(
            "the float64 reference is not finite for these inputs: nothing to compare with"
        )


def _worst(got: Tensor, want: Tensor, scale: Tensor) -> float:
    """Largest deviation in units of the scale; NaN if anything is; infinite for another shape."""
    if got.shape != want.shape:
        return float("inf")
    error = (got - want).abs()
    return float((error / scale.clamp_min(torch.finfo(torch.float32).tiny)).max())
