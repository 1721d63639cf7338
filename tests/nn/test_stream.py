"""Prefill, steps and segments with carried state give what the whole gives, at every position."""

import gc
import os

import pytest
import torch
from nn_cases import (
    BUDGET,
    EXTRAS,
    HEADS,
    MAPS,
    RULE_CASES,
    SIGNED,
    SIGNED_FACTOR,
    VOCABULARY,
    E,
    assert_near,
    attention_position,
    config,
    language_model,
    pick,
    positions,
    possible,
    streamed,
    tokens,
)

from reassoc.nn import AttentionConfig, LanguageModel, LanguageModelConfig

DOUBLE = torch.float64


def check(model, ids, allowed, what):
    with torch.no_grad():
        full = model(ids)
        parts, states = streamed(model, ids)
        alone = model(ids[:, -1:])
    assert_near(parts, full, allowed, what)
    assert states.length.tolist() == [ids.shape[1]] * len(ids)
    gap = (alone[:, 0] - full[:, -1]).abs().max() / full.abs().max()
    assert gap > 100 * allowed, f"{what}: what was carried does not matter, so that nothing was tested"


@pytest.mark.parametrize(("rule", "decay"), RULE_CASES)
@pytest.mark.parametrize("name", MAPS)
def test_parts_equal_the_whole(name, rule, decay):
    allowed = BUDGET[DOUBLE] * (SIGNED_FACTOR if name in SIGNED else 1.0)
    place = MAPS.index(name) * len(RULE_CASES) + RULE_CASES.index((rule, decay))
    for number, (position, more) in enumerate(positions()):
        if not possible(name, position):
            continue  # an odd number of features cannot be rotated in pairs
        options = {"rule": rule, "decay": decay, "position": attention_position(position)}
        extra = pick(place + number, rule)
        model = language_model(config(name, **options | extra), **more)
        check(model, tokens(2, 20), allowed, f"{name} {options} {extra} {position}")


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("position", ["none", "rotary", "rotary-after", "learned"])
def test_parts_equal_the_whole_with_everything_around(extra, position):
    more = {"learned_positions": 40} if position == "learned" else {}
    for rule in ("decay", "sum" if "window" in extra else "gated-delta"):
        chosen = config("favor+", rule=rule, position=attention_position(position), **extra)
        check(language_model(chosen, **more), tokens(2, 20), BUDGET[DOUBLE], f"{rule} {extra} {position}")


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("position", ["none", "rotary", "learned"])
def test_softmax_parts_equal_the_whole(extra, position):
    more = {"learned_positions": 40} if position == "learned" else {}
    chosen = config(mixer="softmax", position=attention_position(position), **extra)
    check(language_model(chosen, **more), tokens(2, 20), BUDGET[DOUBLE], f"{extra} {position}")


@pytest.mark.parametrize(("rule", "decay"), RULE_CASES)
@pytest.mark.parametrize("name", ["elu+1", "favor+", "dpfp-1"])
def test_parts_equal_the_whole_in_float32(name, rule, decay):
    for number, position in enumerate(("none", "rotary", "rotary-after")):
        extra = pick(number, rule)
        chosen = config(name, rule=rule, decay=decay, position=position, **extra)
        model = language_model(chosen, torch.float32)
        # Decayed and delta states have features and gates of their own rounding: as large as the budget.
        check(model, tokens(2, 20), BUDGET[torch.float32], f"{name} {rule} {decay} {position} {extra}")


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("rule", ["sum", "gated-delta"])
def test_named_backends_stream(rule, backend):
    check(language_model(config(rule=rule, backend=backend)), tokens(2, 20), BUDGET[DOUBLE], backend)


@pytest.mark.parametrize(
    "options", [{}, {"position": "rotary-after", "convolution": 3}, {"mixer": "softmax"}]
)
def test_a_position_at_a_time_from_nothing(options):
    model = language_model(config(**options))
    ids = tokens(2, 9)
    with torch.no_grad():
        full = model(ids)
        nothing, states = model(ids[:, :0], return_states=True)
        assert nothing.shape == (2, 0, VOCABULARY)
        assert states.length.tolist() == [0, 0]
        got = torch.cat([model.step(ids[:, i : i + 1], states) for i in range(9)], 1)
    assert_near(got, full, BUDGET[DOUBLE])


@pytest.mark.parametrize("mixer", ["linear", "softmax"])
def test_steps_carry_gradients(mixer):
    model = language_model(config(mixer=mixer, convolution=2, position="rotary"))
    ids = tokens(2, 6)
    model(ids).square().sum().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits, states = model(ids[:, :2], return_states=True)
    parts = [logits, *(model.step(ids[:, i : i + 1], states) for i in range(2, 6))]
    torch.cat(parts, 1).square().sum().backward()
    for name, parameter in model.named_parameters():
        error = (parameter.grad - want[name]).abs().max() / want[name].abs().max()
        assert error <= 3 * BUDGET[DOUBLE], f"{name}: {error:.3g}"


