"""The native backend as Python sees it: an operator, compilers, threads, refusals, odd inputs.

That it computes the right thing is the law suite's business (tests/laws). Here is what the laws cannot see:
how a call reaches the library, and what the library asks of tensors.
"""

import concurrent.futures
import dataclasses
import importlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import reassoc
from laws.budgets import assert_gradients_close, assert_same
from laws.suite import RULES, Layout, call, cotangent, draw, gradients, make_map, true_sums
from reassoc import kernels, rules
from reassoc.kernels import _library

pytestmark = pytest.mark.skipif(_library.library() is None, reason=f"native library: {_library.reason()}")
CAUSAL = Layout(70, causal=True)


def whole(phi, inputs, *, weight=None, backend="native", attend=reassoc.linear_attention, **more):
    """Output, S and z of a call, and the gradients of a random weighting of all of them.

    The sums are those of the state at its true scale; rows without a value carry no weight.
    """
    options = inputs.options() | {"undefined": "zero"} | more
    normalize = inputs.normalize(options.pop("normalize", None))
    output, state = attend(
        inputs.query, inputs.key, inputs.value, phi, rule=inputs.rule(), normalize=normalize,
        backend=backend, return_state=True, **options,
    )  # fmt: skip
    factor = 1.0 if state.log_scale is None else state.log_scale.exp()[..., None]
    parts = [output, state.S * factor]
    if state.z is not None:
        parts.append(state.z * (factor if state.log_scale is None else factor[..., 0]))
    wanted = {name: t for name, t in inputs.leaves().items() if t.requires_grad}
    if not wanted:
        return parts, {}
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in parts]
    weights[0] = weights[0] if weight is None else weight
    total = sum((part * w.to(part.dtype)).sum() for part, w in zip(parts, weights, strict=True))
    return parts, gradients(total, torch.ones(()), wanted)


def assert_equal_results(got, want, dtype):
    """What `whole` returns, twice."""
    for part, (mine, other) in enumerate(zip(got[0], want[0], strict=True)):
        assert_same(mine, other, dtype, what=("output", "S", "z")[part])
    for name, gradient in want[1].items():
        assert got[1][name].dtype == gradient.dtype
        assert_gradients_close(got[1][name], gradient, dtype, what=name)


# ---------------------------------------------------------------------------------------------------------
# The operator
# ---------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Keeps the calls of the library's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.name() in ("reassoc::native", "reassoc::native_backward"):
            self.calls.append((function, arguments))
        return function(*arguments, **(named or {}))


def leaves(arguments, watched):
    """The same arguments, their tensors cut off from any graph."""
    if isinstance(arguments, (list, tuple)):
        return [leaves(part, watched) for part in arguments]
    if not isinstance(arguments, torch.Tensor):
        return arguments
    return arguments.detach().requires_grad_(watched and arguments.requires_grad)


