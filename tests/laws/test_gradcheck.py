"""torch.autograd.gradcheck in float64 for every rule and map; double backward is right or refused."""

import dataclasses

import pytest
import torch

import reassoc
from laws.budgets import assert_gradients_close
from laws.suite import (
    BACKENDS,
    CORE_MAPS,
    MAPS,
    NORMALIZATIONS,
    RULES,
    Layout,
    call,
    draw,
    expect,
    fits,
    gradients,
    make_map,
    rule_for,
    step_through,
    true_sums,
)


def small(name, rule, layout, normalize=None):
    """One row, one key head, few tokens; entries away from kinks; no resets (their slope is zero)."""
    inputs = draw(name, rule, layout, normalize=normalize)
    if inputs.log_decay is not None:
        inputs = dataclasses.replace(inputs, log_decay=inputs.log_decay.clamp_min(-1.0) - 0.05)
    if name not in ("identity", "trig", "calibrated trig", "trig gaussian"):
        inputs = dataclasses.replace(
            inputs, query=inputs.query.abs() + 0.1
        )  # no dead rows for ReLU-like maps
        inputs.key[:, :, ::2] = inputs.key[:, :, ::2].abs() + 0.1
    return inputs.heads(slice(2), slice(1), slice(1)).requires_grad()


def one_head_map(name):
    return make_map(name, heads=1)


def function_of(phi, inputs, **options):
    """The call as a function of its leaves."""
    names = list(inputs.leaves())

    def run(*tensors):
        return call(phi, dataclasses.replace(inputs, **dict(zip(names, tensors, strict=True))), **options)

    return run, tuple(inputs.leaves().values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_every_map(name, causal, backend):
    layout = Layout(4, causal=causal)
    rule = rule_for(MAPS.index(name) + causal, layout)
    normalize = NORMALIZATIONS[MAPS.index(name) % len(NORMALIZATIONS)]
    run, leaves = function_of(
        one_head_map(name), small(name, rule, layout, normalize), normalize=normalize, backend=backend
    )
    assert run(*leaves).isfinite().all()
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize(
    ("rule", "window"),
    [(r, w) for r in RULES for w in (None, 2) if fits(r, Layout(4, causal=True, window=w))],
)
def test_every_rule_and_normalization_in_full(rule, normalize, window, backend):
    inputs = small("favor+", rule, Layout(4, causal=True, window=window), normalize)
    run, leaves = function_of(one_head_map("favor+"), inputs, normalize=normalize, backend=backend)
    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CORE_MAPS)
def test_across_a_chunk(name, rule):
    inputs = small(name, rule, Layout(67, causal=True))
    run, leaves = function_of(one_head_map(name), inputs, backend="torch")
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("rule", ["decay-token", "gated-delta-token"])
@pytest.mark.parametrize("name", CORE_MAPS)
def test_through_a_carried_state(name, rule):
    phi = one_head_map(name)
    inputs = small(name, rule, Layout(6, causal=True))
    names = list(inputs.leaves())

    def run(*tensors):
        moved = dataclasses.replace(inputs, **dict(zip(names, tensors, strict=True)))
        first, state = call(phi, moved.rows(0, 3), return_state=True)
        second, state = step_through(phi, moved.rows(3, 5), state=state)
        third, state = call(phi, moved.rows(5, 6), state=state, return_state=True)
        return torch.cat([first, second, third], 2), *(t for t in true_sums(state) if t is not None)

    assert torch.autograd.gradcheck(run, tuple(inputs.leaves().values()), fast_mode=True)


@pytest.mark.parametrize("name", ["favor+", "hedgehog per head", "t2r per head"])
def test_map_parameters(name):
    phi = one_head_map(name)
    parameters = dict(phi.named_parameters())
    if not parameters:
        pytest.skip("no parameters")
    inputs = small(name, "decay-token", Layout(4, causal=True)).requires_grad(())

    def run(*tensors):
        class Wrapped(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.phi = phi

            def forward(self):
                return call(self.phi, inputs)

        named = {f"phi.{n}": t for n, t in zip(parameters, tensors, strict=True)}
        return torch.func.functional_call(Wrapped(), named, ())

    leaves = tuple(p.detach().clone().requires_grad_() for p in parameters.values())
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [5, 67])
@pytest.mark.parametrize(
    ("name", "rule", "layout"),
    [
        (name, rule, layout)
        for name, rule in [
            ("elu+1", "sum"), ("favor+", "decay-token"), ("favor+", "decay-feature"),
            ("elu+1", "delta"), ("favor+", "gated-delta-token"), ("favor+", "gated-delta-feature"),
        ]
        for layout in ("full", "causal", "window") if fits(rule, layout)
    ],
)  # fmt: skip
def test_double_backward_is_right_or_refused(name, rule, layout, n, backend):
    """The loss mixes first-order terms, so that a silently missing second order shows as a wrong number."""
    phi = one_head_map(name)
    shape = Layout(n, causal=layout != "full", window=3 if layout == "window" else None)
    inputs = small(name, rule, shape)

    def second_order(output):
        weight = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        first = torch.autograd.grad(
            (output * weight).sum(), list(inputs.leaves().values()), create_graph=True
        )
        loss = sum((g * g).sum() for g in first) + output.square().sum()
        return gradients(loss, torch.ones_like(loss), inputs.leaves())

    truth = second_order(expect(name, phi, inputs, heads=1).output)
    try:
        found = second_order(call(phi, inputs, backend=backend))
    except RuntimeError as error:
        assert any(word in str(error) for word in ("backward", "differentiat", "double", "second derivative"))
        return
    for leaf, gradient in found.items():
        assert_gradients_close(gradient, truth[leaf], torch.float64, 10.0, what=leaf)


@pytest.mark.parametrize("rule", ["decay-feature", "gated-delta-feature"])
def test_reads_and_summaries(rule):
    phi = one_head_map("favor+")
    inputs = small("favor+", rule, Layout(5))
    normalize = "sum+attention"
    empty = reassoc.AttentionState.zeros(
        phi, 1, 1, 3, rule=inputs.rule(), normalize=normalize, dtype=torch.float64
    )
    names = list(inputs.leaves())

    def run(*tensors):
        moved = dataclasses.replace(inputs, **dict(zip(names, tensors, strict=True)))
        parts = [moved.rows(0, 2), moved.rows(2, 5)]
        a, b = (reassoc.summarize(p.key, p.value, phi, p.rule(), normalize=normalize) for p in parts)
        return reassoc.read(moved.query, phi, empty.apply(reassoc.compose(a, b)))

    assert torch.autograd.gradcheck(run, tuple(inputs.leaves().values()))
