"""Law 1: chunked = stepped = reference = oracle, values and gradients.

The gradient of a log decay of minus infinity is zero: exp is flat there.
"""

import functools

import pytest
import torch

import oracle
import reassoc
from laws.budgets import assert_gradients_close, assert_outputs_close, assert_same
from laws.suite import (
    BACKENDS,
    CASES,
    CORE_MAPS,
    LAYOUTS,
    MAPS,
    NORMALIZATIONS,
    OWN_FORMULA,
    RULES,
    Layout,
    assert_gradients_equal_the_oracle,
    call,
    cotangent,
    draw,
    expect,
    features,
    fresh_state,
    gradients,
    largest_log,
    log_query_factor,
    make_map,
    rule_for,
    step_through,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_equal_the_oracle(case):
    phi, inputs, result, wanted, truth = expected(case.map, case.rule, case.normalize, case.layout)
    assert not result.undefined.all()
    output = call(phi, inputs, normalize=case.normalize, backend=case.backend)
    assert_outputs_close(output, result, torch.float64)
    assert_gradients_equal_the_oracle(output, result, wanted, truth=truth)


@functools.lru_cache(maxsize=1)
def expected(name, rule, normalize, layout):
    """What the oracle says: the slowest part, and the same for every backend, which come in a row."""
    phi = make_map(name)
    inputs = draw(name, rule, layout, normalize=normalize)
    if LAYOUTS[layout].n > 100:  # shorter layouts have several sequences; here the oracle's time counts
        inputs = inputs.heads(slice(None), slice(None), slice(1))
    inputs = inputs.requires_grad()
    result = expect(name, phi, inputs, normalize=normalize)
    wanted = inputs.leaves() | {n: p for n, p in phi.named_parameters() if p.requires_grad}
    truth = gradients(result.output, cotangent(result.output, result.undefined), wanted)
    return phi, inputs, result, wanted, truth


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["causal", "window", "padded-causal", "padded-window"])
@pytest.mark.parametrize("name", MAPS)
def test_steps_equal_the_oracle(name, layout, backend):
    rule = rule_for(MAPS.index(name) + list(LAYOUTS).index(layout), layout)
    normalize = NORMALIZATIONS[MAPS.index(name) // 3 % len(NORMALIZATIONS)]
    phi = make_map(name)
    inputs = draw(name, rule, layout, normalize=normalize).rows(0, 40)
    with torch.no_grad():
        result = expect(name, phi, inputs, normalize=normalize)
        stepped, state = step_through(phi, inputs, normalize=normalize, backend=backend)
        assert_outputs_close(stepped, result, torch.float64)
        _, whole = call(phi, inputs, normalize=normalize, backend=backend, return_state=True)
    assert torch.equal(state.length, whole.length)
    if layout == "causal":
        S, z = oracle.final_state(
            features(name, phi, inputs.key, "key"),
            inputs.value,
            log_decay=inputs.log_decay,
            beta=inputs.beta,
            normalize=normalize,
        )
        factor = 1.0 if state.log_scale is None else state.log_scale.exp()
        assert_same(state.S * (factor if state.log_scale is None else factor[..., None]), S, torch.float64)
        if state.z is not None:
            assert_same(state.z * factor, z, torch.float64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CORE_MAPS)
def test_gradients_through_steps_equal_the_oracle(name, rule):
    phi = make_map(name)
    inputs = draw(name, rule, Layout(12, causal=True)).requires_grad()
    result = expect(name, phi, inputs)
    output, _ = step_through(phi, inputs)
    assert_outputs_close(output, result, torch.float64)
    assert_gradients_equal_the_oracle(output, result, inputs.leaves())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_lower_precision_stays_within_its_budget(name, dtype, backend):
    rule = rule_for(MAPS.index(name), "causal")
    inputs = draw(name, rule, Layout(200, causal=True)).heads(slice(None), slice(None), slice(1))
    inputs = inputs.to(dtype).requires_grad()
    phi, exact = make_map(name, torch.float32), make_map(name)
    result = expect(name, exact, inputs)
    output = call(phi, inputs, backend=backend)
    assert output.dtype == dtype
    logs = largest_log(name, exact, inputs)
    assert_outputs_close(output, result, dtype, logs)
    assert_gradients_equal_the_oracle(output, result, inputs.leaves(), dtype=dtype, logs=logs)


@pytest.mark.parametrize("n", [63, 64, 65, 127, 128, 129, 1025, 2100])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("elu+1", "sum"), ("favor+", "decay-token"), ("elu+1", "decay-feature"),
        ("elu+1", "delta"), ("favor+", "gated-delta-token"), ("elu+1", "gated-delta-feature"),
    ],
)  # fmt: skip
def test_chunk_and_segment_boundaries(name, rule, n):
    """Against the recurrence in float64, gradients included, at lengths around chunks and segments."""
    phi = make_map(name)
    inputs = draw(name, rule, Layout(n, causal=True), seed=n).requires_grad()
    output, state = call(phi, inputs, backend="torch", return_state=True)
    weight = cotangent(output, output[..., 0].isnan())
    got = gradients(output, weight, inputs.leaves())
    truth_output, truth_S, truth_z = recurrence(name, phi, inputs)
    assert_same(output, truth_output, torch.float64, what="output")
    truth = gradients(truth_output, weight, inputs.leaves())
    for leaf, gradient in got.items():
        assert_gradients_close(gradient, truth[leaf], torch.float64, 0.0, 1.0, leaf)
    factor = torch.ones_like(truth_z) if state.log_scale is None else state.log_scale.exp()
    assert_same(state.S * factor[..., None], truth_S, torch.float64, what="S")
    if state.z is not None:
        assert_same(state.z * factor, truth_z, torch.float64, what="z")


