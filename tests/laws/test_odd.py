"""Laws 12 and 13: odd sizes, strides, subsets of gradients, low precision, autocast, torch.compile."""

import dataclasses
import itertools

import pytest
import torch

import reassoc
from laws.budgets import assert_gradients_close, assert_outputs_close, assert_same
from laws.suite import (
    BACKENDS,
    CORE_MAPS,
    MAPS,
    Layout,
    assert_gradients_equal_the_oracle,
    assert_gradients_same,
    call,
    cotangent,
    draw,
    expect,
    gradients,
    make_map,
    rule_for,
)
from reassoc import rules


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 61, 97, 191])
@pytest.mark.parametrize("name", CORE_MAPS)
def test_odd_lengths(name, n, causal, backend):
    layout = Layout(n, causal=causal)
    rule = rule_for(n + CORE_MAPS.index(name), layout)
    phi = make_map(name)
    inputs = draw(name, rule, layout).requires_grad()
    output, state = call(phi, inputs, backend=backend, return_state=True)
    assert output.shape == (2, 4, n, 3)
    assert state.length.tolist() == [n, n]
    if n == 0:
        assert not state.S.any()
        torch.autograd.grad(output.sum(), list(inputs.leaves().values()), allow_unused=True)
        return
    result = expect(name, phi, inputs)
    assert_outputs_close(output, result, torch.float64)
    assert_gradients_equal_the_oracle(output, result, inputs.leaves(), stretch=10.0)


def test_no_queries_and_no_batch():
    x = torch.ones(2, 2, 3, 4)
    assert reassoc.linear_attention(x[:, :, :0], x, x, "elu+1").shape == (2, 2, 0, 4)
    assert reassoc.linear_attention(x[:0], x[:0], x[:0], "elu+1", causal=True).shape == (0, 2, 3, 4)
    assert reassoc.linear_attention(x, x, x[..., :0], "elu+1", causal=True).shape == (2, 2, 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"), [("elu+1", "sum"), ("favor+", "decay-token"), ("elu+1", "gated-delta-token")]
)
def test_beyond_65536_tokens(name, rule):
    """70,001 causal tokens in float32, values and gradients, against the float64 call in pieces."""
    n = 70_001
    phi, exact = make_map(name, torch.float32), make_map(name)
    inputs = draw(name, rule, Layout(n, causal=True))
    inputs = inputs.heads(slice(2), slice(1), slice(1)).to(torch.float32).requires_grad()
    output = call(phi, inputs)
    double = inputs.to(torch.float64).requires_grad()
    state, rows = None, []
    for start in range(0, n, 10_007):
        row, state = call(exact, double.rows(start, min(n, start + 10_007)), state=state, return_state=True)
        rows.append(row)
    want = torch.cat(rows, 2)
    assert (output.double() - want).abs().max() <= 1e-4 * want.abs().max()
    weight = cotangent(want, want[..., 0].isnan())
    weight[:, :, :-50] = 0
    weight[:, :, ::9001] = 1.0
    truth = gradients(want, weight, double.leaves())
    for leaf, gradient in gradients(output, weight, inputs.leaves()).items():
        error = (gradient.double() - truth[leaf]).abs().max()
        assert error <= 1e-4 * truth[leaf].abs().max(), leaf


# ------------------------------------------------------------------------------------- memory layout


def strided(tensor):
    """The same numbers as (B, N, H, d) in memory, every second element of the last dimension."""
    wide = torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1).flatten(-2)
    return wide.transpose(1, 2).contiguous().transpose(1, 2)[..., ::2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["causal", "full", "window"])
@pytest.mark.parametrize("name", CORE_MAPS)
def test_non_contiguous_inputs_and_gradients(name, layout, backend):
    rule = rule_for(2 * CORE_MAPS.index(name) + 1, layout)
    phi = make_map(name)
    inputs = draw(name, rule, layout).requires_grad()
    want = call(phi, inputs, backend=backend)
    odd = dataclasses.replace(
        inputs, **{leaf: strided(getattr(inputs, leaf)) for leaf in ("query", "key", "value")}
    )
    assert not odd.key.is_contiguous()
    got = call(phi, odd, backend=backend)
    assert_same(got, want, torch.float64)
    weight = cotangent(want, want[..., 0].isnan())
    truth = gradients(want, weight, inputs.leaves())
    for leaf, gradient in gradients(got, strided(weight), inputs.leaves()).items():
        assert_gradients_close(gradient, truth[leaf], torch.float64, what=leaf)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["sum", "decay-token", "gated-delta-token"])
