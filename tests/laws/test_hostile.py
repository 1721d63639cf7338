"""Inputs that break stabilisers: exponential maps of any norm, violent decays, windows past huge keys."""

import dataclasses
import math

import pytest
import torch

from laws.budgets import assert_outputs_close, assert_same
from laws.suite import (
    BACKENDS,
    Layout,
    assert_gradients_equal_the_oracle,
    call,
    draw,
    expect,
    largest_log,
    make_map,
    step_through,
)

EXPONENTIAL = (
    "exp",
    "softmax",
    "favor+",
    "favor++",
    "calibrated favor+",
    "calibrated favor++ pooled",
    "calibrated hyperbolic",
    "hedgehog per head",
    "trig",
)
ALL_DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def check(name, inputs, dtype, backend="auto", gradient=True, steps=False):
    """Values (and gradients) of the inputs as rounded to `dtype`, against the oracle in float64."""
    inputs = inputs.to(dtype).requires_grad()
    exact = make_map(name)
    phi = make_map(name, dtype)
    result = expect(name, exact, inputs)
    logs = largest_log(name, exact, inputs)
    output = call(phi, inputs, backend=backend)
    assert_outputs_close(output, result, dtype, logs)
    if steps:
        with torch.no_grad():
            stepped, _ = step_through(phi, inputs, backend=backend)
        assert_outputs_close(stepped, result, dtype, logs, "steps")
    if gradient:
        slope = max(10.0, float(inputs.query.detach().abs().max()), float(inputs.key.detach().abs().max()))
        assert_gradients_equal_the_oracle(
            output, result, inputs.leaves(), dtype=dtype, logs=logs, stretch=slope
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("norm", [1e-3, 1.0, 7.0, 50.0])
@pytest.mark.parametrize("name", [m for m in EXPONENTIAL if m != "trig"])
def test_inputs_of_any_norm(name, norm, dtype, backend):
    inputs = draw("exp", "sum", Layout(131, causal=True), norm=norm / 2)  # |x| is about norm
    check(name, inputs, dtype, backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [1e-3, 30.0, 1000.0])
@pytest.mark.parametrize("name", [m for m in EXPONENTIAL if m != "trig"])
def test_late_keys_are_huge_or_tiny(name, factor, dtype):
    """The running maximum jumps inside a chunk and again at a chunk's edge."""
    inputs = draw("exp", "sum", Layout(140, causal=True))
    key = inputs.key.clone()
    key[:, :, 40:] *= math.sqrt(factor)
    key[:, :, 64:] *= math.sqrt(factor)
    check(
        name,
        dataclasses.replace(inputs, key=key),
        dtype,
        steps=dtype == torch.float32,
        gradient=factor < 1000,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["sum", "decay-token"])
@pytest.mark.parametrize("name", ["exp", "favor+", "calibrated hyperbolic"])
def test_huge_keys_first_small_after_in_one_chunk(name, rule, dtype, backend):
    """After a reset by decay or by size the small keys must still be told apart."""
    inputs = draw("exp", rule, Layout(70, causal=True))
    key = inputs.key.clone()
    key[:, :, :10] *= 20.0
    check(name, dataclasses.replace(inputs, key=key), dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("window", [3, 20, 64, 70])
@pytest.mark.parametrize("name", ["exp", "favor+", "softmax"])
def test_a_window_slides_past_a_huge_key(name, window, dtype, backend):
    """Once the huge key has left, nothing of it may remain: no subtraction, no stale maximum."""
    inputs = draw("exp", "sum", Layout(150, causal=True, window=window))
    key = inputs.key.clone()
    key[:, :, 10] = 60.0
    key[:, :, 75] = -60.0
    check(
        name,
        dataclasses.replace(inputs, key=key),
        dtype,
        backend,
        steps=dtype == torch.float32 and window == 20,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["elu+1", "favor+", "trig"])
def test_decays_of_minus_fifty_per_token_and_feature(name, dtype, backend):
    """exp(50 * 64) has no float: within-chunk decays must never be formed as a ratio of exponentials."""
    inputs = draw(name, "decay-feature", Layout(140, causal=True))
    fast = torch.rand(inputs.log_decay.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    gate = torch.where(
        fast, torch.full_like(inputs.log_decay, -50.0), -0.001 * torch.ones_like(inputs.log_decay)
    )
    check(name, dataclasses.replace(inputs, log_decay=gate), dtype, backend, steps=dtype == torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rate", [-50.0, -1000.0])
@pytest.mark.parametrize("rule", ["decay-head", "decay-token", "decay-feature"])
def test_uniform_strong_decay_is_almost_a_window_of_one(rule, rate, backend):
    inputs = draw("elu+1", rule, Layout(140, causal=True))
    inputs = dataclasses.replace(inputs, log_decay=torch.full_like(inputs.log_decay, rate))
    check("elu+1", inputs, torch.float32, backend, steps=True)
    output = call("elu+1", inputs, backend=backend)
    assert_same(output, inputs.value.repeat_interleave(2, 1), torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["decay-token", "decay-feature"])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "exp", "trig"])
def test_resets_inside_a_chunk(name, shape, dtype, backend):
    """Minus infinity at neighbouring tokens, at the first token, and for single features."""
    inputs = draw(name, shape, Layout(140, causal=True))
    gate = torch.full_like(inputs.log_decay, -0.1)
    gate[:, :, [0, 5, 6, 63, 64, 100]] = -math.inf
    if shape == "decay-feature":
        gate[:, :, 6, 1:] = -0.2
        gate[:, :, 100, 0] = -0.2
    check(name, dataclasses.replace(inputs, log_decay=gate), dtype, backend, steps=dtype == torch.float32)


def test_a_reset_forgets_a_huge_key():
    """After the reset the old running maximum must not push the new keys below the smallest float."""
    inputs = draw("exp", "decay-token", Layout(140, causal=True))
    key = inputs.key.clone()
    key[:, :, :20] += 300.0
    gate = torch.full_like(inputs.log_decay, -0.1)
    gate[:, :, [20, 90]] = -math.inf
    key[:, :, 70:90] += 500.0
    inputs = dataclasses.replace(inputs, key=key, log_decay=gate)
    for dtype in (torch.float64, torch.float32):
        check("exp", inputs, dtype, steps=True)


@pytest.mark.parametrize("rate", [-20.0, -80.0])
def test_a_decay_fades_a_huge_key_slowly(rate):
    """exp features of 1e130 fade over ten tokens while small keys arrive: both must stay in range."""
    inputs = draw("exp", "decay-head", Layout(140, causal=True))
    key = inputs.key.clone()
    key[:, :, 3] += 300.0
    inputs = dataclasses.replace(inputs, key=key, log_decay=torch.full_like(inputs.log_decay, rate))
    for dtype in (torch.float64, torch.float32):
        check("exp", inputs, dtype, steps=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_next_to_huge_keys(dtype):
    """A masked huge key must not enter the running maximum either."""
    inputs = draw("exp", "sum", "padded-causal")
    key = torch.where(inputs.key_mask[:, None, :, None], inputs.key, torch.full_like(inputs.key, 1e4))
    inputs = dataclasses.replace(inputs, key=key)
    result = expect("exp", make_map("exp"), inputs.to(dtype))
    output = call("exp", inputs.to(dtype))
    assert_outputs_close(output, result, dtype, float(inputs.query.abs().max()) + 4.0)


@pytest.mark.parametrize("factor", [1e-3, 10.0, 1000.0])
@pytest.mark.parametrize("name", ["exp", "favor+", "calibrated favor+"])
def test_pieces_with_very_different_keys(name, factor):
    """The carried maximum is raised or left behind by the next piece."""
    phi, exact = make_map(name, torch.float32), make_map(name)
    inputs = draw("exp", "sum", Layout(100, causal=True))
    key = inputs.key.clone()
    key[:, :, 50:] *= factor
    inputs = dataclasses.replace(inputs, key=key).to(torch.float32)
    result = expect(name, exact, inputs)
    first, state = call(phi, inputs.rows(0, 50), return_state=True)
    second = call(phi, inputs.rows(50, 100), state=state)
    assert_outputs_close(
        torch.cat([first, second], 2), result, torch.float32, largest_log(name, exact, inputs)
    )


def test_overflow_without_normalization_is_infinite_not_nan():
    inputs = draw("exp", "sum", Layout(70, causal=True))
    inputs = dataclasses.replace(inputs, key=inputs.key + 2000.0, value=inputs.value.abs() + 0.1)
    output = call("exp", inputs, normalize="none")
    assert output.isposinf().all()


def test_trigonometric_weights_of_any_norm():
    """exp(|k|^2 / 2) of |k| = 40 has no float: it is carried as a logarithm. One key dominates: its value."""
    inputs = draw("trig", "sum", Layout(100, causal=True))
    key = inputs.key.clone()
    key[:, :, 30:] *= 80.0
    key[:, :, 60] = torch.tensor([90.0, -90.0, 90.0, 90.0], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        moved = dataclasses.replace(inputs, key=key).to(dtype)
        output = call(make_map("trig", dtype), moved)
        assert output.isfinite().all()
        want = moved.value.repeat_interleave(2, 1)[:, :, 60:61].expand(-1, -1, 40, -1)
        assert_same(output[:, :, 60:], want, dtype, factor=100.0)
        before = call(make_map("trig", dtype), inputs.to(dtype))
        assert_same(output[:, :, :30], before[:, :, :30], dtype, factor=10.0)
