"""Laws 4 and 5: packed = separate, padding changes nothing; windows, cross attention, grouped heads."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reassoc
from laws.budgets import assert_outputs_close, assert_same
from laws.suite import (
    BACKENDS,
    CORE_MAPS,
    MAPS,
    NORMALIZATIONS,
    RULES,
    H,
    Layout,
    assert_gradients_equal_the_oracle,
    assert_gradients_same,
    assert_states_same,
    call,
    cotangent,
    draw,
    expect,
    fits,
    gradients,
    make_map,
    rule_for,
    true_sums,
)
from reassoc import rules


def separate(phi, inputs, bounds, states=None, **options):
    """Each sequence in its own call."""
    found, left = [], []
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        part = dataclasses.replace(
            inputs.rows(start, stop), layout=dataclasses.replace(inputs.layout, cu_seqlens=None)
        )
        output, state = call(
            phi, part, state=None if states is None else states[n], return_state=True, **options
        )
        found.append(output)
        left.append(state)
    return torch.cat(found, 2), left


@given(
    name=st.sampled_from(MAPS),
    rule=st.sampled_from(RULES),
    normalize=st.sampled_from(NORMALIZATIONS),
    backend=st.sampled_from(BACKENDS),
    causal=st.booleans(),
    window=st.sampled_from([None, None, 1, 5, 70]),
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 63, 64, 65]), min_size=1, max_size=5),
    masked=st.booleans(),
)
@settings(max_examples=60)
def test_packed_equals_separate(name, rule, normalize, backend, causal, window, lengths, masked):
    bounds = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    layout = Layout(
        bounds[-1], causal=causal, window=window if causal else None, masked=masked, cu_seqlens=bounds
    )
    assume(fits(rule, layout))
    phi = make_map(name)
    inputs = draw(name, rule, layout, normalize=normalize)
    with torch.no_grad():
        output, state = call(phi, inputs, normalize=normalize, backend=backend, return_state=True)
        want, states = separate(phi, inputs, bounds, normalize=normalize, backend=backend)
    assert_same(output, want, torch.float64)
    assert state.S.shape[0] == len(lengths)
    S, z = true_sums(state)
    for n, one in enumerate(states):
        own_S, own_z = true_sums(one)
        assert_same(S[n : n + 1], own_S, torch.float64)
        if z is not None:
            assert_same(z[n : n + 1], own_z, torch.float64)
        assert state.length[n] == one.length[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "rule", "window"),
    [
        ("elu+1", "decay-token", None), ("favor+", "sum", None), ("trig", "decay-feature", None),
        ("elu+1", "decay-token", 7), ("favor+", "sum", 7), ("trig", "decay-feature", 7),
        ("elu+1", "delta", None), ("favor+", "gated-delta-token", None),
    ],
)  # fmt: skip
def test_packed_sequences_take_their_own_carried_states(name, rule, window, backend):
    bounds = (0, 9, 9, 74, 75)
    layout = Layout(75, causal=True, window=window, cu_seqlens=bounds)
    phi = make_map(name)
    before, inputs = draw(name, rule, layout, seed=1), draw(name, rule, layout, seed=2)
    earlier = dataclasses.replace(before, layout=dataclasses.replace(layout, cu_seqlens=(0, 1, 20, 75, 75)))
    with torch.no_grad():
        _, carried = call(phi, earlier, backend=backend, return_state=True)
        _, singles = separate(phi, earlier, earlier.layout.cu_seqlens, backend=backend)
        output, state = call(phi, inputs, state=carried, backend=backend, return_state=True)
        want, left = separate(phi, inputs, bounds, states=singles, backend=backend)
    assert_same(output, want, torch.float64)
    S, z = true_sums(state)
    for n, one in enumerate(left):
        assert_same(S[n : n + 1], true_sums(one)[0], torch.float64)
        if z is not None:
            assert_same(z[n : n + 1], true_sums(one)[1], torch.float64)
    assert state.length.tolist() == [1 + 9, 19 + 0, 55 + 65, 0 + 1]


@pytest.mark.parametrize(
    ("name", "rule", "causal"),
    [
        ("elu+1", "decay-token", False), ("favor+", "sum", False), ("favor+", "decay-feature", False),
        ("elu+1", "decay-token", True), ("favor+", "sum", True), ("favor+", "decay-feature", True),
        ("elu+1", "delta", True), ("favor+", "gated-delta-feature", True),
    ],
)  # fmt: skip
def test_packed_gradients_equal_separate_ones(name, rule, causal):
    bounds = (0, 3, 3, 68, 70)
    phi = make_map(name)
    inputs = draw(name, rule, Layout(70, causal=causal, cu_seqlens=bounds)).requires_grad()
    output = call(phi, inputs)
    want, _ = separate(phi, inputs, bounds)
    assert_gradients_same(output, want, inputs.leaves())


def test_all_packed_sequences_may_be_empty():
    inputs = draw("elu+1", "sum", Layout(0, causal=True, cu_seqlens=(0, 0, 0)))
    output, state = call("elu+1", inputs, return_state=True)
    assert output.shape == (1, H, 0, 3)
    assert state.S.shape[0] == 2
    assert not state.S.any()


@pytest.mark.parametrize("bounds", [(0, 5), (1, 70), (0, 80), (0, 40, 30, 70)])
def test_wrong_cu_seqlens_are_refused(bounds):
    inputs = draw("elu+1", "sum", Layout(70, causal=True, cu_seqlens=bounds))
    with pytest.raises(ValueError, match="cu_seqlens"):
        call("elu+1", inputs)


def test_packing_needs_one_row():
    inputs = draw("elu+1", "sum", "causal")
    with pytest.raises(ValueError, match="cu_seqlens"):
        call("elu+1", inputs, cu_seqlens=torch.tensor([0, 131]))


# ------------------------------------------------------------------------------------- padding


def poisoned(inputs, value=torch.nan):
    """Masked keys, values and gates replaced."""
    hide = ~inputs.key_mask[:, None, :]
    gate = inputs.log_decay
    if gate is not None and gate.dim() > 1:
        gate = gate.masked_fill(hide if gate.dim() == 3 else hide[..., None], value)
    return dataclasses.replace(
        inputs,
        key=inputs.key.masked_fill(hide[..., None], value),
        value=inputs.value.masked_fill(hide[..., None], value),
        log_decay=gate,
        beta=None if inputs.beta is None else inputs.beta.masked_fill(hide, value),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["padded", "padded-causal", "padded-window"])
@pytest.mark.parametrize("name", MAPS)
def test_padding_may_hold_nan_and_gets_zero_gradient(name, layout, backend):
    rule = rule_for(MAPS.index(name) + len(layout), layout)
    normalize = NORMALIZATIONS[MAPS.index(name) // 3 % len(NORMALIZATIONS)]
    phi = make_map(name)
    clean = draw(name, rule, layout, normalize=normalize)
    inputs = poisoned(clean).requires_grad()
    result = expect(name, phi, clean, normalize=normalize)
    output, state = call(phi, inputs, normalize=normalize, backend=backend, return_state=True)
    assert_outputs_close(output, result, torch.float64)
    wanted = inputs.leaves() | {n: p for n, p in phi.named_parameters() if p.requires_grad}
    found = gradients(output, cotangent(result.output, result.undefined), wanted)
    hide = ~inputs.key_mask[:, None, :]
    for leaf, gradient in found.items():
        assert not gradient.isnan().any(), f"gradient of {leaf}"
    assert not found["key"][hide.expand(found["key"].shape[:3])].any()
    assert not found["value"][hide.expand(found["value"].shape[:3])].any()
    for gate in ("log_decay", "beta"):
        if gate in found and found[gate].dim() > 1:
            assert not found[gate][hide.expand(found[gate].shape[:3])].any(), gate
    _, same = call(phi, clean, normalize=normalize, backend=backend, return_state=True)
    assert_states_same(state.detach(), same)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CORE_MAPS)
def test_padded_equals_unpadded(name, rule, side):
    """The real tokens alone give what they give inside padding, state included."""
    phi = make_map(name)
    inputs = draw(name, rule, Layout(70, causal=True))
    start, stop = {"left": (20, 70), "right": (0, 50), "both": (20, 66)}[side]
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[:, start:stop] = True
    padded, state = call(phi, dataclasses.replace(inputs, key_mask=mask), return_state=True)
    alone, want = call(phi, inputs.rows(start, stop), return_state=True)
    assert_same(padded[:, :, start:stop], alone, torch.float64)
    assert_states_same(state, want)


def test_masks_hide_keys_not_queries():
    """A query at a masked position still reads what came before it."""
    inputs = draw("elu+1", "sum", Layout(10, causal=True))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[:, 4] = False
    output = call("elu+1", dataclasses.replace(inputs, key_mask=mask))
    assert output.isfinite().all()
    moved = dataclasses.replace(inputs, query=inputs.query.roll(-1, 2))
    before = call("elu+1", moved)  # position 3 now reads with the query of position 4
    assert_same(output[:, :, 4], before[:, :, 3], torch.float64)


def test_masked_batch_rows_without_any_key_are_undefined():
    inputs = draw("elu+1", "sum", Layout(5, 6))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1] = False
    inputs = dataclasses.replace(inputs, key_mask=mask)
    output = call("elu+1", inputs)
    assert output[0].isfinite().all()
    assert output[1].isnan().all()
    assert not call("elu+1", inputs, undefined="zero")[1].any()
    with pytest.raises(ValueError):
        call("elu+1", inputs, undefined="raise")


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 70), torch.ones(2, 69, dtype=torch.bool), torch.ones(2, 7, 70) > 0]
)
def test_wrong_masks_are_refused(mask):
    inputs = draw("elu+1", "sum", "cross")
    with pytest.raises((ValueError, TypeError), match="key_mask"):
        call("elu+1", dataclasses.replace(inputs, key_mask=mask))


# ------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 128, 199, 200, 201])
@pytest.mark.parametrize(
    ("name", "rule"), [("elu+1", "sum"), ("favor+", "decay-feature"), ("identity", "decay-token")]
)
def test_windows_of_any_size(name, rule, window, backend):
    phi = make_map(name)
    inputs = draw(name, rule, Layout(200, causal=True, window=window)).requires_grad()
    result = expect(name, phi, inputs)
    output = call(phi, inputs, backend=backend)
    assert_outputs_close(output, result, torch.float64)
    assert_gradients_equal_the_oracle(output, result, inputs.leaves())


def test_window_counts_positions_not_real_keys():
    inputs = draw("elu+1", "sum", Layout(6, causal=True, window=3))
    mask = torch.tensor([[True, True, True, False, False, True]]).expand(2, 6)
    output = call("elu+1", dataclasses.replace(inputs, key_mask=mask))
    assert output[:, :, 4].isfinite().all()  # sees position 2
    weights = reassoc.attention_matrix(
        inputs.query, inputs.key, "elu+1", causal=True, window=3, key_mask=mask
    )
    seen = (weights[0, 0] != 0).nonzero().tolist()
    assert seen == [[0, 0], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2], [3, 1], [3, 2], [4, 2], [5, 5]]


@pytest.mark.parametrize(
    "options", [{"window": 3}, {"window": 0, "causal": True}, {"window": -1, "causal": True}]
)
def test_meaningless_windows_are_refused(options):
    inputs = draw("elu+1", "sum", "full")
    with pytest.raises(ValueError, match="window"):
        reassoc.linear_attention(inputs.query, inputs.key, inputs.value, "elu+1", **options)


def test_windowed_states_hold_only_their_tail():
    inputs = draw("elu+1", "sum", Layout(40, causal=True, window=6))
    _, state = call("elu+1", inputs, return_state=True)
    assert not state.S.any()
    assert not state.z.any()
    assert state.length.tolist() == [40, 40]


# ------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", MAPS)
def test_grouped_heads_equal_repeated_ones(name):
    """Head h reads key head h // (H // G): the same as repeating each key head."""
    inputs = draw(name, ["decay-token", "gated-delta-token"][MAPS.index(name) % 2], "causal")
    phi = make_map(name)
    together = call(phi, inputs)
    for h in range(H):
        result = expect(name, phi, inputs)
        assert_outputs_close(
            together[:, h : h + 1], type(result)(*(part[:, h : h + 1] for part in result)), torch.float64
        )
        break
    if getattr(phi, "heads", None) is None:
        spread = dataclasses.replace(
            inputs,
            key=inputs.key.repeat_interleave(2, 1),
            value=inputs.value.repeat_interleave(2, 1),
            log_decay=inputs.log_decay.repeat_interleave(2, 1),
            beta=None if inputs.beta is None else inputs.beta.repeat_interleave(2, 1),
        )
        assert_same(together, call(phi, spread), torch.float64)


