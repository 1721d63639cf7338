"""Laws of the delta rules alone: what beta and the gates mean at their limits, retrieval, long sequences."""

import dataclasses
import math

import pytest
import torch

import reassoc
from laws.budgets import STREAMED_FLOAT32, assert_gradients_close, assert_outputs_close, assert_same
from laws.suite import (
    BACKENDS,
    NORMALIZATIONS,
    Layout,
    assert_gradients_equal_the_oracle,
    assert_gradients_same,
    assert_states_same,
    call,
    cotangent,
    draw,
    expect,
    gradients,
    largest_log,
    make_map,
    step_through,
)
from reassoc import AttentionState, rules

SHAPES = ("head", "token", "feature")
NAMES = ("elu+1", "favor+", "trig")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["causal", "padded-causal", "packed-causal"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_decay_zero_is_the_delta_rule(name, shape, layout, backend):
    phi = make_map(name)
    inputs = draw(name, "delta", layout).requires_grad()
    gate = torch.zeros_like(draw(name, f"gated-delta-{shape}", layout).log_decay)
    gated = dataclasses.replace(inputs, log_decay=gate)
    for normalize in ("sum", "sum+attention"):
        want = call(phi, inputs, normalize=normalize, backend=backend)
        got = call(phi, gated, normalize=normalize, backend=backend)
        assert_same(got, want, torch.float64)
        assert_gradients_same(got, want, inputs.leaves())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("at", [1, 40, 64, 70])
@pytest.mark.parametrize("shape", ["token", "feature"])
@pytest.mark.parametrize("name", NAMES)
def test_decay_minus_infinity_is_a_fresh_start(name, shape, at, backend):
    """A reset at token t forgets everything before t and keeps t itself: decay first, then write."""
    phi = make_map(name)
    inputs = draw(name, "delta", Layout(131, causal=True)).requires_grad()
    gate = torch.zeros_like(draw(name, f"gated-delta-{shape}", inputs.layout).log_decay)
    gate[:, :, at] = -math.inf
    gated = dataclasses.replace(inputs, log_decay=gate.requires_grad_())
    got, state = call(phi, gated, backend=backend, return_state=True)
    before = call(phi, inputs.rows(0, at), backend=backend)
    after, fresh = call(phi, inputs.rows(at, 131), backend=backend, return_state=True)
    want = torch.cat([before, after], 2)
    assert_same(got, want, torch.float64)
    assert_same(state.S, fresh.S, torch.float64)
    weight = cotangent(want, want[..., 0].isnan())
    truth = gradients(want, weight, inputs.leaves())
    found = gradients(got, weight, gated.leaves())
    assert found.pop("log_decay").isfinite().all()
    for leaf, gradient in found.items():
        assert_gradients_close(gradient, truth[leaf], torch.float64, what=leaf)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["delta", "gated-delta-token"])
def test_beta_zero_writes_nothing(rule, backend):
    """S stays what it was (delta) or only decays (gated delta), while z goes on adding keys up."""
    phi = make_map("elu+1")
    inputs = draw("elu+1", rule, Layout(70, causal=True))
    still = dataclasses.replace(inputs, beta=torch.zeros_like(inputs.beta))
    output, state = call(phi, still, normalize="sum+attention", backend=backend, return_state=True)
    assert output.eq(0).all()
    assert state.S.eq(0).all()
    additive = dataclasses.replace(inputs, beta=None)
    _, want = call(phi, additive, normalize="sum+attention", backend=backend, return_state=True)
    assert_same(state.z, want.z, torch.float64)

    _, before = call(phi, inputs, normalize="none", backend=backend, return_state=True)
    _, after = call(phi, still, normalize="none", state=before, backend=backend, return_state=True)
    kept = 1.0 if inputs.log_decay is None else inputs.log_decay.sum(2).exp()[..., None, None]
    assert_same(after.S, before.S * kept, torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [8, 64])
