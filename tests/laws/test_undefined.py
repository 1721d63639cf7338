"""Section 4.1 and 4.2: zero denominators, undefined feature sums, epsilon, and what gradients do there."""

import dataclasses
import math

import pytest
import torch

import reassoc
from laws.budgets import assert_outputs_close, assert_same
from laws.suite import (
    BACKENDS,
    Layout,
    assert_gradients_equal_the_oracle,
    call,
    cotangent,
    draw,
    expect,
    fresh_state,
    gradients,
    make_map,
    step_through,
)


def dead_start(batch=1, head=1, until=5, n=70):
    """ReLU inputs whose first keys are all negative in one row and key head: no weight before `until`."""
    inputs = draw("relu", "sum", Layout(n, causal=True))
    query, key = inputs.query.abs() + 0.1, inputs.key.abs() + 0.1
    key[batch, head, :until] *= -1
    return dataclasses.replace(inputs, query=query, key=key)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["nan", "zero"])
def test_each_row_is_decided_by_itself(policy, backend):
    inputs = dead_start()
    output = call("relu", inputs, undefined=policy, backend=backend)
    result = expect("relu", make_map("relu"), inputs, undefined=policy)
    assert result.undefined.sum() == 2 * 5
    assert_outputs_close(output, result, torch.float64)
    bad = output[1, 2:, :5]
    assert bad.isnan().all() if policy == "nan" else not bad.any()
    with torch.no_grad():
        stepped, _ = step_through(make_map("relu"), inputs.rows(0, 10), undefined=policy, backend=backend)
    assert_same(stepped, output[:, :, :10], torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_raise_names_the_first_batch_head_and_position(backend):
    inputs = dead_start()
    inputs.key[1, 1] = inputs.key[1, 1].abs()
    inputs.query[1, 3, 6] *= -1
    inputs.query[1, 3, 9] *= -1
    with pytest.raises(ValueError) as error:
        call("relu", inputs, undefined="raise", backend=backend)
    text = str(error.value)
    places = [text.index(word) for word in ("batch 1", "head 3", "position 6") if word in text]
    assert len(places) == 3, text
    assert "undefined" in text
    with pytest.raises(ValueError):
        step_through(make_map("relu"), inputs.rows(6, 7), undefined="raise", backend=backend)
    call("relu", inputs.rows(0, 6), undefined="raise", backend=backend)


def test_no_visible_key_is_undefined():
    for m in (0, 3):
        inputs = draw("elu+1", "sum", Layout(4, m))
        mask = None if m == 0 else torch.zeros(2, 3, dtype=torch.bool)
        inputs = dataclasses.replace(inputs, key_mask=mask)
        for name in ("elu+1", "favor+", "identity"):
            phi = make_map(name)
            assert call(phi, inputs).isnan().all()
            assert call(phi, inputs, undefined="zero").eq(0).all()
            with pytest.raises(ValueError):
                call(phi, inputs, undefined="raise")


@pytest.mark.parametrize("policy", ["nan", "zero"])
@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_reading_an_empty_state_is_undefined(name, policy):
    inputs = draw(name, "sum", "cross")
    phi = make_map(name)
    output = reassoc.read(inputs.query, phi, fresh_state(phi, inputs), undefined=policy)
    assert output.isnan().all() if policy == "nan" else output.eq(0).all()
    with pytest.raises(ValueError):
        reassoc.read(inputs.query, phi, fresh_state(phi, inputs), undefined="raise")


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_cancellation_is_undefined(backend):
    """Signed weights that cancel exactly: 1 - 1."""
    query = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    key = torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 1, 2, 1)
    value = torch.tensor([3.0, 5.0], dtype=torch.float64).view(1, 1, 2, 1)
    output = reassoc.linear_attention(query, key, value, "identity", causal=True, backend=backend)
    assert output[0, 0, 0, 0] == 3
    assert output[0, 0, 1, 0].isnan()
    shifted = reassoc.linear_attention(query, key, value, "identity", causal=True, eps=0.5, backend=backend)
    assert shifted.flatten().tolist() == pytest.approx([3 / 1.5, -2 / 0.5])