def test_causal_needs_as_many_queries_as_keys():
    inputs = draw("elu+1", "sum", "cross")
    with pytest.raises(ValueError, match="causal"):
        call("elu+1", inputs, causal=True)


def test_heads_must_divide():
    x = torch.ones(1, 3, 4, 2)
    with pytest.raises(ValueError):
        reassoc.linear_attention(x, x[:, :2], x[:, :2], "elu+1")


@pytest.mark.parametrize("shape", [(3,), (1, 2, 5), (2, 2, 70, 9), (2, 2)])
def test_wrong_gates_are_refused(shape):
    inputs = draw("elu+1", "sum", "cross")
    with pytest.raises(ValueError, match="log_decay"):
        reassoc.linear_attention(
            inputs.query, inputs.key, inputs.value, "elu+1", rule=rules.Decay(-torch.ones(shape))
        )


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"normalize": "softmax"}, "normalize"),
        ({"undefined": "ignore"}, "undefined"),
        ({"backend": "fastest"}, "backend"),
        ({"normalize": "none", "eps": 1e-3}, "eps"),
        ({"feature_map": "elu"}, "elu"),
        ({"rule": "sum"}, "rule"),
    ],
)
def test_unknown_options_are_refused_by_name(options, error):
    inputs = draw("elu+1", "sum", "full")
    with pytest.raises((ValueError, TypeError), match=error):
        reassoc.linear_attention(
            inputs.query, inputs.key, inputs.value, **({"feature_map": "elu+1"} | options)
        )
