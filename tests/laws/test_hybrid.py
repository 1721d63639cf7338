"""The laws of hybrid attention: exact near keys and kernel far keys under one denominator.

Cases are map x setting x backend, values and gradients against `oracle.hybrid`, which weighs each pair.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
import reassoc
from laws.budgets import assert_gradients_close, assert_outputs_close, assert_same
from laws.suite import (
    BACKENDS,
    DIM,
    B,
    E,
    G,
    H,
    Inputs,
    Layout,
    assert_gradients_equal_the_oracle,
    assert_gradients_same,
    cotangent,
    draw,
    features,
    gradients,
    largest_log,
    make_map,
    state_bytes,
)

NONE = "none"  # no map: window and sinks alone
MAPS = (
    "elu+1", "relu", "exp", "favor+", "calibrated favor+", "hedgehog per head", "codebook per head",
    "identity", "trig", NONE,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setting:
    """One shape of hybrid attention."""

    n: int
    window: int
    sinks: int = 0
    span: int | None = None
    decay: bool = False
    mask: str | None = None  # "left", "right", "holes"
    scale: float | None = 0.8


SETTINGS = {
    "plain": Setting(131, 4, 2),
    "one": Setting(70, 1),
    "one and sinks": Setting(70, 1, 3, scale=None),
    "window covers all": Setting(23, 23, 3),
    "window beyond": Setting(23, 200),
    "sinks cover all": Setting(23, 2, 40),
    "long window": Setting(200, 66, 1),
    "span": Setting(90, 5, span=12),
    "long span": Setting(90, 5, span=200),
    "decay": Setting(90, 3, 2, decay=True),
    "left": Setting(67, 4, 3, mask="left"),
    "right": Setting(67, 4, 3, mask="right"),
    "holes": Setting(67, 4, 3, mask="holes", decay=True),
    "holes in a span": Setting(67, 4, span=9, mask="holes", decay=True),
}
CARRIED = ("plain", "one", "window beyond", "sinks cover all", "span", "holes", "holes in a span")


@dataclasses.dataclass
class Case:
    """Inputs of one call in float64, or rounded, and the options that go with them."""

    inputs: Inputs
    log_weight: torch.Tensor
    setting: Setting

    @property
    def length(self) -> int:
        return self.inputs.query.shape[2]

    def leaves(self):
        return self.inputs.leaves() | {"log_weight": self.log_weight}

    def to(self, dtype):
        weight = self.log_weight.to(torch.promote_types(dtype, torch.float32))
        return dataclasses.replace(self, inputs=self.inputs.to(dtype), log_weight=weight)

    def requires_grad(self):
        weight = self.log_weight.detach().clone().requires_grad_()
        return dataclasses.replace(self, inputs=self.inputs.requires_grad(), log_weight=weight)

    def rows(self, start, stop):
        return dataclasses.replace(self, inputs=self.inputs.rows(start, stop))

    def change(self, **tensors):
        return dataclasses.replace(self, inputs=dataclasses.replace(self.inputs, **tensors))

    def arguments(self):
        return self.inputs.query, self.inputs.key, self.inputs.value


def make_case(name, setting, *, seed=0, norm=1.0, n=None) -> Case:
    setting = SETTINGS[setting] if isinstance(setting, str) else setting
    setting = setting if n is None else dataclasses.replace(setting, n=n)
    inputs = draw(
        name, "decay-head" if setting.decay else "sum", Layout(setting.n, causal=True), seed=seed, norm=norm
    )
    generator = torch.Generator().manual_seed(77 + seed)
    mask = None
    if setting.mask is not None:
        mask = torch.ones(B, setting.n, dtype=torch.bool)
        third = setting.n // 3
        if setting.mask == "left":
            mask[-1, :third] = False
        elif setting.mask == "right":
            mask[-1, -third:] = False
        else:
            mask = torch.rand(B, setting.n, generator=generator) < 0.6
            mask[-1, :third] = False
    weight = torch.randn(H, generator=generator, dtype=torch.float64)
    return Case(dataclasses.replace(inputs, key_mask=mask), weight, setting)


def own_map(name, dtype=torch.float64):
    return None if name == NONE else make_map(name, dtype)


def attend(phi, case: Case, **more):
    s = case.setting
    options = {
        "window": s.window, "sinks": s.sinks, "span": s.span, "scale": s.scale, "rule": case.inputs.rule(),
        "log_weight": case.log_weight, "key_mask": case.inputs.key_mask,
    }  # fmt: skip
    return reassoc.hybrid_attention(*case.arguments(), phi, **{**options, **more})


def take_step(phi, case: Case, state, **more):
    options = {
        "rule": case.inputs.rule(), "log_weight": case.log_weight, "key_mask": case.inputs.key_mask,
    }  # fmt: skip
    return reassoc.hybrid_step(*case.arguments(), phi, state, **{**options, **more})


def step_through(phi, case: Case, state=None, start=0, **more):
    """Every token from `start` on by steps; the state before the first comes from an empty call."""
    if state is None:
        _, state = attend(phi, case.rows(0, 0), return_state=True, **more)
    outputs = [take_step(phi, case.rows(t, t + 1), state, **more) for t in range(start, case.length)]
    return torch.cat(outputs, 2), state


def expect(name, phi, case: Case, **more) -> oracle.Result:
    s, mask = case.setting, case.inputs.key_mask
    query, key, value = (t.double() for t in case.arguments())
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.5), value.masked_fill(hidden, 0.0)
    far = None
    if phi is not None:
        far = (features(name, phi, query, "query"), features(name, phi, key, "key"))
    decay = case.inputs.log_decay
    return oracle.hybrid(
        query, key, value, far, scale=DIM**-0.5 if s.scale is None else s.scale, window=s.window,
        sinks=s.sinks, span=s.span, log_weight=case.log_weight.double(),
        log_decay=None if decay is None else decay.double(),
        key_mask=mask, **more,
    )  # fmt: skip


def logs_of(name, phi, case: Case) -> float:
    """The largest logarithm of anything: of a feature, or a score."""
    s = case.setting
    query, key = case.inputs.query.detach().double(), case.inputs.key.detach().double()
    scores = query.norm(dim=-1).max() * key.norm(dim=-1).max() * (DIM**-0.5 if s.scale is None else s.scale)
    return float(scores) + (0.0 if phi is None else largest_log(name, phi, case.inputs))


def parameters(phi):
    return {} if phi is None else {n: p for n, p in phi.named_parameters() if p.requires_grad}


def softmax(case: Case):
    """Softmax attention over everything, in float64."""
    query, key, value = (t.double() for t in case.arguments())
    key, value = (t.repeat_interleave(H // G, 1) for t in (key, value))
    scale = DIM**-0.5 if case.setting.scale is None else case.setting.scale
    return oracle.softmax_attention(query, key, value, scale, causal=True)


# ---------------------------------------------------------------------------------------------------------
# Agreement
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MAPS)
def test_values_and_gradients_equal_the_oracle(name, setting, backend):
    phi, case, result, wanted, truth = expected(name, setting)
    assert not result.undefined.all()
    output = attend(phi, case, backend=backend)
    assert output.shape == (B, H, case.length, E)
    assert_outputs_close(output, result, torch.float64)
    assert_gradients_equal_the_oracle(output, result, wanted, truth=truth)


@functools.lru_cache(maxsize=1)
def expected(name, setting):
    """What the oracle says, for every backend in a row."""
    phi, case = own_map(name), make_case(name, setting).requires_grad()
    result = expect(name, phi, case)
    wanted = case.leaves() | parameters(phi)
    truth = gradients(result.output, cotangent(result.output, result.undefined), wanted)
    return phi, case, result, wanted, truth


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_lower_precision_stays_within_its_budget(name, dtype, backend):
    setting = ("decay", "holes", "span")[MAPS.index(name) % 3]
    case = make_case(name, setting, n=150).to(dtype).requires_grad()
    exact = own_map(name)
    result = expect(name, exact, case)
    phi = own_map(name, torch.float32)
    output = attend(phi, case, backend=backend)
    assert output.dtype == dtype
    logs = logs_of(name, exact, case)
    assert_outputs_close(output, result, dtype, logs)
    assert_gradients_equal_the_oracle(output, result, case.leaves(), dtype=dtype, logs=logs)
    with torch.no_grad():
        assert_outputs_close(step_through(phi, case, backend=backend)[0], result, dtype, logs, "steps")


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("setting", CARRIED)
@pytest.mark.parametrize("name", MAPS)
def test_steps_and_pieces_equal_the_oracle(name, setting, backend):
    """At any cut, pieces of nothing included, and steps after a piece."""
    phi, case = own_map(name), make_case(name, setting).rows(0, 50)
    n, state, outputs = case.length, None, []
    with torch.no_grad():
        result = expect(name, phi, case)
        stepped, stepped_state = step_through(phi, case, backend=backend)
        assert_outputs_close(stepped, result, torch.float64, what="steps")
        cut = 7 + MAPS.index(name)
        for start, stop in ((0, 0), (0, 1), (1, cut), (cut, cut), (cut, cut + 2), (cut + 2, n)):
            piece = case.rows(start, stop)
            output, state = attend(phi, piece, state=state, return_state=True, backend=backend)
            outputs.append(output)
        assert_outputs_close(torch.cat(outputs, 2), result, torch.float64, what="pieces")
        _, state = attend(phi, case.rows(0, cut), return_state=True, backend=backend)
        mixed, mixed_state = step_through(phi, case, state, cut, backend=backend)
        later = oracle.Result(*(part[:, :, cut:] for part in result))
        assert_outputs_close(mixed, later, torch.float64, what="steps after a piece")
    _, whole = attend(phi, case, return_state=True, backend=backend)
    for other in (stepped_state, mixed_state):
        assert torch.equal(other.length, whole.length)
        for part in ("mask", "first_mask", "key", "value", "first_key", "first_value"):
            assert torch.equal(getattr(other, part), getattr(whole, part)), part


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", ["plain", "span", "holes"])
@pytest.mark.parametrize("name", ["favor+", "hedgehog per head", "identity", NONE])
def test_gradients_through_steps_and_pieces_equal_the_oracle(name, setting, backend):
    phi, case = own_map(name), make_case(name, setting).rows(0, 16).requires_grad()
    result = expect(name, phi, case)
    wanted = case.leaves() | parameters(phi)
    truth = gradients(result.output, cotangent(result.output, result.undefined), wanted)
    stepped, _ = step_through(phi, case, backend=backend)
    assert_outputs_close(stepped, result, torch.float64)
    assert_gradients_equal_the_oracle(stepped, result, wanted, truth=truth)
    first, state = attend(phi, case.rows(0, 9), return_state=True, backend=backend)
    second = attend(phi, case.rows(9, 16), state=state, backend=backend)
    assert_gradients_equal_the_oracle(torch.cat([first, second], 2), result, wanted, truth=truth)


@pytest.mark.parametrize("setting", [Setting(2100, 66, 3), Setting(1100, 1080, 2)], ids=str)
@pytest.mark.parametrize("name", ["favor+", NONE])
def test_segments_of_a_long_call_equal_pieces(name, setting):
    """Long calls make the exact weights segment by segment: cuts of the caller's own give the same."""
    phi, case = own_map(name), make_case(name, setting).requires_grad()
    want, state = [], None
    for start in range(0, setting.n, 700):
        piece = case.rows(start, min(start + 700, setting.n))
        output, state = attend(phi, piece, state=state, return_state=True)
        want.append(output)
    want, got = torch.cat(want, 2), attend(phi, case)
    assert_same(got, want, torch.float64)
    leaves = case.inputs.leaves() if name == NONE else case.leaves()
    assert_gradients_same(got, want, leaves)


