"""Laws 2 and 3: pieces with the state carried = the whole; compose, merge, snapshots, steps, saved states."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reassoc
from laws.budgets import assert_gradients_close, assert_same
from laws.suite import (
    ADDITIVE,
    BACKENDS,
    DELTA,
    LAYOUTS,
    MAPS,
    NORMALIZATIONS,
    RULES,
    Layout,
    assert_gradients_same,
    assert_states_same,
    call,
    draw,
    fits,
    fresh_state,
    make_map,
    rule_for,
    step_through,
    true_sums,
)
from reassoc import AttentionState, rules

CAUSAL_LAYOUTS = ("causal", "window", "long-window", "padded-causal", "padded-window")


def in_pieces(phi, inputs, cuts, state=None, **options):
    """The call cut at the given places, the state carried."""
    outputs, edges = [], [0, *cuts, inputs.query.shape[2]]
    for start, stop in itertools.pairwise(edges):
        output, state = call(phi, inputs.rows(start, stop), state=state, return_state=True, **options)
        outputs.append(output)
    return torch.cat(outputs, 2), state


@given(
    name=st.sampled_from(MAPS),
    rule=st.sampled_from(RULES),
    normalize=st.sampled_from(NORMALIZATIONS),
    layout=st.sampled_from(CAUSAL_LAYOUTS),
    backend=st.sampled_from(BACKENDS),
    cuts=st.lists(st.integers(0, 67), max_size=4).map(sorted),
)
@settings(max_examples=60)
def test_pieces_equal_the_whole_at_any_cut(name, rule, normalize, layout, backend, cuts):
    assume(fits(rule, layout))
    phi = make_map(name)
    inputs = draw(name, rule, layout, normalize=normalize)
    with torch.no_grad():
        whole, state = call(phi, inputs, normalize=normalize, backend=backend, return_state=True)
        pieces, carried = in_pieces(phi, inputs, cuts, normalize=normalize, backend=backend)
    assert_same(pieces, whole, torch.float64)
    assert_states_same(carried, state)


@pytest.mark.parametrize("name", MAPS)
def test_pieces_of_one_map_equal_the_whole(name):
    """Every map at cuts inside, at and next to a chunk's edge, whatever hypothesis chose above."""
    layout = CAUSAL_LAYOUTS[MAPS.index(name) % len(CAUSAL_LAYOUTS)]
    rule = rule_for(MAPS.index(name) // 2, layout)
    phi = make_map(name)
    inputs = draw(name, rule, layout)
    with torch.no_grad():
        whole, state = call(phi, inputs, return_state=True)
        pieces, carried = in_pieces(phi, inputs, [0, 1, 1, 3, 64, 65])
    assert_same(pieces, whole, torch.float64)
    assert_states_same(carried, state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "rule", "layout"),
    [
        (name, rule, layout)
        for name, rule in [
            ("elu+1", "decay-token"), ("favor+", "decay-feature"), ("favor+", "sum"),
            ("elu+1", "delta"), ("favor+", "gated-delta-feature"),
        ]
        for layout in ("causal", "window", "padded-causal") if fits(rule, layout)
    ],
)  # fmt: skip
def test_gradients_flow_through_the_carried_state(name, rule, layout, backend):
    phi = make_map(name)
    inputs = draw(name, rule, layout).requires_grad()
    whole = call(phi, inputs, backend=backend)
    pieces, _ = in_pieces(phi, inputs, [5, 66], backend=backend)
    assert_gradients_same(pieces, whole, inputs.leaves())


