"""Laws 6 and 8: the future changes nothing, and a row does not depend on the rest of its batch."""

import dataclasses

import pytest
import torch

from laws.budgets import assert_same
from laws.suite import BACKENDS, MAPS, NORMALIZATIONS, Layout, call, draw, make_map, rule_for, step_through

CUT = 70


def with_other_future(inputs, factor):
    """Keys, values and queries after CUT multiplied by a factor."""
    changed = {}
    for leaf in ("query", "key", "value"):
        tensor = getattr(inputs, leaf).clone()
        tensor[:, :, CUT:] *= factor
        changed[leaf] = tensor
    return dataclasses.replace(inputs, **changed)


@pytest.mark.parametrize("factor", [-1.0, 10.0, 1000.0, 1e-3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MAPS)
def test_later_keys_change_nothing_before_them(name, backend, factor):
    normalize = NORMALIZATIONS[MAPS.index(name) % len(NORMALIZATIONS)]
    layout = Layout(100, causal=True, window=[None, None, 9][MAPS.index(name) % 3])
    rule = rule_for(MAPS.index(name), layout)
    phi = make_map(name)
    inputs = draw(name, rule, layout, normalize=normalize)
    other = with_other_future(inputs, factor)
    with torch.no_grad():
        before = call(phi, inputs, normalize=normalize, backend=backend)[:, :, :CUT]
        after = call(phi, other, normalize=normalize, backend=backend)[:, :, :CUT]
    assert not before.isnan().all()
    assert_same(after, before, torch.float64)


@pytest.mark.parametrize("factor", [10.0, 1000.0, 1e-3])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
@pytest.mark.parametrize(
    "name", [m for m in MAPS if "favor" in m or m in ("exp", "softmax", "calibrated hyperbolic")]
)
def test_later_keys_change_nothing_in_float32(name, eps, factor):
    """Exponential maps with and without an epsilon: a stabiliser over the sequence shows here."""
    phi = make_map(name, torch.float32)
    inputs = draw(name, "sum", Layout(100, causal=True)).to(torch.float32)
    with torch.no_grad():
        before = call(phi, inputs, eps=eps)[:, :, :CUT]
        after = call(phi, with_other_future(inputs, factor), eps=eps)[:, :, :CUT]
    assert before.isfinite().all()
    assert_same(after, before, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factor", [1.0, 1000.0])
@pytest.mark.parametrize("name", MAPS)
def test_earlier_outputs_send_no_gradient_to_the_future(name, factor, backend):
    rule = rule_for(MAPS.index(name) + 1, "causal")
    phi = make_map(name)
    inputs = with_other_future(draw(name, rule, Layout(100, causal=True)), factor).requires_grad()
    output = call(phi, inputs, backend=backend)[:, :, :CUT]
    kept = output[~output.isnan()]
    found = torch.autograd.grad(kept.square().sum(), list(inputs.leaves().values()), allow_unused=True)
    for (leaf, _), gradient in zip(inputs.leaves().items(), found, strict=True):
        if gradient is None or gradient.dim() < 3:
            continue
        assert not gradient.isnan().any(), f"gradient of {leaf}"
        assert gradient[:, :, :CUT].any(), f"gradient of {leaf}: nothing reaches the past either"
        assert not gradient[:, :, CUT:].any(), f"gradient of {leaf} reaches the future"


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "identity", "trig"])
def test_a_broken_future_token_does_not_reach_back(name, poison):
    """NaN in a later key is the concern of later rows only, chunked or not."""
    phi = make_map(name)
    inputs = draw(name, "decay-token", Layout(100, causal=True))
    want = call(phi, inputs)
    key = inputs.key.clone()
    key[:, :, CUT] = poison
    got = call(phi, dataclasses.replace(inputs, key=key))
    assert_same(got[:, :, :64], want[:, :, :64], torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["causal", "full", "padded-window"])
@pytest.mark.parametrize("name", MAPS)
def test_a_row_does_not_depend_on_its_batch(name, layout, backend):
    """Row 0 beside a neighbour a thousand times larger equals row 0 alone."""
    rule = rule_for(MAPS.index(name), layout)
    phi = make_map(name)
    inputs = draw(name, rule, layout)
    alone = inputs.heads(slice(None), slice(None), slice(1))
    factor = torch.tensor([1.0, 1000.0], dtype=torch.float64).view(2, 1, 1, 1)
    beside = dataclasses.replace(inputs, query=inputs.query * factor, key=inputs.key * factor)
    with torch.no_grad():
        want = call(phi, alone, backend=backend)
        got = call(phi, beside, backend=backend)
    assert not want.isnan().all()
    assert_same(got[:1], want, torch.float64)


@pytest.mark.parametrize("name", ["elu+1", "favor+", "exp"])
def test_a_head_does_not_depend_on_its_neighbours(name):
    phi = make_map(name)
    inputs = draw(name, "sum", "causal")
    factor = torch.tensor([1.0, 1000.0], dtype=torch.float64).view(1, 2, 1, 1)
    beside = dataclasses.replace(inputs, key=inputs.key * factor)
    assert_same(call(phi, beside)[:, :2], call(phi, inputs)[:, :2], torch.float64)


@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_nan_in_one_row_stays_there(name):
    phi = make_map(name)
    inputs = draw(name, "decay-token", "causal").requires_grad()
    key = inputs.key.detach().clone()
    key[1] = torch.nan
    broken = dataclasses.replace(inputs, key=key.requires_grad_())
    output = call(phi, broken)
    assert_same(output[:1], call(phi, inputs)[:1], torch.float64)
    gradient = torch.autograd.grad(output[0].sum(), broken.key)[0]
    assert gradient[0].isfinite().all()


@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_steps_of_one_row_do_not_depend_on_the_others(name):
    phi = make_map(name)
    inputs = draw(name, "sum", Layout(20, causal=True))
    factor = torch.tensor([1.0, 1000.0], dtype=torch.float64).view(2, 1, 1, 1)
    with torch.no_grad():
        want, _ = step_through(phi, inputs)
        got, _ = step_through(phi, dataclasses.replace(inputs, key=inputs.key * factor))
    assert_same(got[:1], want[:1], torch.float64)