# ---------------------------------------------------------------------------------------------------------
# Limits
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", ["window", "sinks"])
@pytest.mark.parametrize("name", MAPS)
def test_when_every_key_is_near_it_is_softmax(name, exact):
    sizes = {"window": {"window": 40}, "sinks": {"window": 1, "sinks": 40}}[exact]
    case = make_case(name, Setting(40, **sizes))
    assert_same(attend(own_map(name), case), softmax(case), torch.float64)


@pytest.mark.parametrize("window", [1, 3, 20, 60])
def test_a_kernel_that_is_exact_gives_softmax_for_any_window(window):
    """Sixteen keys that all are centers: how the two sums are joined decides everything here."""
    generator = torch.Generator().manual_seed(3)
    kinds = 3 * torch.randn(16, DIM, generator=generator, dtype=torch.float64)
    case = make_case("favor+", Setting(60, window, scale=0.8))
    which = torch.randint(16, (B, G, 60), generator=generator)
    case = dataclasses.replace(case.change(key=kinds[which]), log_weight=torch.zeros(H, dtype=torch.float64))
    # As sharp as needed for shares of another center below 1e-14: the closest two are 1.5 apart.
    phi = reassoc.feature_maps.CodebookFeatures(DIM, 16, sharpness=100.0, scale=0.8).double()
    phi._set([(kinds, torch.eye(DIM, dtype=torch.float64))])
    assert torch.cdist(kinds, kinds).fill_diagonal_(9.0).min() > 1.0
    assert_same(attend(phi, case), softmax(case), torch.float64)


