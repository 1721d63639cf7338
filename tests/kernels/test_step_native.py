"""Decode steps of the native backend: those of the causal call, and quick ones those that were checked."""

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
import tempfile

import pytest
import torch

import reassoc
from laws.budgets import STREAMED_FLOAT32, assert_same
from laws.suite import (
    NORMALIZATIONS,
    RULES,
    Layout,
    assert_states_same,
    call,
    draw,
    fresh_state,
    make_map,
    step_through,
    true_sums,
    vars_of,
)
from reassoc import AttentionState, _stream, rules
from reassoc.kernels import _library

pytestmark = pytest.mark.skipif(_library.library() is None, reason=f"native library: {_library.reason()}")
B, H, G, D, E = 2, 4, 2, 4, 3
TOKENS = Layout(40, causal=True)
MASKED = Layout(40, causal=True, masked=True)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def checked(monkeypatch):
    """One entry for every step that was checked in full."""
    steps = []

    def decode(*arguments):
        steps.append(arguments)
        return native(*arguments)

    native = _stream.decode
    monkeypatch.setattr(_stream, "decode", decode)
    return steps


# ---------------------------------------------------------------------------------------------------------
# Steps equal the causal call
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("feature_map", ["elu+1", "identity", "favor+", "exp", "relu^2"])
def test_steps_equal_the_causal_call(feature_map, rule, dtype):
    """Grouped heads and masked keys, after a prefix; sums and normalizations in turn."""
    normalize = NORMALIZATIONS[(RULES.index(rule) + len(feature_map)) % len(NORMALIZATIONS)]
    phi = make_map(feature_map, torch.promote_types(dtype, torch.float32))
    inputs = draw(feature_map, rule, MASKED, normalize=normalize).to(dtype)
    with torch.no_grad():
        whole, after = call(phi, inputs, normalize=normalize, backend="torch", return_state=True)
        _, state = call(phi, inputs.rows(0, 10), normalize=normalize, return_state=True)
        output, state = step_through(
            phi, inputs.rows(10, 40), state=state, normalize=normalize, backend="native"
        )
    assert output.dtype == dtype
    assert_same(output, whole[:, :, 10:], dtype)
    assert_states_same(state, after, dtype=torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 1), (6, 3)])
@pytest.mark.parametrize("columns", [1, 5, 16, 37, 70])
@pytest.mark.parametrize("rule", ["sum", "gated-delta-feature"])
def test_steps_of_any_size(rule, columns, heads, groups):
    """Value sizes that whole registers do not divide, with z as one column more."""
    inputs = draw("elu+1", rule, TOKENS, normalize="sum+attention")
    wide = torch.randn(B, groups, 40, columns, generator=torch.Generator().manual_seed(1)).double()

    def spread(t, count):
        return None if t is None else t.repeat_interleave(3, 1)[:, :count]

    inputs = dataclasses.replace(
        inputs, query=spread(inputs.query, heads), key=spread(inputs.key, groups), value=wide,
        log_decay=spread(inputs.log_decay, groups), beta=spread(inputs.beta, groups),
    )  # fmt: skip
    phi = make_map("elu+1", heads=groups)
    output, state = step_through(phi, inputs, normalize="sum+attention", backend="native")
    whole, after = call(phi, inputs, normalize="sum+attention", backend="torch", return_state=True)
    assert_same(output, whole, torch.float64)
    assert_states_same(state, after)