@pytest.mark.parametrize("rule", ["decay-token", "gated-delta-token"])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "trig"])
def test_the_returned_state_is_differentiable(name, rule):
    """A loss on the state itself reaches keys, values and gates."""
    phi = make_map(name)
    inputs = draw(name, rule, Layout(70, causal=True)).requires_grad()
    _, state = call(phi, inputs, return_state=True, backend="torch")
    _, plain = call(phi, inputs, return_state=True, backend="reference")
    wanted = {leaf: t for leaf, t in inputs.leaves().items() if leaf != "query"}

    def loss(state):
        S, z = true_sums(state)
        return S.square().sum() + (0 if z is None else z.sum())

    found = torch.autograd.grad(loss(state), list(wanted.values()))
    truth = torch.autograd.grad(loss(plain), list(wanted.values()))
    for leaf, a, b in zip(wanted, found, truth, strict=True):
        assert b.abs().max() > 0
        assert_gradients_close(a, b, torch.float64, what=leaf)


def test_detached_state_stops_the_gradient():
    phi = make_map("favor+")
    inputs = draw("favor+", "sum", "causal").requires_grad()
    _, state = call(phi, inputs.rows(0, 60), return_state=True)
    output = call(phi, inputs.rows(60, 131), state=state.detach())
    grad = torch.autograd.grad(output.sum(), inputs.key)[0]
    assert not grad[:, :, :60].any()
    assert grad[:, :, 60:].any()


# ------------------------------------------------------------------------------------- snapshots and steps