@pytest.mark.parametrize("setting", ["plain", "holes", "span"])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "trig"])
def test_a_far_weight_of_zero_leaves_window_and_sinks_alone(name, setting):
    case = make_case(name, setting)
    case = dataclasses.replace(
        case, log_weight=torch.full((H,), -math.inf, dtype=torch.float64)
    ).requires_grad()
    got, want = attend(own_map(name), case), attend(None, case)
    assert_same(got, want, torch.float64)
    (gradient,) = torch.autograd.grad(got.nansum(), case.log_weight, retain_graph=True)
    assert not gradient.any() and not gradient.isnan().any()
    assert_gradients_same(got, want, case.inputs.leaves())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["elu+1", "favor+", "codebook per head", "identity", NONE])
def test_values_of_one_give_one(name, setting):
    case = make_case(name, setting)
    case = case.change(value=torch.ones_like(case.inputs.value))
    output = attend(own_map(name), case)
    assert_same(output, torch.where(output.isnan(), output, torch.ones_like(output)), torch.float64)


def test_a_window_one_longer_is_a_sink_that_stays():
    """With every key a sink or in the window, moving the border between them changes nothing."""
    outputs = []
    for window, sinks in ((12, 0), (11, 1), (5, 7), (1, 11)):
        case = make_case("elu+1", Setting(12, window, sinks))
        outputs.append(attend(own_map("elu+1"), case))
    for output in outputs[1:]:
        assert_same(output, outputs[0], torch.float64)