OPERATOR = {
    "sum": ("elu+1", "sum", "full", {}),
    "decay": ("elu+1", "decay-token", "causal", {}),
    "decay per feature, masked": ("relu", "decay-feature", "padded-causal", {}),
    "logarithms": ("favor+", "decay-token", "causal", {}),
    "delta": ("identity", "delta", "causal", {"normalize": "none"}),
    "gated delta, masked": ("elu+1", "gated-delta-feature", "padded-causal", {"normalize": "sum+attention"}),
    "packed": ("elu+1", "decay-head", "packed-causal", {}),
    "carried state": ("favor+", "sum", "causal", {"carried": True}),
    "bfloat16": ("elu+1", "sum", "causal", {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("name", OPERATOR)
def test_operators_keep_the_rules_of_custom_operators(name):
    """Schema, shapes for compilers, registration for autograd, compiled with shapes that vary."""
    feature_map, rule, layout, options = OPERATOR[name]
    dtype = options.get("dtype", torch.float32)
    phi = make_map(feature_map, torch.float32)
    inputs = draw(feature_map, rule, layout, normalize=options.get("normalize")).to(dtype).requires_grad()
    more = {"normalize": options.get("normalize")}
    if "carried" in options:
        more["state"] = call(phi, inputs, return_state=True)[1]
    with Recorder() as recorder:
        whole(phi, inputs, **more)
    calls = {function.name(): (function, arguments) for function, arguments in recorder.calls}
    function, arguments = calls["reassoc::native"]
    assert sum(isinstance(t, torch.Tensor) and t.requires_grad for t in arguments) >= 3
    torch.library.opcheck(function, leaves(arguments, True))
    function, arguments = calls["reassoc::native_backward"]
    torch.library.opcheck(function, leaves(arguments, False))


def entered(function):
    """Which operators of the library ran."""
    with torch.autograd.profiler.profile() as profile:
        function()
    return {event.name for event in profile.function_events if event.name.startswith("reassoc::")}


@pytest.mark.parametrize("rule", ["sum", "gated-delta-token"])
def test_the_operator_is_entered_only_where_gradients_are_wanted(rule):
    """It costs tens of microseconds, many times what a short call takes."""
    inputs = draw("elu+1", rule, CAUSAL)
    watched = inputs.requires_grad()
    assert not entered(lambda: call("elu+1", inputs))
    with torch.no_grad():
        assert not entered(lambda: call("elu+1", watched))
    assert "reassoc::native" in entered(lambda: call("elu+1", watched))
    both = entered(lambda: call("elu+1", watched).sum().backward())
    assert {"reassoc::native", "reassoc::native_backward"} <= both


@pytest.mark.parametrize("grad", [False, True])
def test_shapes_without_data(grad):
    """What only knows shapes gets shapes; nobody reads memory that is not there."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 9, 4, requires_grad=grad) for heads in (4, 2, 2))
        output, state = reassoc.linear_attention(q, k, v, causal=True, return_state=True)
        assert output.shape == (2, 4, 9, 4) and state.S.shape == (2, 2, 4, 4)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_trace_holds_the_operator(mode):
    inputs = draw("elu+1", "sum", CAUSAL)
    arguments = (inputs.query, inputs.key, inputs.value)

    def attend(q, k, v):
        return reassoc.linear_attention(q, k, v, "elu+1", causal=True)

    graph = make_fx(attend, tracing_mode=mode)(*arguments)
    other = tuple(t + 0.25 for t in arguments)
    assert_same(graph(*other), attend(*other), torch.float64)


class Own(torch.Tensor):
    """A subclass that changes nothing."""


# Tensors whose memory does not hold their numbers, or that are more than their memory.
LAZY = {
    "negated": lambda t: torch._neg_view(-t),
    "imaginary part of a conjugate": lambda t: torch.complex(t, -t).conj().imag,
    "a subclass": lambda t: t.as_subclass(Own),
}


@pytest.mark.parametrize("how", LAZY)
def test_tensors_that_are_not_what_their_memory_says(how):
    inputs = draw("elu+1", "decay-feature", CAUSAL)
    lazy = {name: LAZY[how](t) for name, t in inputs.leaves().items()}
    for name, t in lazy.items():
        assert torch.equal(t, getattr(inputs, name))
    want = call("elu+1", inputs)
    assert_same(call("elu+1", dataclasses.replace(inputs, **lazy)), want, torch.float64)
    one = dataclasses.replace(inputs, **{name: t[:, :, :, :1] for name, t in inputs.leaves().items()})
    lazy = {name: t[:, :, :, :1] for name, t in lazy.items()}
    assert_same(call("elu+1", dataclasses.replace(one, **lazy)), call("elu+1", one), torch.float64)


# ---------------------------------------------------------------------------------------------------------
# Compilers
# ---------------------------------------------------------------------------------------------------------


class Counting:
    """A compiler that keeps the graphs it is given and runs them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, examples):
        self.graphs.append(graph)
        return graph.forward

    def operators(self):
        return {str(node.target) for graph in self.graphs for node in graph.graph.nodes}


COMPILED = [
    ("elu+1", "sum", "full", "attention"),
    ("favor+", "decay-token", "padded-causal", "attention"),
    ("relu", "decay-head", "packed-causal", "sum+attention"),
    ("identity", "delta", "causal", "none"),
    ("elu+1", "gated-delta-feature", "padded-causal", "sum"),
]


def attention_of(phi, inputs, normalize, backend):
    """A call as a function of its leaves, output and memory of the state, and those leaves."""
    layout = inputs.options()

    def attend(leaves):
        output, state = reassoc.linear_attention(
            leaves["query"], leaves["key"], leaves["value"], phi,
            rule=dataclasses.replace(inputs, **leaves).rule(), normalize=normalize, return_state=True,
            undefined="zero", backend=backend, **layout,
        )  # fmt: skip
        return output, state.S

    return attend, inputs.leaves()


def weighted(parts):
    generator = torch.Generator().manual_seed(3)
    return sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in parts)


def assert_compiled_alike(attend, compiled, leaves):
    want, got = attend(leaves), compiled(leaves)
    for mine, other, what in zip(got, want, ("output", "S"), strict=True):
        assert_same(mine, other, torch.float32, what=what)
    truth = gradients(weighted(want), torch.ones(()), leaves)
    for name, gradient in gradients(weighted(got), torch.ones(()), leaves).items():
        assert_gradients_close(gradient, truth[name], torch.float32, what=name)


@pytest.mark.parametrize("backend", ["native", "auto"])
@pytest.mark.parametrize("case", COMPILED, ids="/".join)
def test_compiled_whole(case, backend):
    """In one graph, forward and backward, and that graph calls the library."""
    feature_map, rule, layout, normalize = case
    torch._dynamo.reset()
    inputs = draw(feature_map, rule, layout, normalize=normalize).to(torch.float32).requires_grad()
    attend, leaves = attention_of(make_map(feature_map, torch.float32), inputs, normalize, backend)
    counting = Counting()
    torch.compile(attend, fullgraph=True, backend=counting)(leaves)
    assert len(counting.graphs) == 1 and any("reassoc.native" in name for name in counting.operators())
    torch._dynamo.reset()
    assert_compiled_alike(attend, torch.compile(attend, fullgraph=True, backend="aot_eager"), leaves)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="inductor needs a C++ compiler")