def recurrence(name, phi, inputs):
    """The recurrence in float64, written over tokens with plain autograd (norms are mild here).

    Attention normalization for the additive rules, sum normalization for the delta rules.
    """
    query, key = (features(name, phi, x, role) for x, role in ((inputs.query, "query"), (inputs.key, "key")))
    if inputs.beta is not None:
        query, key = oracle.sum_normalized(query)[0], oracle.sum_normalized(key)[0]
    query, key = query.value(), key.value()
    groups = query.shape[1] // key.shape[1]
    gate = oracle.decay_to(inputs.log_decay, *key.shape[:3], like=key).exp()
    S = key.new_zeros(*key.shape[:2], key.shape[-1], inputs.value.shape[-1])
    z = key.new_zeros(*key.shape[:2], key.shape[-1])
    rows = []
    for t in range(key.shape[2]):
        k, v, g = key[:, :, t], inputs.value[:, :, t], gate[:, :, t]
        S, z = g[..., None] * S, g * z + k
        if inputs.beta is not None:
            v = inputs.beta[:, :, t, None] * (v - (S * k[..., None]).sum(-2))
        S = S + k[..., :, None] * v[..., None, :]
        q = query[:, :, t].unflatten(1, (-1, groups))
        row = q @ S
        rows.append((row if inputs.beta is not None else row / (q @ z[..., None])).flatten(1, 2))
    return torch.stack(rows, 2), S.detach(), z.detach()


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("layout", [y for y in LAYOUTS if LAYOUTS[y].cu_seqlens is None])
@pytest.mark.parametrize("name", ["favor+", "identity", "calibrated favor+"])
def test_attention_matrix_holds_the_weights(name, layout, normalize):
    rule = rule_for(list(LAYOUTS).index(layout) + len(name), layout)
    phi = make_map(name)
    inputs = draw(name, rule, layout, normalize=normalize)
    result = expect(name, phi, inputs, normalize=normalize)
    options = inputs.options() | {"rule": inputs.rule(), "normalize": normalize}
    weights = reassoc.attention_matrix(inputs.query, inputs.key, phi, **options)
    assert weights.shape == result.weights.shape
    assert_same(weights, result.weights, torch.float64, factor=max(1.0, float(result.spread.max())))


def test_attention_matrix_rows_are_a_part_of_the_whole():
    phi = make_map("favor+")
    inputs = draw("favor+", "decay-token", "causal")
    options = {"rule": inputs.rule(), "causal": True}
    whole = reassoc.attention_matrix(inputs.query, inputs.key, phi, **options)
    part = reassoc.attention_matrix(inputs.query, inputs.key, phi, rows=slice(10, 20), **options)
    assert_same(part, whole[:, :, 10:20], torch.float64)


@pytest.mark.parametrize("name", [m for m in MAPS if not m.startswith("calibrated")])
def test_symmetric_maps_are_called_as_they_are(name):
    """phi(x) is the whole feature: the key's, and the query's with its dropped factor put back."""
    phi = make_map(name)
    heads = G_of(phi)
    x = draw(name, "sum", "causal").key
    try:
        whole = phi(x)
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        pytest.skip("not a symmetric map")
    assert whole.shape == (*x.shape[:-1], phi.feature_dim)
    assert_same(whole, phi.key(x), torch.float64)
    factor = log_query_factor(phi, x) if hasattr(phi, "log_query_factor") else torch.zeros_like(x[..., 0])
    assert_same(whole, phi.query(x) * factor.exp()[..., None], torch.float64)
    if phi.nonnegative:
        assert (whole >= 0).all()
    assert heads in (None, x.shape[1])


def G_of(phi):
    return getattr(phi, "heads", None)


@pytest.mark.parametrize("name", [m for m in MAPS if m in OWN_FORMULA])
def test_map_values_equal_their_own_formula(name):
    """The same kernel in the same size (the order of features is free)."""
    phi = make_map(name)
    x, y = (
        draw(name, "sum", "causal").key.flatten(0, 2)[:40],
        draw(name, "sum", "causal", seed=1).key.flatten(0, 2)[:30],
    )
    own_x, own_y = OWN_FORMULA[name](x).value(), OWN_FORMULA[name](y).value()
    assert phi.feature_dim == own_x.shape[-1]
    assert_same(phi(x) @ phi(y).T, own_x @ own_y.T, torch.float64)
    assert_same(phi(x).sum(-1), own_x.sum(-1), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_elu_keeps_its_tail(dtype):
    """exp(x) below zero keeps its relative precision: ELU(x) + 1 computed as a sum would round it to zero."""
    x = torch.tensor([-0.5, -3.0, -8.0, -9.5])
    got = reassoc.linear_attention(
        torch.ones(1, 1, 1, 1, dtype=dtype),
        x.to(dtype).view(1, 1, 4, 1),
        torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=dtype).view(1, 1, 4, 1),
        "elu+1",
    )
    weights = x.to(dtype).double().exp()
    want = weights[2:].sum() / weights.sum()
    assert abs(got.double().item() / want.item() - 1) < {torch.float32: 1e-5}.get(dtype, 1e-2)


@pytest.mark.parametrize("name", MAPS)
def test_a_fresh_state_is_empty(name):
    inputs = draw(name, "sum", "causal")
    phi = make_map(name)
    state = fresh_state(phi, inputs)
    r, e = phi.feature_dim, inputs.value.shape[-1]
    assert state.S.shape == (*inputs.key.shape[:2], r, e)
    assert not state.S.any()
    assert state.z.shape == state.S.shape[:-1]
    assert not state.length.any()