def test_a_decay_of_zero_is_a_sum():
    case = make_case("favor+", "plain")
    zero = reassoc.rules.Decay(torch.zeros(G, dtype=torch.float64))
    phi = own_map("favor+")
    assert_same(attend(phi, case, rule=zero), attend(phi, case), torch.float64)


def test_a_span_longer_than_the_sequence_hides_nothing():
    case = make_case("favor+", Setting(60, 5))
    phi = own_map("favor+")
    assert_same(attend(phi, case, span=61), attend(phi, case), torch.float64)


@pytest.mark.parametrize("name", ["elu+1", "favor+", "trig"])
def test_grouped_heads_are_repeated_keys(name):
    case = make_case(name, "holes")
    gate = case.inputs.log_decay.repeat_interleave(H // G)
    key, value = (t.repeat_interleave(H // G, 1) for t in (case.inputs.key, case.inputs.value))
    phi = own_map(name)
    assert_same(
        attend(phi, case.change(key=key, value=value, log_decay=gate)), attend(phi, case), torch.float64
    )


# ---------------------------------------------------------------------------------------------------------
# What a row may not depend on
# ---------------------------------------------------------------------------------------------------------

CUT = 70


@pytest.mark.parametrize("factor", [-1.0, 10.0, 1000.0, 1e-3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MAPS)
def test_later_keys_change_nothing_before_them(name, backend, factor):
    case = make_case(name, Setting(100, 5, 3) if MAPS.index(name) % 2 else Setting(100, 5, span=15))
    changed = {}
    for leaf in ("query", "key", "value"):
        changed[leaf] = getattr(case.inputs, leaf).clone()
        changed[leaf][:, :, CUT:] *= factor
    phi = own_map(name)
    with torch.no_grad():
        want = attend(phi, case, backend=backend)[:, :, :CUT]
        got = attend(phi, case.change(**changed), backend=backend)[:, :, :CUT]
    assert want.isfinite().all()
    assert_same(got, want, torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["elu+1", "favor+", "identity", NONE])
def test_earlier_outputs_send_no_gradient_to_the_future(name, backend):
    case = make_case(name, Setting(100, 5, 3)).requires_grad()
    output = attend(own_map(name), case, backend=backend)[:, :, :CUT]
    found = torch.autograd.grad(output.square().sum(), case.arguments())
    for leaf, gradient in zip(("query", "key", "value"), found, strict=True):
        assert gradient[:, :, :CUT].any(), f"gradient of {leaf}: nothing reaches the past either"
        assert not gradient[:, :, CUT:].any(), f"gradient of {leaf} reaches the future"


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "identity", NONE])
def test_a_broken_future_key_does_not_reach_back(name, poison):
    case = make_case(name, Setting(100, 5, 3))
    key = case.inputs.key.clone()
    key[:, :, CUT] = poison
    phi = own_map(name)
    got, want = attend(phi, case.change(key=key)), attend(phi, case)
    assert_same(got[:, :, :64], want[:, :, :64], torch.float64)
    assert got[:, :, CUT].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", ["plain", "span", "holes"])
@pytest.mark.parametrize("name", MAPS)
def test_a_row_does_not_depend_on_its_batch(name, setting, backend):
    """Row 0 beside a neighbour a thousand times larger equals row 0 alone, in the whole and in steps."""
    phi, case = own_map(name), make_case(name, setting)
    everything = slice(None)
    alone = dataclasses.replace(case, inputs=case.inputs.heads(everything, everything, slice(1)))
    factor = torch.tensor([1.0, 1000.0], dtype=torch.float64).view(2, 1, 1, 1)
    beside = case.change(query=case.inputs.query * factor, key=case.inputs.key * factor)
    with torch.no_grad():
        assert_same(
            attend(phi, beside, backend=backend)[:1], attend(phi, alone, backend=backend), torch.float64
        )
        steps = [step_through(phi, c.rows(0, 20), backend=backend)[0][:1] for c in (beside, alone)]
    assert_same(*steps, torch.float64)


@pytest.mark.parametrize("name", ["elu+1", "favor+", NONE])
def test_nan_in_one_row_stays_there(name):
    case = make_case(name, "plain").requires_grad()
    key = case.inputs.key.detach().clone()
    key[1] = torch.nan
    broken = case.change(key=key.requires_grad_())
    phi = own_map(name)
    output = attend(phi, broken)
    assert_same(output[:1], attend(phi, case)[:1], torch.float64)
    gradient = torch.autograd.grad(output[0].sum(), broken.inputs.key)[0]
    assert gradient[0].isfinite().all()


# ---------------------------------------------------------------------------------------------------------
# Padding and undefined rows
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("setting", ["plain", "span", "decay"])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "codebook per head", NONE])
def test_padding_changes_nothing(name, setting, side):
    case = make_case(name, setting).rows(0, 40)
    before, after = (9, 0) if side == "left" else (0, 9)
    pad = (0, 0, before, after)
    padded = {
        leaf: torch.nn.functional.pad(getattr(case.inputs, leaf), pad, value=math.nan)
        for leaf in ("key", "value")
    }
    padded["query"] = torch.nn.functional.pad(case.inputs.query, pad, value=1.0)
    padded["key_mask"] = torch.nn.functional.pad(torch.ones(B, 40, dtype=torch.bool), (before, after))
    padded_case, phi = case.change(**padded), own_map(name)
    want = attend(phi, case)
    with torch.no_grad():
        for got in (attend(phi, padded_case), step_through(phi, padded_case)[0]):
            assert_same(got[:, :, before : before + 40], want, torch.float64)
            assert got[:, :, :before].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", ["left", "right", "holes", "holes in a span"])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "hedgehog per head", "trig", NONE])
