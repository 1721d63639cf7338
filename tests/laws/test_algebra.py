"""Laws 7, 9, 10, 11: v = 1 gives 1, linearity, scaling, key order, and the limits of the options."""

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import reassoc
from laws.budgets import assert_gradients_close, assert_same
from laws.suite import (
    ADDITIVE,
    BACKENDS,
    MAPS,
    NORMALIZATIONS,
    RULES,
    SIGNED_MAPS,
    H,
    Layout,
    assert_gradients_same,
    call,
    cotangent,
    draw,
    expect,
    fits,
    gradients,
    make_map,
    rule_for,
)
from reassoc import rules


def slack(name, phi, inputs, normalize=None):
    """Cancelling weights may lose as many digits as their spread says."""
    if name not in SIGNED_MAPS:
        return 1.0
    return max(1.0, float(expect(name, phi, inputs, normalize=normalize).spread.max()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["full", "causal", "window", "padded-causal", "packed-causal"])
@pytest.mark.parametrize("name", MAPS)
def test_constant_values_come_back(name, layout, backend):
    rule = rule_for(MAPS.index(name) + len(layout), layout, ADDITIVE)
    phi = make_map(name)
    inputs = draw(name, rule, layout)
    inputs = dataclasses.replace(inputs, value=torch.ones_like(inputs.value))
    for normalize in ("attention", "sum+attention"):
        output = call(phi, inputs, normalize=normalize, backend=backend)
        defined = ~output.isnan()
        assert defined.any()
        assert_same(
            output[defined], torch.ones_like(output[defined]), torch.float64, slack(name, phi, inputs)
        )


@pytest.mark.parametrize("name", MAPS)
def test_constant_values_come_back_in_float32(name):
    phi = make_map(name, torch.float32)
    inputs = draw(name, "decay-feature", Layout(300, causal=True)).to(torch.float32)
    inputs = dataclasses.replace(inputs, value=torch.ones_like(inputs.value))
    output = call(phi, inputs)
    defined = ~output.isnan()
    assert defined.any()
    assert (output[defined] - 1).abs().max() <= 1e-5 * slack(name, make_map(name), inputs)


@given(
    name=st.sampled_from(MAPS),
    rule=st.sampled_from(RULES),
    normalize=st.sampled_from(NORMALIZATIONS),
    layout=st.sampled_from(["full", "causal", "window", "padded-causal", "packed-causal"]),
    backend=st.sampled_from(BACKENDS),
    a=st.floats(-10, 10),
    b=st.floats(-10, 10),
)
def test_outputs_are_linear_in_values(name, rule, normalize, layout, backend, a, b):
    assume(fits(rule, layout))
    phi = make_map(name)
    inputs = draw(name, rule, layout, normalize=normalize)
    u, w = inputs.value, draw(name, "sum", layout, seed=9).value
    with torch.no_grad():
        outputs = [
            call(phi, dataclasses.replace(inputs, value=v), normalize=normalize, backend=backend).nan_to_num(
                7.0
            )
            for v in (u, w, a * u + b * w)
        ]
        undefined = call(phi, inputs, normalize=normalize, backend=backend).isnan()
    want = a * outputs[0] + b * outputs[1]
    want[undefined] = 7.0
    size = max(float(abs(a) * outputs[0].abs().max() + abs(b) * outputs[1].abs().max()), 7.0)
    assert (outputs[2] - want).abs().max() <= 1e-10 * size * slack(name, phi, inputs, normalize)


@pytest.mark.parametrize("layout", ["full", "causal", "window", "padded"])
@pytest.mark.parametrize("rule", ADDITIVE)
def test_scaling_key_features_changes_nothing(rule, layout):
    """A common factor of every key feature cancels under attention normalization, and only there."""
    inputs = draw("identity", rule, layout)
    scaled = dataclasses.replace(inputs, key=37.0 * inputs.key)
    assert_same(call("identity", scaled), call("identity", inputs), torch.float64)
    assert_same(
        call("identity", scaled, normalize="none"),
        37.0 * call("identity", inputs, normalize="none"),
        torch.float64,
    )
    logs = draw("exp", rule, layout)
    shifted = dataclasses.replace(logs, key=logs.key + 300.0)
    assert_same(call("exp", shifted), call("exp", logs), torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MAPS)
def test_key_order_does_not_matter_without_causality(name, backend):
    phi = make_map(name)
    inputs = draw(name, "sum", "padded")
    order = torch.randperm(inputs.key.shape[2], generator=torch.Generator().manual_seed(0))
    shuffled = dataclasses.replace(
        inputs,
        key=inputs.key[:, :, order],
        value=inputs.value[:, :, order],
        key_mask=inputs.key_mask[:, order],
    )
    for normalize in NORMALIZATIONS:
        want = call(phi, inputs, normalize=normalize, backend=backend)
        assert_same(
            call(phi, shuffled, normalize=normalize, backend=backend),
            want,
            torch.float64,
            slack(name, phi, inputs),
        )


# ------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["full", "causal", "window", "padded-causal", "packed-causal"])
@pytest.mark.parametrize("shape", ["decay-head", "decay-token", "decay-feature"])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "trig"])
def test_decay_zero_is_the_sum_rule(name, shape, layout, backend):
    phi = make_map(name)
    inputs = draw(name, "sum", layout).requires_grad()
    gate = torch.zeros_like(draw(name, shape, layout).log_decay)
    gated = dataclasses.replace(inputs, log_decay=gate)
    for normalize in ("attention", "none"):
        want = call(phi, inputs, normalize=normalize, backend=backend)
        got = call(phi, gated, normalize=normalize, backend=backend)
        assert_same(got, want, torch.float64)
        assert_gradients_same(got, want, inputs.leaves())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("at", [1, 40, 64, 70])