@pytest.mark.parametrize(
    ("rule", "layout"), [(r, y) for r in RULES for y in ("causal", "window") if fits(r, y)]
)
@pytest.mark.parametrize("name", ["elu+1", "favor+", "trig"])
def test_a_call_never_changes_the_state_it_is_given(name, rule, layout):
    phi = make_map(name)
    inputs = draw(name, rule, layout)
    with torch.no_grad():
        _, state = call(phi, inputs.rows(0, 30), return_state=True)
        before = true_sums(state)
        length = state.length.clone()
        first = call(phi, inputs.rows(30, 60), state=state)
        second = call(phi, inputs.rows(30, 60), state=state)
    assert torch.equal(first, second)
    for a, b in zip(before, true_sums(state), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert torch.equal(state.length, length)


@pytest.mark.parametrize("copy", ["clone", "detach", "to", "reorder", "apply-empty"])
@pytest.mark.parametrize(
    ("rule", "layout"), [("decay-head", "causal"), ("decay-head", "window"), ("gated-delta-head", "causal")]
)
@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_a_copy_is_a_snapshot(name, rule, layout, copy):
    """Stepping the state does not move its copies, and stepping a copy does not move the state."""
    if copy == "apply-empty" and layout == "window":
        pytest.skip("a summary has no window")
    phi = make_map(name)
    inputs = draw(name, rule, layout)
    with torch.no_grad():
        _, state = call(phi, inputs.rows(0, 30), return_state=True)
        want = call(phi, inputs.rows(30, 40), state=state)
        kept = {
            "clone": state.clone,
            "detach": state.detach,
            "to": lambda: state.to(torch.float64),
            "reorder": lambda: state.reorder(torch.arange(2)),
            "apply-empty": lambda: state.apply(runs(inputs.rows(0, 0), phi, [])[0]),
        }[copy]()
        other = inputs.rows(50, 55)
        step_through(phi, other, state=state)
        assert_same(call(phi, inputs.rows(30, 40), state=kept), want, torch.float64)

        _, state = call(phi, inputs.rows(0, 30), return_state=True)
        kept = (
            state.clone()
            if copy == "apply-empty"
            else getattr(state, copy)(*{"to": (torch.float64,), "reorder": (torch.arange(2),)}.get(copy, ()))
        )
        step_through(phi, other, state=kept)
        assert_same(call(phi, inputs.rows(30, 40), state=state), want, torch.float64)


@pytest.mark.parametrize(
    ("rule", "layout"), [("sum", "causal"), ("sum", "window"), ("gated-delta-feature", "causal")]
)
@pytest.mark.parametrize("name", ["elu+1", "favor+", "trig"])
def test_step_advances_the_state_in_hand(name, rule, layout):
    phi = make_map(name)
    inputs = draw(name, rule, layout)
    with torch.no_grad():
        _, state = call(phi, inputs.rows(0, 30), return_state=True)
        step_through(phi, inputs.rows(30, 31), state=state)
        _, want = call(phi, inputs.rows(0, 31), return_state=True)
        assert_states_same(state, want)
        assert_same(
            call(phi, inputs.rows(31, 60), state=state),
            call(phi, inputs.rows(31, 60), state=want),
            torch.float64,
        )


@pytest.mark.parametrize("rule", ["decay-token", "gated-delta-token"])
@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_steps_with_gradients_keep_every_snapshot_right(name, rule):
    """When a gradient is needed no saved tensor may be overwritten by later steps."""
    phi = make_map(name)
    inputs = draw(name, rule, Layout(6, causal=True)).requires_grad()
    state = fresh_state(phi, inputs)
    outputs, snapshots = [], []
    for t in range(6):
        output, state = step_through(phi, inputs.rows(t, t + 1), state=state)
        outputs.append(output)
        snapshots.append(state.clone())
    whole = call(phi, inputs)
    assert_gradients_same(torch.cat(outputs, 2), whole, inputs.leaves())
    for t in (0, 3):
        _, want = call(phi, inputs.rows(0, t + 1), return_state=True)
        assert_states_same(snapshots[t].detach(), want.detach())


@pytest.mark.parametrize("rule", ["decay-token", "gated-delta-token"])
@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_masked_step_is_the_identity_on_the_state(name, rule):
    phi = make_map(name)
    inputs = draw(name, rule, "causal")
    with torch.no_grad():
        _, state = call(phi, inputs.rows(0, 20), return_state=True)
        before, length = true_sums(state), state.length.clone()
        now = inputs.rows(20, 21)
        for leaf in ("key", "value", "log_decay", "beta"):
            if leaf in now.leaves():
                getattr(now, leaf)[0] = torch.nan
        now.key_mask = torch.tensor([[False], [True]])
        step_through(phi, now, state=state)
    for a, b in zip(before, true_sums(state), strict=True):
        if a is not None:
            assert torch.equal(a[0], b[0])
            assert not torch.equal(a[1], b[1])
    assert (state.length - length).tolist() == [0, 1]


# ------------------------------------------------------------------------------------- summaries


def runs(inputs, phi, cuts, normalize=None):
    """Summaries of the runs between cuts."""
    edges = [0, *cuts, inputs.key.shape[2]]
    found = []
    for start, stop in itertools.pairwise(edges):
        part = inputs.rows(start, stop)
        found.append(
            reassoc.summarize(
                part.key,
                part.value,
                phi,
                part.rule(),
                normalize=part.normalize(normalize),
                key_mask=part.key_mask,
            )
        )
    return found


@given(
    name=st.sampled_from(MAPS),
    rule=st.sampled_from(RULES),
    normalize=st.sampled_from(NORMALIZATIONS),
    layout=st.sampled_from(["causal", "padded-causal"]),
    cuts=st.tuples(st.integers(0, 67), st.integers(0, 67)).map(sorted),
)
@settings(max_examples=40)
def test_compose_is_concatenation_and_associative(name, rule, normalize, layout, cuts):
    phi = make_map(name)
    inputs = draw(name, rule, layout, normalize=normalize)
    with torch.no_grad():
        _, whole = call(phi, inputs, normalize=normalize, return_state=True)
        a, b, c = runs(inputs, phi, cuts, normalize)
        empty = fresh_state(phi, inputs, normalize=normalize)
        left = reassoc.compose(reassoc.compose(a, b), c)
        right = reassoc.compose(a, reassoc.compose(b, c))
        if left.transition is not None:
            assert_same(left.transition, runs(inputs, phi, [], normalize)[0].transition, torch.float64)
            assert_same(right.transition, left.transition, torch.float64)
        assert_states_same(empty.apply(left), whole)
        assert_states_same(empty.apply(right), whole)
        assert_states_same(empty.apply(a).apply(b).apply(c), whole)
        _, first = call(phi, inputs.rows(0, cuts[0]), normalize=normalize, return_state=True)
        assert_states_same(first.apply(reassoc.compose(b, c)), whole)


@pytest.mark.parametrize("rule", ["decay-feature", "gated-delta-feature"])
def test_gradients_flow_through_summaries(rule):
    phi = make_map("favor+")
    inputs = draw("favor+", rule, Layout(40, causal=True)).requires_grad()
    a, b = runs(inputs, phi, [15])
    state = fresh_state(phi, inputs).apply(reassoc.compose(a, b))
    _, whole = call(phi, inputs, return_state=True)
    wanted = {leaf: t for leaf, t in inputs.leaves().items() if leaf != "query"}
    found = torch.autograd.grad(true_sums(state)[0].square().sum(), list(wanted.values()))
    truth = torch.autograd.grad(true_sums(whole)[0].square().sum(), list(wanted.values()))
    for leaf, x, y in zip(wanted, found, truth, strict=True):
        assert_gradients_close(x, y, torch.float64, what=leaf)


@pytest.mark.parametrize("name", MAPS)
def test_merge_adds_two_sum_states(name):
    phi = make_map(name)
    inputs = draw(name, "sum", "padded-causal")
    with torch.no_grad():
        _, whole = call(phi, inputs, return_state=True)
        _, first = call(phi, inputs.rows(0, 21), return_state=True)
        _, second = call(phi, inputs.rows(21, 67), return_state=True)
        assert_states_same(first.merge(second), whole)
        assert_states_same(second.merge(first), whole)


@pytest.mark.parametrize("rule", [r for r in RULES if r != "sum"])
def test_merge_is_refused_where_order_matters(rule):
    phi = make_map("elu+1")
    inputs = draw("elu+1", rule, "causal")
    _, state = call(phi, inputs, return_state=True)
    with pytest.raises((ValueError, TypeError)):
        state.merge(state)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("rule", ADDITIVE)
@pytest.mark.parametrize("name", ["elu+1", "calibrated favor+", "trig"])
def test_read_equals_the_call_that_is_not_causal(name, rule, normalize):
    phi = make_map(name)
    inputs = draw(name, rule, "cross")
    with torch.no_grad():
        whole, state = call(phi, inputs, normalize=normalize, return_state=True)
        got = reassoc.read(inputs.query, phi, state, normalize=normalize)
    assert_same(got, whole, torch.float64)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("rule", DELTA)
@pytest.mark.parametrize("name", ["elu+1", "calibrated favor+", "trig"])
def test_read_equals_the_last_row_of_the_causal_call(name, rule, normalize):
    phi = make_map(name)
    inputs = draw(name, rule, "causal", normalize=normalize)
    with torch.no_grad():
        whole, state = call(phi, inputs, normalize=normalize, return_state=True)
        got = reassoc.read(inputs.query[:, :, -1:], phi, state, normalize=normalize)
    assert_same(got, whole[:, :, -1:], torch.float64)


def test_read_after_apply_equals_the_call():
    phi = make_map("favor+")
    inputs = draw("favor+", "decay-token", "cross")
    state = fresh_state(phi, inputs).apply(reassoc.summarize(inputs.key, inputs.value, phi, inputs.rule()))
    assert_same(reassoc.read(inputs.query, phi, state), call(phi, inputs), torch.float64)


def test_read_of_a_windowed_state_is_refused():
    phi = make_map("elu+1")
    inputs = draw("elu+1", "sum", "window")
    _, state = call(phi, inputs, return_state=True)
    with pytest.raises(ValueError):
        reassoc.read(inputs.query, phi, state)


# ------------------------------------------------------------------------------------- the state as an object


@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        (rule, layout)
        for rule in ("sum", "decay-token", "gated-delta-token")
        for layout in ("causal", "window")
        if fits(rule, layout)
    ],
)
@pytest.mark.parametrize("name", MAPS)
def test_a_saved_state_continues_the_same(name, rule, layout, tmp_path):
    phi = make_map(name)
    inputs = draw(name, rule, layout)
    with torch.no_grad():
        _, state = call(phi, inputs.rows(0, 30), return_state=True)
        state.save(tmp_path / "state")
        loaded = AttentionState.load(tmp_path / "state")
        want = call(phi, inputs.rows(30, 60), state=state)
        got = call(phi, inputs.rows(30, 60), state=loaded)
    assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))
    assert torch.equal(loaded.length, state.length)
    other = make_map("relu" if name != "relu" else "elu+1")
    with pytest.raises(ValueError):
        call(other, inputs.rows(30, 60), state=loaded)


