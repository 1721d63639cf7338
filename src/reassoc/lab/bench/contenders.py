"""Who runs: this library through its public surface, torch's softmax attention, and the yardstick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ... import linear_attention, rules, step
from ...feature_maps import FeatureMap, LandmarkFeatures, RandomFeatures
from .inputs import Inputs, make_inputs
from .settings import DIRECTIONS, Problem, Settings
from .yardstick import yardstick

SOFTMAX = Problem("softmax", "")


class Ready(NamedTuple):
    """A call with its inputs in place, so that only the call itself is timed.

    Attributes:
        run: makes the output. leaves: the inputs, in the order of ``Inputs.tensors``, in the layout that
            the contender takes. transposed: that layout is ``(B, N, H, ...)``, outputs too.
        scale: its outputs are this times those of the problem.
        held: bytes that a step keeps between tokens.
    """

    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    transposed: bool = False
    scale: float = 1.0
    held: int = 0


class UnsupportedError(Exception):
    """The contender has no such call; the message says why."""


@dataclass(frozen=True)
class Contender:
    """Something that is timed.

    Attributes:
        name: unique. kind: ``ours``, ``softmax``, ``yardstick`` or ``peer``. problem: what it computes.
        features: r, 0 for softmax. power: cost of a call grows like tokens to this power.
        prepare: inputs of a whole call to a call. step: inputs of n + 1 tokens to the step of the last
            one after the n others; ``None``: no steps.
        reference: float64 inputs to what the output should be, where the problem's own does not do.
        directions: that it has. exact: whether it is held to this library's error budget.
    """

    name: str
    kind: str
    problem: Problem
    features: int
    prepare: Callable[[Inputs], Ready]
    power: int = 1
    step: Callable[[Inputs], Ready] | None = None
    reference: Callable[[Inputs], Tensor] | None = None
    directions: tuple[str, ...] = DIRECTIONS
    exact: bool = True

    def ready(self, inputs: Inputs, direction: str) -> Ready:
        """The call of a direction; leaves require gradients exactly for ``backward``."""
        if direction not in self.directions or (direction == "step" and self.step is None):
            raise UnsupportedError(f"has no {direction}")
        if direction == "step":
            assert self.step is not None
            return self.step(inputs)
        ready = self.prepare(inputs.like(tuple(t.detach() for t in inputs.tensors)))
        for leaf in ready.leaves:
            leaf.requires_grad_(direction == "backward")
        return ready


def rule_of(problem: Problem, inputs: Inputs) -> rules.Rule:
    """The rule object with these gates."""
    if problem.rule == "sum":
        return rules.Sum()
    if problem.rule == "decay":
        assert inputs.log_decay is not None
        return rules.Decay(inputs.log_decay)
    assert inputs.beta is not None
    if problem.rule == "delta":
        return rules.Delta(inputs.beta)
    assert inputs.log_decay is not None
    return rules.GatedDelta(inputs.beta, inputs.log_decay)


def fitted_map(settings: Settings, problem: Problem) -> FeatureMap:
    """The problem's map; one that must be calibrated learns from inputs like those timed."""
    phi = settings.feature_map(problem.map)
    if settings.candidate(problem.map).calibrated and isinstance(phi, RandomFeatures | LandmarkFeatures):
        some = make_inputs(settings, problem, 1024)
        phi.calibrate_(some.query.float(), some.key.float())
    return phi


def ours(settings: Settings, problem: Problem, backend: str) -> Contender:
    """The public surface of this library."""
    phi, normalize = fitted_map(settings, problem), settings.normalization(problem)
    common: dict[str, Any] = {"normalize": normalize, "backend": backend}

    def call(inputs: Inputs) -> Ready:
        q, k, v = inputs[:3]

        # The rule is made in the call, as a model makes it: checking its gates is part of the price.
        def run() -> Tensor:
            output: Tensor = linear_attention(
                q, k, v, phi, rule=rule_of(problem, inputs), causal=settings.causal, **common
            )
            return output

        return Ready(run, inputs.tensors)

    def one(inputs: Inputs) -> Ready:
        seen = inputs.query.shape[2] - 1
        before, last = inputs.part(0, seen), inputs.part(seen, seen + 1)
        with torch.no_grad():
            _, state = linear_attention(
                before.query, before.key, before.value, phi, rule=rule_of(problem, before), causal=True,
                return_state=True, **common,
            )  # fmt: skip
        q, k, v = (t.contiguous() for t in last[:3])

        def run() -> Tensor:
            return step(q, k, v, phi, state, rule=rule_of(problem, last), **common)

        return Ready(run, inputs.tensors, held=state.nbytes)

    name = problem.title if backend == "auto" else f"{problem.title} [{backend}]"
    return Contender(name, "ours", problem, phi.feature_dim, call, step=one)


def softmax(settings: Settings) -> Contender:
    """PyTorch's scaled_dot_product_attention; a step has a key-value cache that is allocated already."""

    def call(inputs: Inputs) -> Ready:
        q, k, v = inputs[:3]
        return Ready(lambda: scaled_dot_product_attention(q, k, v, is_causal=settings.causal), (q, k, v))

    def one(inputs: Inputs) -> Ready:
        keys, values = inputs.key.clone(), inputs.value.clone()
        q, k, v = (t[:, :, -1:].contiguous() for t in inputs[:3])

        def run() -> Tensor:
            keys[:, :, -1:] = k
            values[:, :, -1:] = v
            return scaled_dot_product_attention(q, keys, values)

        held = (keys.numel() + values.numel()) * keys.element_size()
        return Ready(run, inputs.tensors, held=held)

    def exact(inputs: Inputs) -> Tensor:
        scores = inputs.query @ inputs.key.transpose(-1, -2) * settings.head_dim**-0.5
        if settings.causal:  # the last query is at the last key, also if the queries before are left out
            rows, keys = scores.shape[-2:]
            later = torch.ones(rows, keys, dtype=torch.bool).triu(1 + keys - rows)
            scores = scores.masked_fill(later, -torch.inf)
        output: Tensor = scores.softmax(-1) @ inputs.value
        return output

    return Contender("softmax (SDPA)", "softmax", SOFTMAX, 0, call, power=2, step=one, reference=exact)


def plain(settings: Settings) -> Contender:
    """The yardstick."""

    def call(inputs: Inputs) -> Ready:
        q, k, v = inputs[:3]
        return Ready(lambda: yardstick(q, k, v, settings.causal), (q, k, v))

    return Contender(
        "yardstick (chunked PyTorch)", "yardstick", Problem("elu+1", "sum"), settings.head_dim, call,
        directions=("forward", "backward"), exact=False,
    )  # fmt: skip