@pytest.mark.parametrize("shape", ["decay-token", "decay-feature"])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "trig"])
def test_decay_minus_infinity_is_a_fresh_start(name, shape, at, backend):
    """A reset at token t forgets everything before t and keeps t itself: decay first, then write."""
    phi = make_map(name)
    inputs = draw(name, "sum", Layout(131, causal=True)).requires_grad()
    gate = torch.zeros_like(draw(name, shape, inputs.layout).log_decay)
    gate[:, :, at] = -math.inf
    gated = dataclasses.replace(inputs, log_decay=gate.requires_grad_())
    got, state = call(phi, gated, backend=backend, return_state=True)
    before, after = (
        call(phi, inputs.rows(0, at), backend=backend),
        call(phi, inputs.rows(at, 131), backend=backend),
    )
    want = torch.cat([before, after], 2)
    assert_same(got, want, torch.float64)
    weight = cotangent(want, want[..., 0].isnan())
    truth = gradients(want, weight, inputs.leaves())
    found = gradients(got, weight, gated.leaves())
    assert found.pop("log_decay").isfinite().all()
    for leaf, gradient in found.items():
        assert_gradients_close(gradient, truth[leaf], torch.float64, what=leaf)
    _, fresh = call(phi, inputs.rows(at, 131), backend=backend, return_state=True)
    factor = (
        torch.ones_like(state.z) if state.log_scale is None else (state.log_scale - fresh.log_scale).exp()
    )
    assert_same(state.S * factor[..., None], fresh.S, torch.float64)


@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_a_reset_forgets_a_carried_state(name):
    phi = make_map(name)
    inputs = draw(name, "decay-token", Layout(20, causal=True))
    _, state = call(phi, draw(name, "decay-token", Layout(70, causal=True), seed=3), return_state=True)
    inputs.log_decay[:, :, 0] = -math.inf
    assert_same(call(phi, inputs, state=state), call(phi, inputs), torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ADDITIVE)
@pytest.mark.parametrize("name", ["elu+1", "favor+", "identity"])
def test_a_wide_window_is_causal(name, rule, backend):
    phi = make_map(name)
    inputs = draw(name, rule, Layout(130, causal=True))
    want = call(phi, inputs, backend=backend)
    for window in (130, 131, 10_000):
        got = call(
            phi, dataclasses.replace(inputs, layout=Layout(130, causal=True, window=window)), backend=backend
        )
        assert_same(got, want, torch.float64)
    narrower = call(
        phi, dataclasses.replace(inputs, layout=Layout(130, causal=True, window=129)), backend=backend
    )
    assert_same(narrower[:, :, :129], want[:, :, :129], torch.float64)
    if rule in ("sum", "decay-head"):  # the others may have forgotten the first key
        assert not torch.equal(narrower[:, :, 129], want[:, :, 129])


def test_a_window_of_one_returns_the_value():
    inputs = draw("elu+1", "decay-token", Layout(70, causal=True, window=1))
    assert_same(call("elu+1", inputs), inputs.value.repeat_interleave(2, 1), torch.float64)


@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_as_many_key_heads_as_query_heads_is_ungrouped(name):
    """H = G gives each head its own call."""
    inputs = draw(name, "decay-token", "causal")
    full = dataclasses.replace(
        inputs,
        key=draw(name, "sum", "causal", seed=4).query,
        value=inputs.value.repeat_interleave(2, 1),
        log_decay=inputs.log_decay.repeat_interleave(2, 1),
    )
    phi = make_map(name)
    together = call(phi, full)
    for h in range(H):
        own = slice(h, h + 1)
        alone = dataclasses.replace(
            full,
            query=full.query[:, own],
            key=full.key[:, own],
            value=full.value[:, own],
            log_decay=full.log_decay[:, own],
        )
        assert_same(together[:, own], call(phi, alone), torch.float64)


def test_decay_first_then_write():
    """Two tokens by hand: the second token's decay weighs the first key and not its own."""
    one = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    value = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 2, 1)
    gate = torch.tensor([-5.0, -0.7], dtype=torch.float64).view(1, 1, 2)
    output = reassoc.linear_attention(one, one, value, "identity", rule=rules.Decay(gate), causal=True)
    g = math.exp(-0.7)
    assert output.flatten().tolist() == pytest.approx([1.0, g / (1 + g)])
    raw = reassoc.linear_attention(
        one, one, value, "identity", rule=rules.Decay(gate), causal=True, normalize="none"
    )
    assert raw.flatten().tolist() == pytest.approx([1.0, g])


def test_positive_log_decay_is_refused():
    inputs = draw("elu+1", "sum", "causal")
    with pytest.raises(ValueError, match="log_decay"):
        reassoc.linear_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            "elu+1",
            causal=True,
            rule=rules.Decay(torch.tensor([0.1, -0.1])),
        )


def test_what_none_means():
    inputs = draw("elu+1", "sum", "causal")
    assert torch.equal(call("elu+1", inputs, normalize=None), call("elu+1", inputs, normalize="attention"))