# ------------------------------------------------------------------------------------- epsilon


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [1e-6, 0.3, -0.01])
@pytest.mark.parametrize("layout", ["full", "causal", "padded-causal", "window"])
@pytest.mark.parametrize(
    "name", ["elu+1", "relu", "favor+", "calibrated favor+", "trig", "trig gaussian", "exp"]
)
def test_epsilon_is_added_at_true_scale(name, layout, eps, backend):
    """Also for maps that drop a factor of the query or carry logarithms."""
    phi = make_map(name)
    inputs = draw(name, "decay-token", layout).requires_grad()
    result = expect(name, phi, inputs, eps=eps)
    output = call(phi, inputs, eps=eps, backend=backend)
    assert_outputs_close(output, result, torch.float64)
    spread = max(1.0, float(result.spread.max()))
    assert_gradients_equal_the_oracle(output, result, inputs.leaves(), spread=spread**2)


@pytest.mark.parametrize("name", ["elu+1", "favor+", "calibrated favor+"])
def test_epsilon_in_steps_and_reads(name):
    phi = make_map(name)
    inputs = draw(name, "sum", Layout(20, causal=True))
    want = call(phi, inputs, eps=0.2)
    assert (want - call(phi, inputs)).abs().max() > 1e-3
    with torch.no_grad():
        stepped, state = step_through(phi, inputs, eps=0.2)
    assert_same(stepped, want, torch.float64)
    assert_same(reassoc.read(inputs.query[:, :, -1:], phi, state, eps=0.2), want[:, :, -1:], torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_epsilon_the_test_is_on_the_sum(backend):
    inputs = dead_start(n=10)
    assert call("relu", inputs, eps=0.5, backend=backend).isfinite().all()
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    key = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
    call_ = lambda policy: reassoc.linear_attention(  # noqa: E731
        query, key, key, "relu", eps=-0.5, undefined=policy, backend=backend
    )
    assert call_("nan").isnan().all()
    assert call_("zero").eq(0).all()
    with pytest.raises(ValueError):
        call_("raise")


def test_epsilon_is_never_a_default():
    inputs = draw("elu+1", "sum", "causal")
    tiny = dataclasses.replace(inputs, key=inputs.key - 100)  # weights of 1e-44 still divide exactly
    output = call("elu+1", dataclasses.replace(tiny, value=torch.ones_like(inputs.value)))
    assert (output - 1).abs().max() < 1e-12


# ------------------------------------------------------------------------------------- sum normalization


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_all_zero_key_writes_nothing(backend):
    inputs = draw("relu", "sum", Layout(70, causal=True))
    inputs.key[:, :, 3] = -inputs.key[:, :, 3].abs()
    inputs = dataclasses.replace(inputs, query=inputs.query.abs() + 0.1)
    result = expect("relu", make_map("relu"), inputs, normalize="sum")
    output = call("relu", inputs, normalize="sum", undefined="raise", backend=backend)
    assert_outputs_close(output, result, torch.float64)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[:, 3] = False
    assert_same(
        output, call("relu", dataclasses.replace(inputs, key_mask=mask), normalize="sum"), torch.float64
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", ["sum", "sum+attention"])
def test_an_all_zero_query_is_an_undefined_row(normalize, backend):
    inputs = dead_start(until=0)
    inputs.query[1, 3, 6] *= -1
    output = call("relu", inputs, normalize=normalize, backend=backend)
    assert output[1, 3, 6].isnan().all()
    assert output.isnan().sum() == output.shape[-1]
    assert call("relu", inputs, normalize=normalize, undefined="zero", backend=backend)[1, 3, 6].eq(0).all()
    with pytest.raises(ValueError, match="position 6"):
        call("relu", inputs, normalize=normalize, undefined="raise", backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", ["sum", "sum+attention"])
def test_a_signed_key_with_zero_sum_is_undefined(normalize, backend):
    inputs = draw("identity", "sum", Layout(70, causal=True))
    inputs.key[0, 1, 66] = torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64)
    for policy in ("nan", "zero"):
        result = expect("identity", make_map("identity"), inputs, normalize=normalize, undefined=policy)
        output = call("identity", inputs, normalize=normalize, undefined=policy, backend=backend)
        assert_outputs_close(output[:, :, :64], type(result)(*(p[:, :, :64] for p in result)), torch.float64)
        assert_outputs_close(output, result, torch.float64)
    assert call("identity", inputs, normalize=normalize, backend=backend)[0, 2:, 66:].isnan().all()
    with pytest.raises(ValueError):
        call("identity", inputs, normalize=normalize, undefined="raise", backend=backend)


def test_a_masked_undefined_key_does_not_matter():
    inputs = draw("identity", "sum", Layout(10, causal=True))
    inputs.key[0, 1, 4] = torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 4] = False
    output = call("identity", dataclasses.replace(inputs, key_mask=mask), normalize="sum", undefined="raise")
    assert output.isfinite().all()


def test_sum_normalized_features_of_huge_norm():
    """exp features of norm 1e3 divide by their own sum without overflow."""
    inputs = draw("exp", "sum", "causal", norm=400.0)
    result = expect("exp", make_map("exp"), inputs, normalize="sum")
    output = call("exp", inputs, normalize="sum")
    assert output.isfinite().all()
    assert_outputs_close(output, result, torch.float64, largest_log=2000.0)


# ------------------------------------------------------------------------------------- none


def test_without_normalization_the_true_scale_comes_back():
    inputs = draw("exp", "sum", Layout(20, causal=True))
    high = dataclasses.replace(inputs, key=inputs.key + 30, query=inputs.query - 30)
    assert_same(call("exp", high, normalize="none"), call("exp", inputs, normalize="none"), torch.float64)
    over = call("exp", dataclasses.replace(inputs, key=inputs.key + 800), normalize="none")
    assert over.isinf().all()


def test_none_has_no_denominator_to_be_undefined():
    inputs = dead_start()
    output = call("relu", inputs, normalize="none", undefined="raise")
    assert output[1, 2:, :5].eq(0).all()


# ------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["nan", "zero"])
@pytest.mark.parametrize("normalize", ["attention", "sum+attention", "sum"])
@pytest.mark.parametrize("window", [None, 6])
def test_zero_incoming_gradient_sends_zero_back(normalize, window, policy, backend):
    inputs = dead_start()
    inputs.query[0, 0, 66] *= -1  # an all-zero query too
    inputs = dataclasses.replace(inputs, layout=Layout(70, causal=True, window=window)).requires_grad()
    result = expect("relu", make_map("relu"), inputs, normalize=normalize)
    assert result.undefined.any()
    output = call("relu", inputs, normalize=normalize, undefined=policy, backend=backend)
    assert_gradients_equal_the_oracle(output, result, inputs.leaves())
    for leaf, gradient in gradients(output, torch.zeros_like(output), inputs.leaves()).items():
        assert not gradient.any(), leaf
        assert not gradient.isnan().any(), leaf


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["favor+", "elu+1", "trig", "softmax"])
def test_gradients_beside_rows_without_keys(name, backend):
    """Left padding leaves rows that see nothing: their neighbours' gradients stay clean."""
    phi = make_map(name)
    inputs = draw(name, "decay-token", "padded-causal").requires_grad()
    output = call(phi, inputs, backend=backend)
    undefined = output[..., 0].isnan()
    assert undefined.any()
    for leaf, gradient in gradients(output, cotangent(output, undefined), inputs.leaves()).items():
        assert gradient.isfinite().all(), leaf