def test_what_is_behind_the_mask_changes_nothing(name, setting, backend):
    phi, case = own_map(name), make_case(name, setting).requires_grad()
    hidden = ~case.inputs.key_mask[:, None, :, None]
    changed = {
        leaf: getattr(case.inputs, leaf).detach().masked_fill(hidden, math.nan) for leaf in ("key", "value")
    }
    poisoned = case.change(**{leaf: t.requires_grad_() for leaf, t in changed.items()})
    got, want = attend(phi, poisoned, backend=backend), attend(phi, case, backend=backend)
    assert_same(got, want, torch.float64)
    weight = cotangent(want, want[..., 0].isnan())
    truth = gradients(want, weight, case.leaves() | parameters(phi))
    for leaf, gradient in gradients(got, weight, poisoned.leaves() | parameters(phi)).items():
        assert_gradients_close(gradient, truth[leaf], torch.float64, what=leaf)
    with torch.no_grad():
        assert_same(step_through(phi, poisoned, backend=backend)[0], want, torch.float64)


@pytest.mark.parametrize("name", ["elu+1", "favor+", "identity", NONE])
def test_rows_that_see_nothing_are_as_the_policy_says(name):
    phi, case = own_map(name), make_case(name, Setting(20, 3, 2)).requires_grad()
    mask = torch.ones(B, 20, dtype=torch.bool)
    mask[0, :5], mask[1] = False, False
    case = case.change(key_mask=mask)
    nothing = torch.zeros(B, H, 20, dtype=torch.bool)
    nothing[0, :, :5], nothing[1] = True, True
    nan, zero = attend(phi, case), attend(phi, case, undefined="zero")
    assert torch.equal(nan.isnan().all(-1), nothing) and torch.equal(nan.isnan().any(-1), nothing)
    assert_same(zero, nan.nan_to_num(), torch.float64)
    wanted = list((case.leaves() | parameters(phi)).values())
    for gradient in torch.autograd.grad(zero.square().sum(), wanted, allow_unused=True):
        assert gradient is None or gradient.isfinite().all()
    with pytest.raises(ValueError, match="batch 0, head 0, position 0"):
        attend(phi, case, undefined="raise")
    stepped, state = step_through(phi, case.rows(0, 5), undefined="zero")
    assert not stepped.any()
    kept = state.clone()
    with pytest.raises(ValueError, match="batch 1, head 0, position 0"):
        take_step(phi, case.rows(5, 6), state, undefined="raise")
    assert_same_states(state, kept)