def test_compiled_by_inductor():
    torch._dynamo.reset()
    inputs = draw("elu+1", "decay-token", CAUSAL).to(torch.float32).requires_grad()
    attend, leaves = attention_of(make_map("elu+1", torch.float32), inputs, "attention", "native")
    assert_compiled_alike(attend, torch.compile(attend, fullgraph=True), leaves)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("rule", "normalize"), [("decay-token", "attention"), ("gated-delta-token", "sum")])
def test_no_length_is_compiled_anew(rule, normalize, grad):
    torch._dynamo.reset()
    counting = Counting()
    compiled = None
    for length in (65, 130, 7, 200):
        inputs = draw("elu+1", rule, Layout(length, causal=True), normalize=normalize, seed=length)
        inputs = inputs.to(torch.float32)
        inputs = inputs.requires_grad() if grad else inputs

        def attend(query, key, value, gate, beta):
            rule = rules.Decay(gate) if beta is None else rules.GatedDelta(beta, gate)
            return reassoc.linear_attention(
                query, key, value, "elu+1", rule=rule, normalize=normalize, causal=True, backend="native"
            )

        arguments = (inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta)
        compiled = compiled or torch.compile(attend, fullgraph=True, dynamic=True, backend=counting)
        assert_same(compiled(*arguments), attend(*arguments), torch.float32)
    assert len(counting.graphs) <= 2