@pytest.mark.parametrize("backends", [("torch", "native"), ("native", "torch")], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_backends_take_over_each_other_s_states(rule, backends):
    inputs = draw("favor+", rule, TOKENS)
    phi = make_map("favor+")
    state, outputs = fresh_state(phi, inputs), []
    for t in range(40):
        now = inputs.rows(t, t + 1)
        output, state = step_through(phi, now, state=state, backend=backends[t // 3 % 2])
        outputs.append(output)
    assert_same(torch.cat(outputs, 2), call(phi, inputs, backend="torch"), torch.float64)


def strided(t):
    """The same numbers, the last two axes the other way round in memory."""
    return t.mT.contiguous().mT


@pytest.mark.parametrize("before", ["", "torch", "native"])
@pytest.mark.parametrize("feature_map", ["elu+1", "favor+"])
def test_a_state_of_any_strides(feature_map, before):
    """As it is, or after a step of either backend on it."""
    phi = make_map(feature_map)
    inputs = draw(feature_map, "sum", TOKENS)
    _, plain = call(phi, inputs.rows(0, 10), return_state=True)
    scale = plain.log_scale
    odd = AttentionState(
        strided(plain._memory), None if scale is None else strided(scale), plain.length.clone(), plain.origin
    )
    found = []
    for state in (plain, odd):
        parts = []
        for t in range(10, 20):
            now = inputs.rows(t, t + 1)
            backend = before if before and t < 12 else "native"
            parts.append(step_through(phi, now, state=state, backend=backend)[0])
        found.append(torch.cat(parts, 2))
    assert_same(found[1], found[0], torch.float64)
    assert_states_same(odd, plain)


ODD = {
    "components apart": lambda t: torch.stack([t, t + 1], -1)[..., 0],
    "one component for all": lambda t: t[..., :1].expand(t.shape),
    "one head for all": lambda t: t[:, :1].expand(t.shape),
    "negated": lambda t: torch._neg_view(-t),
}


@pytest.mark.parametrize("rule", ["sum", "decay-feature", "gated-delta-feature"])
@pytest.mark.parametrize("odd", ODD)
def test_tokens_and_gates_of_any_strides(odd, rule):
    phi = make_map("elu+1")
    inputs = draw("elu+1", rule, TOKENS).rows(0, 5)
    strange, plain = fresh_state(phi, inputs), fresh_state(phi, inputs)
    for t in range(5):
        now = inputs.rows(t, t + 1)
        leaves = {name: ODD[odd](leaf) for name, leaf in now.leaves().items()}
        want = {name: torch.empty(leaf.shape).to(leaf).copy_(leaf) for name, leaf in leaves.items()}
        got, other = (
            step_through(phi, dataclasses.replace(now, **tensors), state=state, backend="native")[0]
            for tensors, state in ((leaves, strange), (want, plain))
        )
        assert_same(got, other, torch.float64)
    assert_states_same(strange, plain)


# ---------------------------------------------------------------------------------------------------------
# The quick way
# ---------------------------------------------------------------------------------------------------------


def token(seed, dtype=torch.float32, batch=B, heads=H, groups=G, columns=E):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, 1, D), (batch, groups, 1, D), (batch, groups, 1, columns)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def running(feature_map="elu+1", steps=3, **options):
    """A state whose next step may be taken the quick way."""
    phi = make_map(feature_map, torch.float32)
    dtype = options.pop("dtype", torch.float32)
    options.setdefault("backend", "native")
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    state = AttentionState.zeros(phi, B, G, E, normalize=options.get("normalize"), dtype=kept)
    with torch.no_grad():
        for seed in range(steps):
            reassoc.step(*token(100 + seed, dtype), feature_map, state, **options)
    return state


def bits(state):
    """Everything that a state holds."""
    parts = (state._memory, state._scale, state._lost, state._length)
    return [None if t is None else t.clone() for t in parts]


def assert_same_bits(mine, other):
    for a, b in zip(mine, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("feature_map", ["elu+1", "identity", "relu", "exp"])
def test_quick_and_checked_steps_are_the_same_bit_for_bit(feature_map, normalize, dtype, checked):
    if feature_map == "exp" and normalize != "attention":
        pytest.skip("these steps are always checked")
    if feature_map == "identity" and "sum" in normalize:
        pytest.skip("these steps are always checked")
    options = {"normalize": normalize, "dtype": dtype}
    quick, slow = (running(feature_map, 1, **options) for _ in range(2))
    checked.clear()
    for seed in range(20):
        arguments = (*token(seed, dtype), feature_map)
        with torch.no_grad():
            output = reassoc.step(*arguments, quick, normalize=normalize, backend="native")
            assert len(checked) == seed
            slow._again = None
            want = reassoc.step(*arguments, slow, normalize=normalize, backend="native")
        assert len(checked) == seed + 1
        assert_same_bits([output], [want])
        assert_same_bits(bits(quick), bits(slow))
    assert quick.length.tolist() == [21, 21]


def with_gradient(position):
    def change(tokens, options):
        tokens[position].requires_grad_()

    return change


def with_tokens(**sizes):
    def change(tokens, options):
        tokens[:] = token(0, **sizes)

    return change


def with_options(**changed):
    def change(tokens, options):
        options.update(changed)

    return change


def with_strides(tokens, options):
    tokens[:] = [torch.stack([t, t + 1], -1)[..., 0] for t in tokens]


def on_another_device(tokens, options):
    tokens[:] = [t.to("meta") for t in tokens]


CHANGES = {
    "another map": with_options(feature_map="relu"),
    "the same map as an object": with_options(feature_map=make_map("elu+1", torch.float32)),
    "a map of another size": with_options(feature_map=make_map("elu+1", torch.float32, dim=5)),
    "no map": with_options(feature_map=torch.zeros(2)),
    "another normalization": with_options(normalize="none"),
    "the same normalization, named": with_options(normalize="attention"),
    "an epsilon": with_options(eps=0.5),
    "an epsilon that is no number": with_options(eps=torch.zeros(2)),
    "an epsilon that is a tensor": with_options(eps=torch.zeros(())),
    "an epsilon that is a truth value": with_options(eps=False),
    "a policy": with_options(undefined="zero"),
    "a policy that refuses": with_options(undefined="raise"),
    "an unknown policy": with_options(undefined="ignore"),
    "the same rule, named": with_options(rule=rules.Sum()),
    "a decay": with_options(rule=rules.Decay(torch.full((G,), -0.5))),
    "a delta rule": with_options(rule=rules.Delta(torch.full((B, G, 1), 0.5)), normalize="none"),
    "no rule": with_options(rule="sum"),
    "a window": with_options(window=3),
    "a mask": with_options(key_mask=torch.tensor([[True], [False]])),
    "a mask of another size": with_options(key_mask=torch.ones(B, 2, dtype=torch.bool)),
    "another backend": with_options(backend="torch"),
    "the reference": with_options(backend="reference"),
    "an unknown backend": with_options(backend="cuda"),
    "half precision": with_tokens(dtype=torch.bfloat16),
    "double precision": with_tokens(dtype=torch.float64),
    "whole numbers": with_tokens(dtype=torch.int64),
    "another batch": with_tokens(batch=3),
    "other query heads": with_tokens(heads=2),
    "query heads that do not fit": with_tokens(heads=3),
    "other key heads": with_tokens(groups=4),
    "another value size": with_tokens(columns=5),
    "other strides": with_strides,
    "another device": on_another_device,
    "a gradient of the query": with_gradient(0),
    "a gradient of the key": with_gradient(1),
    "a gradient of the value": with_gradient(2),
}


def outcome(state, change, first):
    """What a changed step gives, or says."""
    tokens = token(0)
    options = {"feature_map": "elu+1", "backend": "native"}
    CHANGES[change](tokens, options)
    if first:
        state._again = None
    try:
        return reassoc.step(*tokens, options.pop("feature_map"), state, **options), tokens
    except (TypeError, ValueError, RuntimeError) as error:
        return error, tokens


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_leaves_the_quick_way(change):
    """The outcome is that of a checked step: the same numbers, or the same refusal and an untouched state."""
    quick, slow = running(), running()
    assert quick._again is not None
    before = bits(quick)
    got, tokens = outcome(quick, change, first=False)
    want, others = outcome(slow, change, first=True)
    assert type(got) is type(want)
    if isinstance(want, Exception):
        assert str(got) == str(want)
        assert_same_bits(bits(quick), before)
    else:
        assert got.dtype == want.dtype and got.requires_grad == want.requires_grad
        assert_same_bits([got], [want])
        for mine, other in zip(tokens, others, strict=True):
            if mine.requires_grad:
                found = (torch.autograd.grad(t.sum(), x)[0] for t, x in ((got, mine), (want, other)))
                assert_same_bits([next(found)], [next(found)])
    quick, slow = quick.detach(), slow.detach()
    if "window" not in change and quick.S.dtype == torch.float32:
        mine, other = (reassoc.step(*token(9), "elu+1", state, backend="native") for state in (quick, slow))
        assert_same_bits([mine, *bits(quick)], [other, *bits(slow)])


def after_a_call(state, tokens):
    return reassoc.linear_attention(*tokens, "elu+1", causal=True, state=state, return_state=True)[1]


def saved_and_loaded(state):
    with tempfile.TemporaryDirectory() as folder:
        state.save(f"{folder}/state")
        return AttentionState.load(f"{folder}/state")


MOVES = {
    "clone": AttentionState.clone,
    "detach": AttentionState.detach,
    "to": lambda state: state.to("cpu"),
    "to float64 and back": lambda state: state.to(torch.float64).to(torch.float32),
    "reorder": lambda state: state.reorder(torch.tensor([0, 1])),
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "save": saved_and_loaded,
    "apply": lambda state: state.apply(reassoc.summarize(*token(50)[1:], "elu+1")),
    "merge": lambda state: state.merge(running()),
    "call": lambda state: after_a_call(state, token(51)),
    "call without tokens": lambda state: after_a_call(state, [t[:, :, :0] for t in token(52)]),
}


@pytest.mark.parametrize("first", ["original", "other"])
@pytest.mark.parametrize("move", MOVES)
def test_a_state_made_from_another_keeps_its_numbers(move, first):
    """Whoever steps first, the other is a snapshot, and both go on as if alone."""
    original = running()
    other = MOVES[move](original)
    expected = []  # each on tensors of its own
    for state in (original, other):
        alone = AttentionState(
            state._memory.clone(), None if state._scale is None else state._scale.clone(),
            state.length.clone(), state.origin,
        )  # fmt: skip
        alone._lost = None if state._lost is None else state._lost.clone()
        expected.append(alone)
    pairs = list(zip((original, other), expected, strict=True))
    pairs = pairs if first == "original" else pairs[::-1]
    with torch.no_grad():
        for index, (state, alone) in enumerate(pairs):
            kept = bits(pairs[1 - index][0])
            for seed in range(3):
                mine = reassoc.step(*token(seed), "elu+1", state, backend="native")
                assert_same_bits([mine], [reassoc.step(*token(seed), "elu+1", alone, backend="native")])
            assert_same_bits(bits(state), bits(alone))
            assert_same_bits(bits(pairs[1 - index][0]), kept)


def test_a_detached_output_of_a_call_is_not_written_to():
    """The state that a call returns shares nothing with what the caller still holds after a step."""
    state = running()
    held, length = state.S, state.length
    kept = held.clone(), length.clone()
    shared = state.detach()
    for seed in range(3):
        reassoc.step(*token(seed), "elu+1", state, backend="native")
    assert torch.equal(held, kept[0]) and torch.equal(length, kept[1])
    assert torch.equal(shared.S, kept[0]) and shared.length.tolist() == kept[1].tolist()
    assert state.length.tolist() == [6, 6]


def test_lengths_count_real_keys():
    state = running(steps=0)
    real = torch.tensor([[[True], [False]], [[True], [True]], [[False], [False]], [[False], [True]]])
    for mask in real:
        reassoc.step(*token(1), "elu+1", state, key_mask=mask, backend="native")
    assert state.length.tolist() == [2, 2]
    for _ in range(5):
        reassoc.step(*token(2), "elu+1", state, backend="native")
    assert state.length.tolist() == [7, 7] and state.length.dtype == torch.int64
    clone = state.clone()
    reassoc.step(*token(3), "elu+1", clone, backend="native")
    assert state.length.tolist() == [7, 7] and clone.length.tolist() == [8, 8]


@pytest.mark.parametrize("inside_first", [True, False])
def test_inference_mode_before_and_after(inside_first):
    """What it made is not overwritten outside; and the other way round nothing is lost."""
    alone = running()
    with torch.inference_mode(inside_first):
        state = running()
    for seed, inside in enumerate([not inside_first, inside_first, not inside_first, not inside_first]):
        with torch.inference_mode(inside), torch.no_grad():
            output = reassoc.step(*token(seed), "elu+1", state, backend="native")
            assert output.is_inference() == inside
        with torch.no_grad():
            want = reassoc.step(*token(seed), "elu+1", alone, backend="native")
        assert_same_bits([output], [want])
    assert_same_bits(bits(state), bits(alone))
    if inside_first:
        assert not state.S.is_inference()
    q, k, v = token(9)
    output = reassoc.step(q, k.requires_grad_(), v, "elu+1", state, backend="native")
    assert torch.autograd.grad(output.sum(), k)[0].isfinite().all()


def test_a_row_may_be_written_by_inference_tensors():
    state, alone = running(), running()
    with torch.inference_mode():
        tokens = token(5)
    with torch.no_grad():
        output = reassoc.step(*tokens, "elu+1", state, backend="native")
        assert_same_bits([output], [reassoc.step(*token(5), "elu+1", alone, backend="native")])


def test_a_gradient_in_between():
    """A step that records moves the state to new tensors; the graph through them stays right."""
    state = running(dtype=torch.float64)
    tokens = [token(seed, torch.float64) for seed in range(4)]
    key = tokens[0][1].requires_grad_()
    outputs = [reassoc.step(*t, "elu+1", state, backend="native") for t in tokens]
    assert state.S.requires_grad
    found = torch.autograd.grad(sum(o.sum() for o in outputs), key)[0]
    other = running(dtype=torch.float64)
    q, k, v = (torch.cat(parts, 2) for parts in zip(*tokens, strict=True))
    want = reassoc.linear_attention(q, k, v, "elu+1", causal=True, state=other, backend="torch")
    assert_same(found, torch.autograd.grad(want.sum(), key)[0], torch.float64)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, on first use
def test_inside_transforms_of_functions_steps_are_those_of_the_torch_backend():
    q, k, v = token(0, torch.float64)
    state = running(dtype=torch.float64)

    def attend(key, backend="auto"):
        return reassoc.step(q, key, v, "elu+1", state.clone(), backend=backend)

    def expected(key):
        return attend(key, "torch")

    for transform in (
        lambda f: torch.func.jvp(f, (k,), (torch.ones_like(k),))[1],
        lambda f: torch.func.vmap(f)(torch.stack([k, k + 1])),
    ):
        assert_same(transform(attend), transform(expected), torch.float64)


@pytest.mark.parametrize("rule", ["sum", "gated-delta-token"])
def test_threads_change_no_bit_of_a_step(rule):
    """A state large enough that threads share it: head by head, so that nothing depends on them."""
    phi = make_map("elu+1", torch.float32, dim=64)
    generator = torch.Generator().manual_seed(0)

    def draw_token():
        q, k, v = (torch.randn(4, 32, 1, 64, generator=generator) for _ in range(3))
        beta, gate = (torch.rand(4, 32, 1, generator=generator) for _ in range(2))
        return q, k, v, rules.Sum() if rule == "sum" else rules.GatedDelta(beta / 64, -gate)

    tokens = [draw_token() for _ in range(4)]
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            state = AttentionState.zeros(phi, 4, 32, 64, rule=tokens[0][3], normalize="attention")
            outputs = [
                reassoc.step(q, k, v, phi, state, rule=now, normalize="attention", backend="native")
                for q, k, v, now in tokens
            ]
            found.append([*outputs, *bits(state)])
    finally:
        torch.set_num_threads(before)
    assert_same_bits(*found)


# ---------------------------------------------------------------------------------------------------------
# Many steps
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_small_terms_are_not_lost_to_rounding():
    """300,000 keys, each below half of the last digit of what the first one wrote."""
    count, large, small = 300_000, 2.0**20, 2.0**-5
    phi = make_map("relu", torch.float32, dim=1)
    state = AttentionState.zeros(phi, 1, 1, 1)
    one, first, other = (torch.full((1, 1, 1, 1), x) for x in (1.0, large, small))
    with torch.no_grad():
        reassoc.step(first, first, one, phi, state, backend="native")
        for _ in range(count):
            output = reassoc.step(one, other, one, phi, state, backend="native")
    # Plain float32 would still hold 2^20: half of its last digit is 2^-4.
    assert state.z.item() == pytest.approx(large + count * small, rel=1e-6)
    assert state.S.item() == pytest.approx(large + count * small, rel=1e-6)
    assert output.item() == pytest.approx(1.0, rel=1e-6)
    assert state.length.item() == count + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature_map", "rule"),
    [("identity", "decay-head"), ("exp", "decay-head"), ("identity", "gated-delta-head")],
)
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("gate", [-1e-3, -1e-5, -1e-7])
def test_slow_decays_add_up(gate, feature_map, rule, backend):
    """What a decay near one takes with each step is below the last digit of the state, or not far above."""
    count = min(5_000, round(-1 / gate))
    phi = make_map(feature_map, torch.float32, dim=1)
    decay, one = torch.tensor([gate]), torch.ones(1, 1, 1, 1)
    nothing = torch.full((1, 1, 1, 1), -math.inf if feature_map == "exp" else 0.0)

    def rule_of(beta):
        if rule == "decay-head":
            return rules.Decay(decay)
        return rules.GatedDelta(torch.full((1, 1, 1), beta), decay)

    options = {"normalize": "attention", "backend": backend}
    state = AttentionState.zeros(phi, 1, 1, 1, rule=rule_of(1.0), normalize="attention")
    with torch.no_grad():
        reassoc.step(one, one, one, phi, state, rule=rule_of(1.0), **options)
        for _ in range(count):
            reassoc.step(one, nothing, one, phi, state, rule=rule_of(0.0), **options)
    want = math.exp((feature_map == "exp") + count * decay.double().item())
    for found in true_sums(state):
        assert abs(found.item() - want) <= STREAMED_FLOAT32 * want


def test_a_state_that_many_steps_made_holds_no_more_than_it_must():
    state = running()
    held = sum(t.untyped_storage().nbytes() for t in vars_of(state))
    for seed in range(50):
        reassoc.step(*token(seed), "elu+1", state, backend="native")
    assert sum(t.untyped_storage().nbytes() for t in vars_of(state)) == held


def test_a_backward_that_a_step_overwrote_says_so():
    """As torch does for its own operations in place."""
    phi = make_map("elu+1", torch.float32)
    state = running()
    query = torch.randn(B, H, 3, D, requires_grad=True)
    output = reassoc.read(query, phi, state)
    with torch.no_grad():
        reassoc.step(*token(7), phi, state, backend="native")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_recorded_step_is_recorded():
    """A dispatch mode sees the operations of a step, also of one that could have been taken quickly."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    state = running()
    assert state._again is not None
    with torch.no_grad(), Record() as record:
        reassoc.step(*token(7), "elu+1", state)
    assert len(record.seen) > 5


def test_a_compiled_step_equals_an_eager_one():
    """With graph breaks: the state is advanced in place."""
    phi = make_map("elu+1", torch.float32)
    one, other = running(), running()
    compiled = torch.compile(lambda q, k, v: reassoc.step(q, k, v, phi, one), backend="eager")
    with torch.no_grad():
        for seed in (7, 8):
            got, want = compiled(*token(seed)), reassoc.step(*token(seed), phi, other, backend="torch")
            assert_same(got, want, torch.float32)
    assert torch.equal(one.length, other.length)


def test_lengths_and_shallow_copies_stay():
    state = running()
    length, twin = state.length, copy.copy(state)
    kept = length.clone()
    reassoc.step(*token(7), "elu+1", state)
    assert torch.equal(length, kept) and torch.equal(twin.length, kept)
    assert torch.equal(state.length, kept + 1)


def test_no_memory_is_an_error():
    """Where the library cannot have its scratch, Python gets a MemoryError, and lives on."""
    code = """
import resource, torch, reassoc
torch.set_num_threads(2)
q = torch.zeros(1, 2, 8192, 1024, requires_grad=True)
out = reassoc.linear_attention(q, q, q[..., :512], "elu+1", causal=True, backend="native")
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (150 << 20),) * 2)
try:
    torch.autograd.grad(out.sum(), q)
except (MemoryError, RuntimeError) as error:
    print("refused", type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    assert "refused" in done.stdout