@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_expanded_inputs_and_gradients(name, rule, backend):
    """Broadcast heads and rows share memory, and so may an incoming gradient: `output.sum()` expands one."""
    phi = make_map(name)
    base = draw(name, rule, Layout(70, causal=True))
    leaves = {leaf: t[:1, :1].detach().requires_grad_() for leaf, t in base.leaves().items()}
    sizes = {"query": (2, 4)} | dict.fromkeys(["key", "value", "log_decay", "beta"], (2, 2))

    def build(expand):
        made = {}
        for leaf, t in leaves.items():
            wide = t.expand(*sizes[leaf], *t.shape[2:])
            made[leaf] = wide if expand else wide.contiguous()
        return dataclasses.replace(base, **made)

    results = []
    for expand in (True, False):
        output = call(phi, build(expand), backend=backend)
        total = output.sum() if expand else (output * torch.ones_like(output)).sum()
        results.append((output, torch.autograd.grad(total, list(leaves.values()))))
    assert_same(results[0][0], results[1][0], torch.float64)
    for leaf, a, b in zip(leaves, results[0][1], results[1][1], strict=True):
        assert_gradients_close(a, b, torch.float64, what=leaf)


def test_inputs_are_left_alone():
    """Neither inputs nor the incoming gradient are written to."""
    phi = make_map("favor+")
    inputs = draw("favor+", "decay-feature", "padded-causal").requires_grad()
    before = {leaf: t.detach().clone() for leaf, t in inputs.leaves().items()}
    output = call(phi, inputs, undefined="zero")
    weight = torch.ones_like(output)
    torch.autograd.grad(output, list(inputs.leaves().values()), weight)
    for leaf, t in inputs.leaves().items():
        assert torch.equal(t, before[leaf]), leaf
    assert weight.eq(1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rule", "layout", "only"),
    [
        (rule, layout, only)
        for rule, layouts in (
            ("decay-token", ("causal", "full", "window")),
            ("gated-delta-token", ("causal",)),
        )
        for layout in layouts
        for count in (1, 2, 3)
        for only in itertools.combinations(draw("favor+", rule, layout).leaves(), count)
    ],
)
def test_gradients_of_any_subset(rule, only, layout, backend):
    phi = make_map("favor+")
    inputs = draw("favor+", rule, layout)
    full = inputs.requires_grad()
    want = call(phi, full, backend=backend)
    weight = cotangent(want, want[..., 0].isnan())
    truth = gradients(want, weight, full.leaves())
    some = inputs.requires_grad(only)
    output = call(phi, some, backend=backend)
    assert output.requires_grad
    output.backward(weight)
    for leaf, tensor in some.leaves().items():
        if leaf in only:
            assert_gradients_close(tensor.grad, truth[leaf], torch.float64, what=leaf)
        else:
            assert tensor.grad is None
    frozen = call(phi, inputs.requires_grad(()), backend=backend)
    assert not frozen.requires_grad


def test_no_graph_is_kept_without_gradients():
    inputs = draw("elu+1", "decay-token", "causal").requires_grad()
    with torch.no_grad():
        output, state = call("elu+1", inputs, return_state=True)
    assert not output.requires_grad
    assert not state.S.requires_grad
    with torch.inference_mode():
        assert_same(call("elu+1", inputs), output, torch.float64)


def test_a_graph_can_be_walked_twice():
    inputs = draw("elu+1", "decay-token", "causal").requires_grad()
    output = call("elu+1", inputs).sum()
    first = torch.autograd.grad(output, inputs.key, retain_graph=True)[0]
    second = torch.autograd.grad(output, inputs.key)[0]
    assert torch.equal(first, second)