# ---------------------------------------------------------------------------------------------------------
# Threads
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    """Sets their number, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


LONG = 8 * 64 * 3 + 37  # with three threads and one head the sequence is still worth splitting
THREADED = {
    # name: map, rule, causal, N, query heads, key heads, batch, value size, state carried
    "split": ("elu+1", "sum", True, LONG, 2, 1, 1, 5, True),
    "split, all queries read one state": ("elu+1", "decay-token", False, LONG, 1, 1, 1, 5, False),
    "split, decay per feature": ("elu+1", "decay-feature", True, LONG, 1, 1, 1, 5, True),
    "split, logarithms": ("favor+", "decay-token", True, LONG, 1, 1, 1, 5, True),
    "delta, split over columns": ("elu+1", "delta", True, 150, 2, 1, 1, 67, True),
    "gated delta, split over columns": ("elu+1", "gated-delta-feature", True, 150, 1, 1, 1, 33, False),
    "more heads than threads": ("elu+1", "decay-token", True, 150, 10, 5, 1, 7, False),
    "more rows than threads": ("favor+", "sum", False, 150, 2, 1, 5, 7, False),
}


def threaded_inputs(name):
    """Inputs with a mask, and a state before."""
    feature_map, rule, causal, n, heads, groups, batch, columns, carried = THREADED[name]
    phi = make_map(feature_map, torch.float32, heads=groups)
    one = draw(feature_map, rule, Layout(n, causal=causal))  # 2 rows of 4 and 2 heads, 3 columns
    generator = torch.Generator().manual_seed(4)

    def many(t, count):
        """Other heads and rows: those of `draw` again, in another order of tokens."""
        if t is None:
            return None
        parts = []
        for _ in range(batch * count):
            order = torch.randperm(n, generator=generator)
            parts.append(t[torch.randint(t.shape[0], (), generator=generator), 0][order])
        return torch.stack(parts).unflatten(0, (batch, count))

    value = torch.randn(batch, groups, n, columns, generator=generator, dtype=torch.float64)
    inputs = dataclasses.replace(
        one, query=many(one.query, heads), key=many(one.key, groups), value=value,
        log_decay=many(one.log_decay, groups), beta=many(one.beta, groups),
        key_mask=torch.rand(batch, n, generator=generator) < 0.9,
    ).to(torch.float32)  # fmt: skip
    state = call(phi, inputs, return_state=True, backend="torch")[1] if carried else None
    return phi, inputs.requires_grad(), {"state": state}


@pytest.mark.parametrize("name", THREADED)
def test_threads_change_rounding_only_and_a_run_repeats_bit_for_bit(name, threads):
    phi, inputs, more = threaded_inputs(name)
    found = {}
    for count in (1, 2, 3):
        threads(count)
        first, second = (whole(phi, inputs, **more) for _ in range(2))
        for mine, again in zip(
            (*first[0], *first[1].values()), (*second[0], *second[1].values()), strict=True
        ):
            assert torch.equal(mine, again), f"{count} threads"
        found[count] = first
        with torch.no_grad():
            direct = call(phi, inputs, undefined="zero", backend="native", **more)
        assert torch.equal(direct, first[0][0]), "without gradients"
    assert_equal_results(found[2], found[1], torch.float32)
    assert_equal_results(found[3], found[1], torch.float32)
    assert_equal_results(found[2], whole(phi, inputs, backend="torch", **more), torch.float32)


def test_calls_from_several_python_threads_at_once():
    """The library runs without the interpreter's lock."""
    every = [draw("elu+1", rule, CAUSAL, seed=i) for i, rule in enumerate(RULES * 4)]
    want = [call("elu+1", inputs) for inputs in every]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got, expected in zip(pool.map(lambda i: call("elu+1", i), every), want, strict=True):
            assert torch.equal(got, expected)


# ---------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------

UNSERVED = {
    "device": (torch.ones(1, 2, 5, 4, device="meta"), "it runs on the CPU.* on meta"),
    "dtype": (torch.ones(1, 2, 5, 4).to(torch.float8_e5m2), "it takes torch.float32, .*, not .*float8"),
}


@pytest.mark.parametrize("why", UNSERVED)
def test_named_it_refuses_what_it_cannot_serve(why):
    x, words = UNSERVED[why]
    message = rf"backend 'native' cannot serve this call: {words}.*Use 'auto' or 'torch'"
    with pytest.raises(ValueError, match=message):
        reassoc.linear_attention(x, x, x, causal=True, backend="native")
    assert kernels.choose("auto", x) == "torch"


def test_whole_numbers_are_refused():
    x = torch.ones(1, 2, 5, 4, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"query.*int64"):
        reassoc.linear_attention(x, x, x, backend="native")