def test_orthonormal_keys_retrieve_and_overwrite_exactly(n, backend):
    """With beta 1 each key gives its own value back, and written again, only its last one."""
    generator = torch.Generator().manual_seed(0)
    key = torch.linalg.qr(torch.randn(1, 2, n, n, generator=generator, dtype=torch.float64))[0]
    old, new = (torch.randn(1, 2, n, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    order = torch.randperm(n, generator=generator)
    keys = torch.cat([key, key[:, :, order]], 2)
    rule = rules.Delta(torch.ones(1, 2, 2 * n, dtype=torch.float64))
    options = {"rule": rule, "normalize": "none", "causal": True, "backend": backend, "return_state": True}
    values = torch.cat([old, new[:, :, order]], 2)
    output, state = reassoc.linear_attention(keys, keys, values, "identity", **options)
    assert_same(output, values, torch.float64)
    assert_same(reassoc.read(key, "identity", state), new, torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_z_adds_keys_unweighted_by_beta(backend):
    """Attention normalization divides the same reads by what the additive rule divides by."""
    for rule in ("delta", "gated-delta-feature"):
        inputs = draw("elu+1", rule, Layout(70, causal=True), normalize="attention")
        got = call("elu+1", inputs, normalize="attention", backend=backend)
        raw = call("elu+1", inputs, normalize="none", backend=backend)
        ones = dataclasses.replace(inputs, beta=None, value=torch.ones_like(inputs.value))
        denominator = call("elu+1", ones, normalize="none", backend=backend)
        assert_same(got, raw / denominator, torch.float64)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("name", ["favor+", "calibrated favor+", "trig gaussian", "exp"])
def test_a_dropped_query_factor_is_put_back_where_it_does_not_cancel(name, normalize):
    phi = make_map(name)
    inputs = draw(name, "gated-delta-token", "causal", normalize=normalize)
    for eps in (0.0, 0.3) if "attention" in normalize else (0.0,):
        result = expect(name, phi, inputs, normalize=normalize, eps=eps)
        for backend in BACKENDS:
            got = call(phi, inputs, normalize=normalize, eps=eps, backend=backend)
            assert_outputs_close(got, result, torch.float64)


# ------------------------------------------------------------------------------------- hostile gates


def check(name, inputs, dtype, backend):
    """Values, gradients and steps of the inputs as rounded to `dtype`, against the oracle in float64."""
    inputs = inputs.to(dtype).requires_grad()
    exact, phi = make_map(name), make_map(name, dtype)
    result = expect(name, exact, inputs)
    logs = largest_log(name, exact, inputs)
    output = call(phi, inputs, backend=backend)
    assert_outputs_close(output, result, dtype, logs)
    with torch.no_grad():
        stepped, _ = step_through(phi, inputs)
    assert_outputs_close(stepped, result, dtype, logs, "steps")
    assert_gradients_equal_the_oracle(output, result, inputs.leaves(), dtype=dtype, logs=logs, stretch=10.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["token", "feature"])
@pytest.mark.parametrize("name", NAMES)
def test_gates_of_minus_fifty_and_resets(name, shape, dtype, backend):
    """exp(50 * 64) has no float: decays in a chunk must never be formed as a ratio of exponentials."""
    inputs = draw(name, f"gated-delta-{shape}", Layout(140, causal=True))
    fast = torch.rand(inputs.log_decay.shape, generator=torch.Generator().manual_seed(3)) < 0.3
    gate = torch.where(fast, -50.0, -0.001).double()
    gate[:, :, [0, 5, 6, 63, 64, 100]] = -math.inf
    if shape == "feature":
        gate[:, :, 6, 1:] = -0.2
    check(name, dataclasses.replace(inputs, log_decay=gate), dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rate", [-50.0, -1000.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_uniform_strong_decay_keeps_only_the_last_token(shape, rate, backend):
    inputs = draw("identity", f"gated-delta-{shape}", Layout(140, causal=True), normalize="none")
    inputs = dataclasses.replace(inputs, log_decay=torch.full_like(inputs.log_decay, rate))
    score = (inputs.query * inputs.key.repeat_interleave(2, 1)).sum(-1, keepdim=True)
    want = score * (inputs.beta[..., None] * inputs.value).repeat_interleave(2, 1)
    assert_same(call("identity", inputs, normalize="none", backend=backend), want, torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["delta", "gated-delta-feature"])
def test_a_token_that_overflows_changes_no_earlier_row(rule, backend):
    """exp features at their true scale overflow at the token itself: the rows before it, never."""
    inputs = draw("exp", rule, Layout(100, causal=True), normalize="none")
    want = call("exp", inputs, normalize="none", backend=backend)
    key = inputs.key.clone()
    key[:, :, 70] = 1000.0
    got = call("exp", dataclasses.replace(inputs, key=key), normalize="none", backend=backend)
    assert_same(got[:, :, :70], want[:, :, :70], torch.float64)
    assert not got[:, :, 70:].isfinite().any()


# ------------------------------------------------------------------------------------- long sequences


@pytest.mark.parametrize(
    ("name", "rule"), [("elu+1", "delta"), ("favor+", "gated-delta-token"), ("elu+1", "gated-delta-feature")]
)
def test_fifty_thousand_tokens(name, rule):
    """Float32, whole and in pieces with the state carried, against one run in float64."""
    n = 50_000
    inputs = draw(name, rule, Layout(n, causal=True)).heads(slice(2), slice(1), slice(1)).to(torch.float32)
    phi, exact = make_map(name, torch.float32), make_map(name)
    with torch.no_grad():
        want, truth = call(exact, inputs.to(torch.float64), return_state=True)
        whole, state = call(phi, inputs, return_state=True)
        pieces, carried = [], None
        for start in range(0, n, 7001):
            rows = inputs.rows(start, min(n, start + 7001))
            piece, carried = call(phi, rows, state=carried, return_state=True)
            pieces.append(piece)
    assert want.isfinite().all()
    for got in (whole, torch.cat(pieces, 2)):
        assert (got.double() - want).abs().max() <= STREAMED_FLOAT32 * want.abs().max()
    for end in (state, carried):
        assert_states_same(end, truth, factor=10.0, dtype=torch.float32)


def test_steps_lose_no_small_corrections_to_rounding():
    """A beta so small that each correction is below half a digit of the state: together they must count."""
    phi = make_map("identity", torch.float32, dim=1)
    one = torch.ones(1, 1, 1, 1)
    state = AttentionState.zeros(phi, 1, 1, 1, rule=rules.Delta(one[..., 0]), normalize="none")
    half, tiny = (rules.Delta(torch.full((1, 1, 1), beta)) for beta in (0.5, 1e-8))
    with torch.no_grad():
        reassoc.step(one, one, one, phi, state, rule=half, normalize="none")
        for _ in range(20_000):
            reassoc.step(one, one, one, phi, state, rule=tiny, normalize="none")
    want = 0.5 * (1 - 1e-8) ** 20_000  # what is still missing to the value 1
    assert abs((1 - state.S.double().item()) / want - 1) < 1e-6