@pytest.mark.parametrize("e", [1, 2, 17, 64])
@pytest.mark.parametrize("d", [1, 5, 33])
def test_value_size_is_free(d, e):
    """d != e, and sizes that no vector register divides."""
    generator = torch.Generator().manual_seed(d)
    q, k = (torch.randn(1, 2, 67, d, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, 2, 67, e, generator=generator, dtype=torch.float64)
    want = reassoc.linear_attention(q, k, v, "elu+1", causal=True, backend="reference")
    assert want.shape == (1, 2, 67, e)
    assert_same(reassoc.linear_attention(q, k, v, "elu+1", causal=True, backend="torch"), want, torch.float64)


# ------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_accumulated_in_float32(dtype):
    """4096 equal keys: a low-precision sum would stop growing."""
    q = torch.full((1, 1, 4096, 2), 0.5, dtype=dtype)
    v = torch.linspace(-1, 1, 4096).to(dtype).view(1, 1, 4096, 1)
    output = reassoc.linear_attention(q, q, v, "elu+1", causal=True)
    want = v.double().cumsum(2) / torch.arange(1, 4097).view(1, 1, -1, 1)
    assert (output.double() - want).abs().max() < 5e-3


@pytest.mark.parametrize("name", ["elu+1", "favor+", "hedgehog per head"])
def test_float32_maps_take_float64_inputs_and_back(name):
    inputs = draw(name, "sum", "causal")
    assert call(make_map(name, torch.float32), inputs).dtype == torch.float64
    low = inputs.to(torch.bfloat16)
    assert call(make_map(name, torch.float32), low).dtype == torch.bfloat16


def test_mixed_dtypes_are_refused_or_right():
    """Query decides the output's dtype; a library that cannot mix must say so."""
    inputs = draw("elu+1", "sum", "causal")
    mixed = dataclasses.replace(inputs, value=inputs.value.float())
    try:
        output = call("elu+1", mixed)
    except (ValueError, TypeError) as error:
        assert "dtype" in str(error)
    else:
        assert output.dtype == torch.float64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MAPS)
def test_autocast_changes_the_inputs_precision_only(name, backend):
    """Under autocast the state arithmetic stays in float32: float32 inputs keep their float32 budget."""
    rule = ["decay-token", "gated-delta-token"][MAPS.index(name) % 2]
    inputs = draw(name, rule, Layout(140, causal=True)).to(torch.float32).requires_grad()
    phi = make_map(name, torch.float32)
    want = call(phi, inputs, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(phi, inputs, backend=backend)
    result = expect(name, make_map(name), inputs)
    weight = cotangent(result.output, result.undefined)
    found = gradients(output, weight, inputs.leaves())
    assert all(g.isfinite().all() for g in found.values())
    undefined = want.isnan()
    error = (output.double() - want.double()).abs()[~undefined]
    size = result.scale[~undefined]
    assert (error <= 1e-2 * size).all()


def test_autocast_keeps_exponentials_exact():
    """bfloat16 projections of large inputs would be off by whole units in the exponent."""
    inputs = draw("favor+", "sum", Layout(100, causal=True), norm=8.0).to(torch.float32)
    phi = make_map("favor+", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(phi, inputs)
    result = expect("favor+", make_map("favor+"), inputs)
    assert_outputs_close(output.to(torch.float32), result, torch.bfloat16)


# ------------------------------------------------------------------------------------- compile


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "rule", "options"),
    [
        ("elu+1", "sum", {"causal": True}),
        ("favor+", "decay-token", {"causal": True}),
        ("favor+", "sum", {"causal": False}),
        ("elu+1", "decay-head", {"causal": True, "window": 9}),
        ("favor+", "delta", {"causal": True, "normalize": "sum"}),
        ("elu+1", "gated-delta-feature", {"causal": True, "normalize": "sum+attention"}),
    ],
)
def test_compile_gives_the_same(name, rule, options):
    """fullgraph, values and gradients."""
    torch._dynamo.reset()
    phi = make_map(name, torch.float32)
    inputs = draw(name, rule, Layout(130, causal=True)).to(torch.float32).requires_grad()

    def attend(query, key, value, gate, beta):
        if beta is not None:
            rule = rules.Delta(beta) if gate is None else rules.GatedDelta(beta, gate)
        else:
            rule = rules.Sum() if gate is None else rules.Decay(gate)
        return reassoc.linear_attention(query, key, value, phi, rule=rule, **options)

    arguments = (inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta)
    want = attend(*arguments)
    got = torch.compile(attend, fullgraph=True)(*arguments)
    assert_same(got, want, torch.float32)
    assert_gradients_same(got, want, inputs.leaves(), torch.float32)