def test_switched_off_by_the_environment():
    code = """
import json, torch, reassoc
x = torch.linspace(-1, 1, 560, dtype=torch.float64).view(1, 2, 70, 4)
output = reassoc.linear_attention(x, x, x, causal=True)
try:
    reassoc.linear_attention(x, x, x, causal=True, backend="native")
except ValueError as error:
    said = str(error)
print(json.dumps([reassoc.backends()["native"], said, output.tolist()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "REASSOC_NATIVE": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    why, said, output = json.loads(done.stdout)
    assert "REASSOC_NATIVE=0" in why and "unset" in why
    assert said == f"backend 'native' cannot serve this call: {why}. Use 'auto' or 'torch'"
    x = torch.linspace(-1, 1, 560, dtype=torch.float64).view(1, 2, 70, 4)
    want = reassoc.linear_attention(x, x, x, causal=True, backend="native")
    assert_same(torch.tensor(output, dtype=torch.float64), want, torch.float64)


def second_derivative(inputs, backend, through):
    output = call("elu+1", inputs, backend=backend)
    weight = torch.ones_like(output, requires_grad=True)
    wanted = {"key": inputs.key, "weight": weight}[through]
    [first] = torch.autograd.grad(output.square(), inputs.key, weight, create_graph=True)
    return torch.autograd.grad(first.square().sum(), wanted)[0]


@pytest.mark.parametrize("through", ["key", "weight"])
@pytest.mark.parametrize("rule", ["decay-token", "gated-delta-token"])
def test_second_derivatives_are_refused(rule, through):
    inputs = draw("elu+1", rule, Layout(9, causal=True)).requires_grad()
    with pytest.raises(RuntimeError, match="no second derivative"):
        second_derivative(inputs, "native", through)
    assert second_derivative(inputs, "torch", through).isfinite().all()


def by_forward_mode(attend, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return tuple(torch.autograd.forward_ad.unpack_dual(attend(dual)))


TRANSFORMS = {
    "vmap": lambda attend, x: torch.func.vmap(attend)(torch.stack([x, x + 1])),
    "grad": lambda attend, x: torch.func.grad(lambda y: attend(y).square().sum())(x),
    "jvp": lambda attend, x: torch.func.jvp(attend, (x,), (torch.ones_like(x),)),
    "jacrev": lambda attend, x: torch.func.jacrev(attend)(x),
    "jacfwd": lambda attend, x: torch.func.jacfwd(attend)(x),
    "hessian": lambda attend, x: torch.func.hessian(lambda y: attend(y).square().sum())(x),
    "gradients of each": lambda attend, x: torch.func.vmap(
        torch.func.grad(lambda y: attend(y).square().sum())
    )(torch.stack([x, x + 1])),
    "forward mode": by_forward_mode,
}


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, on first use
def test_transforms_of_functions(transform, which):
    """The torch backend serves them; the native one, named, refuses rather than lose a derivative."""
    inputs = draw("elu+1", "decay-token", Layout(6, causal=True)).heads(slice(2), slice(1), slice(1))

    def run(backend):
        def attend(x):
            return call("elu+1", dataclasses.replace(inputs, **{which: x}), backend=backend)

        found = TRANSFORMS[transform](attend, getattr(inputs, which))
        return found if isinstance(found, tuple) else (found,)

    for got, want in zip(run("auto"), run("torch"), strict=True):
        assert want.abs().sum() > 0
        assert_same(got, want, torch.float64)
    with pytest.raises(ValueError, match="backend 'native' cannot serve this call"):
        run("native")


def test_gradients_of_many_weightings_at_once_are_refused():
    inputs = draw("elu+1", "sum", Layout(6, causal=True)).requires_grad()
    output = call("elu+1", inputs)
    weights = torch.ones(2, *output.shape, dtype=output.dtype)
    with pytest.raises(RuntimeError, match="native_backward"):
        torch.autograd.grad(output, inputs.key, weights, is_grads_batched=True)


# ---------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------


def sliced(t):
    """Every second element along every axis of a larger tensor of other numbers."""
    other = math.nan if t.is_floating_point() else True
    larger = torch.full([2 * size + 1 for size in t.shape], other, dtype=t.dtype)
    view = larger[tuple(slice(1, None, 2) for _ in t.shape)]
    view.copy_(t)
    return view


STRIDES = {
    "one row and head for all": lambda t: (t[:1, :1] if t.ndim > 2 else t[:1]).expand(t.shape),
    "one position for all": lambda t: (t[:, :, :1] if t.ndim > 2 else t[:, :1]).expand(t.shape),
    "components far apart": lambda t: t.mT.contiguous().mT,
    "rows inside": lambda t: (
        t.transpose(0, -2).contiguous().transpose(0, -2) if t.ndim > 2 else t.mT.contiguous().mT
    ),
    "sliced": sliced,
}


@pytest.mark.parametrize("rule", ["decay-feature", "decay-head", "gated-delta-token"])
@pytest.mark.parametrize("strides", STRIDES)
def test_any_strides(strides, rule):
    """Of inputs, gates, mask and incoming gradient: as if they lay in memory one after another."""
    given = draw("elu+1", rule, "padded-causal").to(torch.float32)
    leaves = given.leaves() | {"key_mask": given.key_mask}
    if rule == "decay-head":
        del leaves["log_decay"]
    odd = {name: STRIDES[strides](t) for name, t in leaves.items()}
    weight = STRIDES[strides](torch.rand(given.query.shape[:3] + given.value.shape[-1:]))
    assert not any(t.is_contiguous() for t in (*odd.values(), weight))
    plain = dataclasses.replace(given, **{name: t.contiguous() for name, t in odd.items()})
    for t in odd.values():
        if t.is_floating_point():
            t.requires_grad_()
    given = dataclasses.replace(given, **odd)
    got = whole("elu+1", given, weight=weight)
    want = whole("elu+1", plain.requires_grad(tuple(odd)), weight=weight.contiguous())
    assert_equal_results(got, want, torch.float32)


@pytest.mark.parametrize("feature_map", ["elu+1", "favor+"])
def test_states_and_boundaries_of_any_strides(feature_map):
    phi = make_map(feature_map)
    inputs = draw(feature_map, "decay-token", "packed-causal")
    bounds = torch.tensor(inputs.layout.cu_seqlens)
    output, state = call(phi, inputs, return_state=True)
    output, after = call(phi, inputs, state=state, return_state=True)
    scale = state.log_scale
    odd = reassoc.AttentionState(
        sliced(state._memory), None if scale is None else sliced(scale), state.length, state.origin
    )
    for cu_seqlens in (bounds.int(), sliced(bounds), sliced(bounds.int())):
        got, got_after = call(phi, inputs, state=odd, cu_seqlens=cu_seqlens, return_state=True)
        assert_same(got, output, torch.float64)
        for mine, other in zip(true_sums(got_after), true_sums(after), strict=True):
            assert_same(mine, other, torch.float64)


@pytest.mark.parametrize(
    ("feature_map", "rule", "normalize"),
    [("favor+", "decay-feature", "attention"), ("elu+1", "gated-delta-feature", "sum+attention")],
)
def test_every_subset_of_gradients(feature_map, rule, normalize):
    """Those of a carried state too: here by way of the values that were written to it."""
    phi = make_map(feature_map)
    given, before = (draw(feature_map, rule, CAUSAL, normalize=normalize, seed=seed) for seed in (0, 1))
    names = [*given.leaves(), "state"]

    def run(only, backend):
        inputs, first = given.requires_grad(only), before.requires_grad(("value",) if "state" in only else ())
        _, state = call(phi, first, normalize=normalize, backend="torch", return_state=True)
        output, after = call(
            phi, inputs, normalize=normalize, state=state, backend=backend, return_state=True
        )
        assert output.requires_grad == bool(only)
        leaves = inputs.leaves() | {"state": first.value}
        wanted = {name: leaves[name] for name in only}
        return gradients(weighted([output, after.S]), torch.ones(()), wanted) if wanted else {}

    truth = run(tuple(names), "torch")
    for count in range(len(names) + 1):
        for only in itertools.combinations(names, count):
            for name, gradient in run(only, "native").items():
                assert_gradients_close(gradient, truth[name], torch.float64, what=f"{name} of {only}")


@pytest.mark.parametrize("normalize", ["attention", "none"])
@pytest.mark.parametrize("rule", ["sum", "decay-feature", "gated-delta-token"])
@pytest.mark.parametrize("feature_map", ["elu+1", "favor+"])
@pytest.mark.parametrize("layout", ["causal", "packed-causal"])
def test_gradients_of_the_final_state_alone(feature_map, rule, normalize, layout):
    phi = make_map(feature_map)
    found = []
    for backend in ("native", "torch"):
        inputs = draw(feature_map, rule, layout, normalize=normalize).requires_grad()
        _, state = call(phi, inputs, normalize=normalize, backend=backend, return_state=True)
        found.append(
            gradients(
                weighted([p for p in true_sums(state) if p is not None]), torch.ones(()), inputs.leaves()
            )
        )
    assert not found[0]["query"].any()
    for name, gradient in found[1].items():
        assert_gradients_close(found[0][name], gradient, torch.float64, what=name)


@pytest.mark.parametrize("gates", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", ["decay-token", "gated-delta-feature"])
def test_gates_of_another_dtype(rule, dtype, gates):
    """They are rounded to what sums are kept in; their gradients come in their own dtype."""
    inputs = draw("elu+1", rule, CAUSAL).to(dtype)
    others = {n: t.to(gates) for n, t in inputs.leaves().items() if n in ("log_decay", "beta")}
    inputs = dataclasses.replace(inputs, **others).requires_grad()
    got, want = (whole("elu+1", inputs, backend=backend) for backend in ("native", "torch"))
    assert got[0][0].dtype == dtype and got[0][1].dtype == torch.float32
    loosest = max(dtype, gates, key=lambda kind: torch.finfo(kind).eps)
    assert_equal_results(got, want, loosest)


@pytest.mark.parametrize("rule", ["sum", "decay-feature", "gated-delta-token"])
@pytest.mark.parametrize("layout", ["causal", "full"])
@pytest.mark.parametrize("width", [0, 1])
def test_values_of_no_width_and_of_one(width, layout, rule):
    if layout == "full" and rule == "gated-delta-token":
        pytest.skip("delta rules are causal")
    inputs = draw("elu+1", rule, layout, normalize="sum+attention")
    inputs = dataclasses.replace(inputs, value=inputs.value[..., :width]).requires_grad()
    got, want = (
        whole("elu+1", inputs, backend=backend, normalize="sum+attention") for backend in ("native", "torch")
    )
    assert got[0][0].shape[-1] == width
    assert_equal_results(got, want, torch.float64)


@pytest.mark.parametrize("rule", ["sum", "decay-feature", "delta", "gated-delta-token"])
@pytest.mark.parametrize("empty", ["batch", "tokens", "sequences"])
def test_nothing_to_do(empty, rule):
    """The state passes through, and gradients have the shapes of what they belong to."""
    phi = make_map("elu+1")
    _, state = call(phi, draw("elu+1", rule, CAUSAL), return_state=True)
    inputs = draw("elu+1", rule, CAUSAL).rows(0, 0) if empty != "batch" else draw("elu+1", rule, CAUSAL)
    options = {"state": state}
    if empty == "batch":
        inputs, options = inputs.heads(slice(None), slice(None), slice(0, 0)), {}
    elif empty == "sequences":
        inputs = inputs.heads(slice(None), slice(None), slice(1))
        options["cu_seqlens"] = torch.zeros(3, dtype=torch.int64)
    inputs = inputs.requires_grad()
    output, after = call(phi, inputs, backend="native", return_state=True, **options)
    assert output.shape == (*inputs.query.shape[:3], inputs.value.shape[-1])
    if empty != "batch":
        for mine, other in zip(true_sums(after), true_sums(state), strict=True):
            assert mine is other or torch.equal(mine, other)  # no z: None twice
        assert torch.equal(after.length, state.length)
    for name, gradient in gradients(weighted([output, after.S]), torch.ones(()), inputs.leaves()).items():
        assert gradient.shape == getattr(inputs, name).shape and not gradient.any()


@pytest.mark.parametrize("feature_map", ["elu+1", "favor+"])
@pytest.mark.parametrize("rule", ["sum", "decay-feature", "gated-delta-token"])
@pytest.mark.parametrize("causal", [True, False])
def test_all_keys_hidden(causal, rule, feature_map):
    """They may hold anything; what was carried is read as it is, and nothing comes back to them."""
    if not causal and rule == "gated-delta-token":
        pytest.skip("delta rules are causal")
    phi = make_map(feature_map)
    layout = Layout(70, causal=causal)
    inputs = draw(feature_map, rule, layout)
    _, state = call(
        phi, draw(feature_map, rule, layout, seed=1), normalize="sum+attention", return_state=True
    )
    hidden = {n: torch.full_like(t, math.nan) for n, t in inputs.leaves().items() if n != "query"}
    mask = torch.zeros(inputs.key.shape[0], 70, dtype=torch.bool)
    inputs = dataclasses.replace(inputs, **hidden, key_mask=mask).requires_grad()
    more = {"normalize": "sum+attention", "backend": "native", "return_state": True}
    nothing, _ = call(phi, inputs, **more)
    assert nothing.isnan().all()
    output, after = call(phi, inputs, state=state, **more)
    want = reassoc.read(inputs.query, phi, state)
    assert_same(output, want, torch.float64)
    assert torch.equal(after.S, state.S) and torch.equal(after.length, state.length)
    found = gradients(weighted([output, after.S]), torch.ones(()), inputs.leaves())
    truth = torch.autograd.grad(weighted([want, state.S]), inputs.query)[0]
    assert_gradients_close(found.pop("query"), truth, torch.float64, what="query")
    for name, gradient in found.items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_memory_of_a_long_call():
    """Beside outputs and gradients: one state for every 64 positions."""
    code = """