# ---------------------------------------------------------------------------------------------------------
# Hostile values
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", [-200.0, 200.0, -2000.0])
@pytest.mark.parametrize("name", MAPS)
def test_scores_far_from_zero_are_softmax_while_no_key_is_far(name, level, dtype, backend):
    """A kernel that has nothing yet has no scale either: beside it, weights of exp(-200) would vanish."""
    case = make_case(name, Setting(30, 30, 2, scale=1.0))
    query = torch.zeros_like(case.inputs.query)
    query[..., 0] = 8.0
    key = case.inputs.key / 8
    key[..., 0] = level / 8 + key[..., 0]
    case = case.change(query=query, key=key).to(dtype)
    phi = own_map(name, torch.float64 if dtype == torch.float64 else torch.float32)
    result = expect(NONE, None, case)
    logs = logs_of(NONE, None, case)
    with torch.no_grad():
        assert_outputs_close(attend(phi, case, backend=backend), result, dtype, logs)
        assert_outputs_close(step_through(phi, case, backend=backend)[0], result, dtype, logs, "steps")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e-3, 10.0, 60.0])
@pytest.mark.parametrize(
    "name", ["exp", "favor+", "calibrated favor+", "hedgehog per head", "codebook per head"]
)
def test_exponential_maps_of_any_norm(name, size, dtype, backend):
    """Near and far weights span hundreds of powers of ten, in both directions."""
    case = make_case("exp", Setting(90, 4, 2, scale=0.5), norm=size / 2).to(dtype).requires_grad()
    exact = own_map(name)
    result = expect(name, exact, case)
    phi = own_map(name, dtype)
    logs = logs_of(name, exact, case)
    output = attend(phi, case, backend=backend)
    assert_outputs_close(output, result, dtype, logs)
    slope = max(10.0, size, float(case.inputs.key.detach().abs().max()))
    assert_gradients_equal_the_oracle(output, result, case.leaves(), dtype=dtype, logs=logs, stretch=slope)
    with torch.no_grad():
        assert_outputs_close(step_through(phi, case, backend=backend)[0], result, dtype, logs, "steps")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "codebook per head"])
def test_one_huge_key(name, late):
    """It rules while it is near and is not forgotten when it is far; before it nothing changes."""
    case = make_case("exp", Setting(90, 4, 1)).to(torch.float32)
    key = case.inputs.key.clone()
    key[:, :, 60 if late else 0] *= 300.0
    case, exact = case.change(key=key), own_map(name)
    phi = own_map(name, torch.float32)
    result, logs = expect(name, exact, case), logs_of(name, exact, case)
    with torch.no_grad():
        assert_outputs_close(attend(phi, case), result, torch.float32, logs)
        assert_outputs_close(step_through(phi, case)[0], result, torch.float32, logs, "steps")


def test_a_read_of_zero_keeps_its_gradient():
    """A query of zeros reads zero through the identity map, and its gradient is that of the formula."""
    case = make_case("identity", Setting(20, 3))
    query = case.inputs.query.clone()
    query[:, :, 11] = 0.0
    case = case.change(query=query).requires_grad()
    phi = own_map("identity")
    result = expect("identity", phi, case)
    assert_gradients_equal_the_oracle(attend(phi, case), result, case.leaves())


# ---------------------------------------------------------------------------------------------------------
# Odd shapes, gradcheck, compilation, autocast
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 129])
@pytest.mark.parametrize("name", ["favor+", "elu+1", NONE])
def test_any_length(name, n):
    phi, case = own_map(name), make_case(name, "plain", n=n).requires_grad()
    output, state = attend(phi, case, return_state=True)
    assert_outputs_close(output, expect(name, phi, case), torch.float64)
    assert state.length.tolist() == [n, n]
    output.sum().backward()
    assert case.inputs.key.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["elu+1", "favor+", NONE])