# ---------------------------------------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"rule": "delta", "convolution": 3}, {"mixer": "softmax", "position": "rotary"}]
)
def test_generate_is_the_argmax_of_the_full_forward(options):
    model = language_model(config(**options))
    ids = tokens(3, 4)
    got = torch.stack(list(model.generate(ids, 12)), 1)
    for number in range(12):
        whole = torch.cat([ids, got[:, :number]], 1)
        assert torch.equal(model(whole)[:, -1].argmax(-1), got[:, number])
    assert len(got.unique()) > 1


@pytest.mark.parametrize("stop", [5, 12])
@pytest.mark.parametrize("mixer", ["linear", "softmax"])
def test_generate_goes_on_from_states(mixer, stop):
    """Whether a caller stops early or takes all: the states have read all but the last token given."""
    model = language_model(config(mixer=mixer, convolution=2))
    ids = tokens(2, 4)
    whole = torch.stack(list(model.generate(ids, 12)), 1)
    _, states = model(ids[:, :2], return_states=True)
    begun = []
    for token in model.generate(ids[:, 2:], 12 if stop == 12 else 100, states=states):
        begun.append(token)
        if len(begun) == stop:
            break
    assert states.length.tolist() == [4 + stop - 1] * 2
    rest = list(model.generate(begun[-1][:, None], 4, states=states))
    both = torch.stack([*begun, *rest], 1)
    assert torch.equal(both[:, :12], whole[:, : both.shape[1]])


def test_samples_are_repeatable_and_follow_the_temperature():
    model = language_model(config())
    ids = tokens(2, 4)

    def sample(temperature, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.stack(list(model.generate(ids, 20, temperature=temperature, generator=generator)), 1)

    assert torch.equal(sample(1.0, 3), sample(1.0, 3))
    assert not torch.equal(sample(1.0, 3), sample(1.0, 4))
    cold = torch.stack(list(model.generate(ids, 20)), 1)
    assert torch.equal(sample(1e-4, 3), cold)
    assert not torch.equal(sample(1.0, 3), cold)


def test_samples_have_the_probabilities_of_the_model():
    model = language_model(config())
    ids = tokens(1, 4).expand(4000, 4)
    first = next(model.generate(ids, 1, temperature=2.0, generator=torch.Generator().manual_seed(0)))
    wanted = (model(ids[:1])[0, -1] / 2.0).softmax(-1)
    found = first.bincount(minlength=VOCABULARY) / 4000
    assert ((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / 4000).sqrt() + 1e-3).all()


def test_generation_needs_no_gradient_and_happens_when_asked_for():
    model = language_model(config())
    calls = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    made = model.generate(tokens(1, 3), 4)
    assert calls == []
    token = next(made)
    assert calls == ["forward"]
    assert token.shape == (1,) and not token.requires_grad
    assert list(model.generate(tokens(1, 3), 0)) == []


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tiny(**options) -> LanguageModel:
    torch.manual_seed(0)
    attention = AttentionConfig(heads=1, **options)
    return LanguageModel(
        LanguageModelConfig(vocabulary=5, width=8, layers=1, hidden=8, attention=attention)
    ).eval()


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="reads the memory of the process from /proc"
)
def test_memory_after_100_000_tokens_is_that_after_100(monkeypatch):
    # The poison of tests/conftest.py is not needed here, and a fourth of the time.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    model = tiny()
    _, states = model(tokens(1, 3) % 5, return_states=True)
    generated = model.generate(tokens(1, 1) % 5, 100_000, states=states)
    for number, _ in enumerate(generated, start=1):
        if number == 100:
            gc.collect()
            held, size = states.nbytes, resident()
    assert number == 100_000
    assert states.length.item() == 3 + 100_000
    assert states.nbytes == held
    gc.collect()
    # A cache of these keys and values would take 6.4 MB: 100,000 tokens of 16 numbers.
    assert resident() - size < 3e6, f"{(resident() - size) / 1e6:.1f} MB more than after 100 tokens"


def test_softmax_memory_grows_and_says_so():
    model = tiny(mixer="softmax")
    _, states = model(tokens(1, 3) % 5, return_states=True)
    held = states.nbytes
    for _ in model.generate(tokens(1, 1) % 5, 100, states=states):
        pass
    assert states.nbytes - held == 100 * 16 * 4  # a key and a value of 8 float32 numbers a token


@pytest.mark.parametrize("options", [{"rule": "gated-delta", "decay": "feature"}, {"window": 5},
                                     {"position": "rotary-after", "convolution": 4}])  # fmt: skip
def test_other_states_keep_their_size(options):
    model = tiny(**options)
    _, states = model(tokens(1, 3) % 5, return_states=True)
    sizes = []
    for _ in model.generate(tokens(1, 1) % 5, 200, states=states):
        sizes.append(states.nbytes)
    assert len(set(sizes[1:])) == 1


def test_sizes_of_states():
    model = language_model(config("elu+1", convolution=3, key_heads=2), torch.float32)
    _, states = model(tokens(2, 7), return_states=True)
    memory = 2 * 2 * 6 * (E + 1) * 4 + 2 * 8
    recent = 2 * 2 * (HEADS * 6 + 2 * (6 + E)) * 4
    assert states.nbytes == 2 * (memory + recent)