def test_the_zero_policy_gives_no_gradient_at_undefined_rows():
    inputs = dead_start().requires_grad()
    output = call("relu", inputs, undefined="zero")
    gradient = torch.autograd.grad(output.sum(), inputs.query)[0]
    assert gradient.isfinite().all()
    assert not gradient[1, 2:, :5].any()


def test_errors_come_before_work_is_lost():
    """A raising step leaves its state as it was."""
    inputs = dead_start(until=0)
    with torch.no_grad():
        _, state = call("relu", inputs.rows(0, 5), return_state=True)
        want = call("relu", inputs.rows(6, 9), state=state)
        broken = inputs.rows(5, 6)
        broken.query[1, 3] *= -1
        with pytest.raises(ValueError):
            step_through(make_map("relu"), broken, state=state, undefined="raise")
        assert_same(call("relu", inputs.rows(6, 9), state=state), want, torch.float64)


def test_nan_inputs_stay_visible():
    """A NaN query is NaN under every policy but does not count as an undefined denominator."""
    inputs = draw("elu+1", "sum", Layout(5, causal=True))
    inputs.query[0, 0, 2] = math.nan
    output = call("elu+1", inputs, undefined="zero")
    assert output[0, 0, 2].isnan().all()
    assert output.isnan().sum() == 3