@pytest.mark.parametrize("layout", ["causal", "window"])
def test_reorder_moves_rows_of_the_batch(layout):
    phi = make_map("favor+")
    inputs = draw("favor+", "decay-head", layout)
    _, state = call(phi, inputs.rows(0, 30), return_state=True)
    index = torch.tensor([1, 1, 0])
    import dataclasses

    rest = inputs.rows(30, 50)
    moved = dataclasses.replace(rest, query=rest.query[index], key=rest.key[index], value=rest.value[index])
    want = call(phi, rest, state=state)
    straight = dataclasses.replace(moved, key=rest.key[index], value=rest.value[index])
    assert_same(call(phi, straight, state=state.reorder(index)), want[index], torch.float64)


def test_state_refuses_another_map_rule_normalization_or_draw():
    inputs = draw("favor+", "sum", "causal")
    phi = make_map("favor+")
    _, state = call(phi, inputs, return_state=True)
    call(phi, inputs, state=state)
    with pytest.raises(ValueError):
        call(make_map("exp"), inputs, state=state)
    with pytest.raises(ValueError):
        call(phi, inputs, state=state, normalize="sum")
    with pytest.raises(ValueError):
        call(phi, draw("favor+", "decay-head", "causal"), state=state)
    with pytest.raises(ValueError):
        call(phi, inputs, state=state, window=3)
    phi.redraw_()
    with pytest.raises(ValueError):
        call(phi, inputs, state=state)