import json, sys, torch, reassoc
from reassoc import rules

def kilobytes(name):
    [line] = [l for l in open("/proc/self/status") if l.startswith(name + ":")]
    return int(line.split()[1])

def run(n, delta):
    q, k, v, w = (torch.randn(1, 1, n, 64) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    for t in (q, k, v):
        t.requires_grad_()
    rule = rules.Delta(torch.full((1, 1, n), 0.5)) if delta else rules.Sum()
    normalize = "none" if delta else "attention"
    before = kilobytes("VmRSS")
    options = {"rule": rule, "normalize": normalize, "causal": True, "backend": "native"}
    output = reassoc.linear_attention(q, k, v, "elu+1", **options)
    found = torch.autograd.grad(output, (q, k, v), w)
    return (kilobytes("VmHWM") - before) * 1024

delta = sys.argv[1] == "delta"
run(128, delta)
print(json.dumps(run(65536, delta)))
"""
    n, r, e, number = 65_536, 64, 64, 4
    output, found = n * (e + 1) * number, n * (r + r + e) * number  # denominators count as a column
    states = n // 64 * (r + 1) * (e + 2) * number  # with z and a scale
    slack = 8 << 20  # scratch of a chunk, the allocator's own rounding
    for rule in ("sum", "delta"):
        done = subprocess.run([sys.executable, "-c", code, rule], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) <= output + found + states + slack, rule


# ---------------------------------------------------------------------------------------------------------
# What is undefined
# ---------------------------------------------------------------------------------------------------------

UNDEFINED = [
    (feature_map, rule, normalize, eps)
    for feature_map in ("identity", "relu", "relu^2")
    for rule in ("sum", "delta")
    for normalize in ("attention", "sum", "sum+attention", "none")
    for eps in ((0.0, 1.0, -0.5) if "attention" in normalize else (0.0,))
]


def whole_numbers(rule, causal=True):
    """Features whose sums, and the halves and quarters of them, cancel exactly in any order of addition."""
    generator = torch.Generator().manual_seed(2)

    def small(*shape):
        return torch.randint(-1, 2, shape, generator=generator).double()

    inputs = draw("elu+1", rule, Layout(40, causal=causal))
    return dataclasses.replace(inputs, query=small(2, 4, 40, 2), key=small(2, 2, 40, 2)).requires_grad()


@pytest.mark.parametrize("undefined", ["nan", "zero"])
@pytest.mark.parametrize("case", UNDEFINED, ids=str)
def test_undefined_rows_and_their_gradients_are_those_of_the_torch_backend(case, undefined):
    feature_map, rule, normalize, eps = case
    for causal in (True,) if rule == "delta" else (True, False):
        inputs = whole_numbers(rule, causal)
        native, torch_ = (
            call(feature_map, inputs, normalize=normalize, eps=eps, undefined=undefined, backend=backend)
            for backend in ("native", "torch")
        )
        assert_same(native, torch_, torch.float64)
        if undefined == "nan" and feature_map == "identity" and "sum" in normalize:
            continue  # keys whose sum is zero are NaN themselves, and so is what passes by them
        weight = cotangent(torch_, torch_[..., 0].isnan())
        truth = gradients(torch_, weight, inputs.leaves())
        for name, gradient in gradients(native, weight, inputs.leaves()).items():
            assert_same(gradient, truth[name], torch.float64, what=name)


@pytest.mark.parametrize("case", UNDEFINED, ids=str)
def test_a_refused_row_is_named_alike(case):
    feature_map, rule, normalize, eps = case
    inputs = whole_numbers(rule)

    def said(backend):
        try:
            whole(feature_map, inputs, normalize=normalize, eps=eps, undefined="raise", backend=backend)
        except ValueError as error:
            return str(error)

    assert said("native") == said("torch")
    assert said("native") or normalize == "none" or eps


@pytest.mark.parametrize(
    "change",
    [
        {"key": torch.zeros(2, 2, 5, 3)}, {"value": torch.zeros(1, 2, 6, 4)},
        {"query": torch.zeros(1, 3, 6, 3)}, {"memory": torch.zeros(1, 2, 3, 4)},
        {"log_decay": torch.zeros(2, 2, 1, 1)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_tensors_that_do_not_fit_each_other_are_refused_before_an_address_is_taken(change):
    call = importlib.import_module("reassoc.kernels.native.call")
    x, v = torch.zeros(2, 2, 6, 3), torch.zeros(2, 2, 6, 4)
    options = call.Options(True, "identity", False, True, True, 0.0, 0.0, "float32")
    call.forward(call.Inputs(x, None, x, None, v, memory=torch.zeros(2, 2, 3, 5)), options)
    with pytest.raises(ValueError, match="shapes that do not fit each other"):
        call.forward(call.Inputs(x, None, x, None, v)._replace(**change), options)