def test_inputs_may_be_views_and_gradients_expanded(name, backend):
    phi, case = own_map(name), make_case(name, "plain").requires_grad()
    views = {
        leaf: getattr(case.inputs, leaf).transpose(1, 2).contiguous().transpose(1, 2)
        for leaf in ("query", "key", "value")
    }
    got, want = attend(phi, case.change(**views), backend=backend), attend(phi, case, backend=backend)
    assert_same(got, want, torch.float64)
    wanted = list(case.inputs.leaves().values())
    ones = torch.ones((), dtype=torch.float64).expand_as(want)
    for a, b in zip(
        torch.autograd.grad(got, wanted, ones), torch.autograd.grad(want.sum(), wanted), strict=True
    ):
        assert_gradients_close(a, b, torch.float64, floor=1e-3)
    with torch.no_grad():
        one = case.inputs.key[:, :, :1].expand(-1, -1, 30, -1)
        repeated = case.rows(0, 30).change(key=one)
        fresh = repeated.change(key=one.contiguous())
        assert_same(
            attend(phi, repeated, backend=backend), attend(phi, fresh, backend=backend), torch.float64
        )


@pytest.mark.parametrize("only", ["query", "key", "value", "log_weight"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_any_one_input(backend, only):
    case, phi = make_case("favor+", "plain"), own_map("favor+")
    every = case.requires_grad()
    alone = dataclasses.replace(case, inputs=case.inputs.requires_grad((only,)))
    if only == "log_weight":
        alone = dataclasses.replace(alone, log_weight=case.log_weight.clone().requires_grad_())
    found = []
    for c in (every, alone):
        output = attend(phi, c, backend=backend)
        found.append(torch.autograd.grad(output.square().sum(), c.leaves()[only])[0])
    assert_gradients_close(found[1], found[0], torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "setting", [Setting(7, 2, 2, decay=True), Setting(7, 2, span=4, mask="left")], ids=str
)
@pytest.mark.parametrize("name", ["elu+1", "favor+", "codebook per head", NONE])
def test_gradcheck(name, setting, backend):
    phi, case = own_map(name), make_case(name, setting).requires_grad()
    wanted = case.leaves() | parameters(phi)
    names = list(wanted)

    def run(*tensors):
        given = dict(zip(names, tensors, strict=True))
        inputs = {k: given.pop(k) for k in case.inputs.leaves()}
        changed = dataclasses.replace(case.change(**inputs), log_weight=given.pop("log_weight"))
        return attend(phi, changed, backend=backend, undefined="zero")

    # The map's parameters are read from the map itself: gradcheck moves them in place.
    assert torch.autograd.gradcheck(run, tuple(wanted.values()), fast_mode=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@pytest.mark.parametrize(
    ("name", "setting"),
    [("favor+", "decay"), ("codebook per head", "span"), (NONE, "holes")],
)
def test_compile_gives_the_same(name, setting):
    """In one graph, values and gradients."""
    torch._dynamo.reset()
    phi = own_map(name, torch.float32)
    case = make_case(name, setting).to(torch.float32).requires_grad()

    def run(query, key, value, weight):
        changed = dataclasses.replace(case.change(query=query, key=key, value=value), log_weight=weight)
        return attend(phi, changed)

    want = attend(phi, case)
    got = torch.compile(run, fullgraph=True)(*case.arguments(), case.log_weight)
    assert_same(got, want, torch.float32)
    leaves = {k: v for k, v in case.leaves().items() if k != "log_decay"}
    assert_gradients_same(got, want, leaves, torch.float32)


@pytest.mark.parametrize("name", ["elu+1", "favor+", "codebook per head", NONE])
def test_autocast_leaves_the_arithmetic_alone(name):
    case, phi = make_case(name, "plain").to(torch.bfloat16), own_map(name, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = attend(phi, case, return_state=True)
        stepped, _ = step_through(phi, case)
    assert output.dtype == torch.bfloat16 and state.key.dtype == torch.bfloat16
    assert torch.equal(output, attend(phi, case))
    exact = own_map(name)
    result, logs = expect(name, exact, case), logs_of(name, exact, case)
    assert_outputs_close(stepped, result, torch.bfloat16, logs)


# ---------------------------------------------------------------------------------------------------------
# The state
# ---------------------------------------------------------------------------------------------------------


def numbers(state):
    parts = list(state._tensors().values())
    if state.memory is not None:
        memory = state.memory
        parts += [t for t in (memory._memory, memory._scale, memory._length) if t is not None]
        parts += [] if memory.tail is None else [t for t in vars(memory.tail).values() if t is not None]
    return [part.clone() for part in parts]


def assert_same_states(mine, theirs):
    pairs = list(zip(numbers(mine), numbers(theirs), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("setting", ["plain", "span", "holes"])
@pytest.mark.parametrize("name", ["elu+1", "favor+", "codebook per head", NONE])
def test_a_kept_state_is_a_snapshot_and_a_step_advances_its_own(name, setting):
    phi, case = own_map(name), make_case(name, setting).rows(0, 30)
    with torch.no_grad():
        _, state = attend(phi, case.rows(0, 10), return_state=True)
        _, state = attend(phi, case.rows(10, 10), state=state, return_state=True)
        for _ in range(2):  # made by a call, and then by steps that may write in place
            seen = int(state.length.max())
            kept = [state.clone(), state.detach(), state.reorder(torch.tensor([0, 1])), state.to("cpu")]
            kept.append(attend(phi, case.rows(0, 0), state=state, return_state=True)[1])
            before = [numbers(one) for one in kept]
            for t in range(10, 14):
                take_step(phi, case.rows(t, t + 1), state)
            attend(phi, case.rows(14, 20), state=state)
            assert int(state.length.max()) > seen
            for one, were in zip(kept, before, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(numbers(one), were, strict=True))
        # and the other way round: a step of the copy leaves the original alone
        were = numbers(state)
        for copy in (
            state.clone(),
            state.detach(),
            attend(phi, case.rows(0, 0), state=state, return_state=True)[1],
        ):
            take_step(phi, case.rows(20, 21), copy)
            take_step(phi, case.rows(21, 22), copy)
            assert all(torch.equal(a, b) for a, b in zip(numbers(state), were, strict=True))


@pytest.mark.parametrize("setting", ["plain", "span", "holes"])
@pytest.mark.parametrize("name", ["favor+", NONE])
def test_reorder_picks_sequences(name, setting):
    phi, case = own_map(name), make_case(name, setting).rows(0, 40)
    index = torch.tensor([1, 0, 1])

    def picked(c):
        mask = c.inputs.key_mask
        moved = {leaf: getattr(c.inputs, leaf)[index] for leaf in ("query", "key", "value")}
        return c.change(**moved, key_mask=None if mask is None else mask[index])

    with torch.no_grad():
        _, state = attend(phi, case.rows(0, 25), return_state=True)
        stepped, _ = step_through(phi, picked(case), state.reorder(index), 25)
        assert_same(stepped, attend(phi, picked(case))[:, :, 25:], torch.float64)


@pytest.mark.parametrize(
    ("name", "span", "steps"),
    [("elu+1", None, 10_000), ("favor+", None, 500), ("favor+", 12, 500), (NONE, None, 500)],
)
def test_thousands_of_steps_keep_the_size_and_the_numbers(name, span, steps):
    case = make_case(name, Setting(steps, 5, span=span)).to(torch.float32)
    exact, phi = own_map(name), own_map(name, torch.float32)
    with torch.inference_mode():
        _, state = attend(phi, case.rows(0, 8), return_state=True)
        take_step(phi, case.rows(8, 9), state)
        size = state.nbytes
        for t in range(9, steps):
            last = take_step(phi, case.rows(t, t + 1), state)
        assert state.nbytes == size and state_bytes(state) <= size
        assert state.length.tolist() == [steps] * B
        want = attend(exact, case.to(torch.float64))[:, :, -1:]
    assert_same(last, want, torch.float32)


def test_a_state_does_not_keep_its_piece_alive():
    case, phi = make_case("favor+", Setting(3000, 5, 2)), own_map("favor+")
    for span in (None, 12):
        sinks = 0 if span else 2
        _, state = attend(phi, case, sinks=sinks, span=span, return_state=True)
        assert state_bytes(state) == state.nbytes


class Largest(TorchDispatchMode):
    """Sizes of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for part in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(part, torch.Tensor):
                self.most = max(self.most, part.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("backend", ["torch", *(["native"] if "native" in BACKENDS else [])])
@pytest.mark.parametrize(("name", "span"), [("elu+1", None), ("favor+", None), ("favor+", 70), (NONE, None)])
def test_memory_is_linear_in_the_length(name, span, backend):
    """Forward and backward: no tensor is larger than a constant times N, and none is N x N."""
    sizes = []
    for n in (8_192, 32_768):
        phi = own_map(name, torch.float32)
        query, key, value = (torch.randn(1, 1, n, size) for size in (DIM, DIM, E))
        mode = Largest()
        with mode:
            leaves = [t.clone().requires_grad_() for t in (query, key, value)]
            sinks = 0 if span else 2
            output = reassoc.hybrid_attention(
                *leaves, phi, window=16, sinks=sinks, span=span, backend=backend
            )
            output.sum().backward()
        sizes.append(mode.most)
    assert sizes[1] <= 4.1 * sizes[0]
    assert sizes[1] < 32_768 * 4 * 256