def test_state_refuses_another_calibration():
    inputs = draw("favor+", "sum", "causal")
    phi = make_map("calibrated favor+")
    _, state = call(phi, inputs, return_state=True)
    phi.calibrate_(3 * inputs.query.float() + 1, inputs.key.float())
    with pytest.raises(ValueError):
        call(phi, inputs, state=state)


def test_state_refuses_another_shape():
    inputs = draw("elu+1", "sum", "causal")
    _, state = call("elu+1", inputs, return_state=True)
    import dataclasses

    with pytest.raises(ValueError):
        call("elu+1", dataclasses.replace(inputs, value=inputs.value[..., :2]), state=state)
    smaller = dataclasses.replace(inputs, query=inputs.query[:1], key=inputs.key[:1], value=inputs.value[:1])
    with pytest.raises(ValueError):
        call("elu+1", smaller, state=state)


def test_length_counts_real_keys():
    inputs = draw("elu+1", "sum", "padded-causal")
    _, state = call("elu+1", inputs, return_state=True)
    assert torch.equal(state.length, inputs.key_mask.sum(1).to(state.length.dtype))


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_states_are_float32_for_low_precision(layout):
    inputs = draw("elu+1", "sum", layout).to(torch.bfloat16)
    output, state = call("elu+1", inputs, return_state=True)
    assert output.dtype == torch.bfloat16
    assert state.S.dtype == state.z.dtype == torch.float32


def test_rules_are_compared_by_kind_not_by_gate():
    """A state of a gated rule takes the next piece's own gates."""
    inputs = draw("elu+1", "decay-token", "causal")
    _, state = call("elu+1", inputs.rows(0, 10), return_state=True)
    call("elu+1", inputs.rows(10, 20), state=state)
    with pytest.raises(ValueError):
        reassoc.linear_attention(
            inputs.query, inputs.key, inputs.value, "elu+1", causal=True, rule=rules.Sum(), state=state
        )
