"""States: snapshots, copies, files, gradients through them, and the refusal of strange ones."""

import json

import pytest
import torch
from nn_cases import BUDGET, assert_near, config, language_model, tokens
from safetensors import safe_open
from safetensors.torch import save_file

from reassoc.nn import ModelState

DOUBLE = torch.float64
MODELS = {
    "linear": {},
    "exponential": {"feature_map": "favor+", "rule": "decay"},
    "delta convolution": {"rule": "delta", "convolution": 3},
    "window": {"window": 4, "convolution": 2},
    "rotated": {"position": "rotary-after", "rule": "decay", "decay": "feature"},
    "rotated without denominator": {"position": "rotary-after", "normalize": "sum", "convolution": 2},
    "rotated window": {"position": "rotary-after", "window": 4},
    "softmax": {"mixer": "softmax"},
    "softmax rotary": {
        "mixer": "softmax",
        "convolution": 3,
        "position": "rotary",
        "key_heads": 2,
    },
}
IDS = tokens(3, 16)


def made(name, dtype=DOUBLE, **more):
    options = MODELS[name] | more
    feature_map = options.get("feature_map", "elu+1")
    return language_model(
        config(feature_map, **{k: v for k, v in options.items() if k != "feature_map"}), dtype
    )


def numbers(states):
    return {name: tensor.clone() for name, tensor in states.tensors()[0].items()}


def assert_equal(states, want):
    got = states.tensors()[0]
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_a_kept_state_is_a_snapshot(name):
    model = made(name)
    with torch.no_grad():
        _, first = model(IDS[:, :5], return_states=True)
        kept = numbers(first)
        # Going on in a call leaves it as it was, and so does advancing what that call gave.
        _, second = model(IDS[:, 5:9], states=first, return_states=True)
        for i in range(9, 12):
            model.step(IDS[:, i : i + 1], second)
        assert_equal(first, kept)
        # Copies of every kind, made between steps that write in place.
        copies = {
            "clone": second.clone(), "detach": second.detach(), "reorder": second.reorder(torch.arange(3)),
        }  # fmt: skip
        written, about = second.tensors()
        unpacked = ModelState.from_tensors(written, about)
        kept = numbers(second)
        for i in range(12, 15):
            model.step(IDS[:, i : i + 1], second)
        for what, copy in copies.items():
            assert_equal(copy, kept), what
        assert_equal(unpacked, kept)
        for part, tensor in written.items():
            assert torch.equal(tensor, kept[part]), part
        # And the other way round: advancing a copy leaves the original, and the other copies.
        after = numbers(second)
        for copy in copies.values():
            model.step(IDS[:, :1], copy)
            assert_equal(second, after)
        model.step(IDS[:, :1], unpacked)
        assert_equal(second, after)
        for part, tensor in written.items():
            assert torch.equal(tensor, kept[part]), part


@pytest.mark.parametrize("name", MODELS)
def test_tensors_of_a_state_are_a_snapshot(name):
    """Nothing but `tensors` is called between two steps that write in place."""
    model = made(name)
    with torch.no_grad():
        _, states = model(IDS[:, :5], return_states=True)
        for i in range(5, 8):
            model.step(IDS[:, i : i + 1], states)
        written, _ = states.tensors()
        kept = {part: tensor.clone() for part, tensor in written.items()}
        model.step(IDS[:, 8:9], states)
    assert all(torch.equal(tensor, kept[part]) for part, tensor in written.items())
    assert any(not torch.equal(tensor, kept[part]) for part, tensor in states.tensors()[0].items())


@pytest.mark.parametrize("name", MODELS)
def test_reordered_states_go_on_as_their_rows(name):
    model = made(name)
    index = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        _, states = model(IDS[:, :7], return_states=True)
        picked = states.reorder(index)
        got, picked = model(IDS[index, 7:9], states=picked, return_states=True)
        got = torch.cat([got, model.step(IDS[index, 9:10], picked)], 1)
        assert_near(got, model(IDS[:, :10])[index, 7:], BUDGET[DOUBLE])
    assert picked.length.tolist() == [10] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_file_brings_the_state_back(name, dtype, tmp_path):
    model = made(name, dtype)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, :3] = False
    with torch.no_grad():
        for options in ({}, {"key_mask": mask}):
            _, states = model(IDS[:, :7], return_states=True, **options)
            tensors, about = states.tensors()
            save_file(tensors, tmp_path / "state.safetensors", {"about": about})
            with safe_open(tmp_path / "state.safetensors", framework="pt") as file:
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                back = ModelState.from_tensors(found, file.metadata()["about"])
            assert back.nbytes == states.nbytes
            assert torch.equal(back.length, states.length)
            segment = [model(IDS[:, 7:11], states=s, return_states=True) for s in (states, back)]
            assert torch.equal(segment[0][0], segment[1][0])
            for i in range(11, 16):
                one, two = (model.step(IDS[:, i : i + 1], s) for _, s in segment)
                assert torch.equal(one, two)


def test_the_mask_of_the_caller_is_no_part_of_a_state():
    model = made("softmax")
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[1, :3] = False
    _, states = model(IDS, key_mask=mask, return_states=True)
    kept = numbers(states)
    mask.fill_(False)
    assert_equal(states, kept)


def test_one_token_of_one_sequence_can_be_saved(tmp_path):
    """Keys and values of a single head are then two parts of one piece of memory."""
    model = made("softmax", heads=1)
    _, states = model(IDS[:1, :1], return_states=True)
    save_file(states.tensors()[0], tmp_path / "state.safetensors")


def damaged():
    tensors, about = made("delta convolution")(IDS, return_states=True)[1].tensors()
    rotated, rotated_about = made("rotated")(IDS, return_states=True)[1].tensors()
    kinds = json.loads(about)

    def changed(**fields):
        return json.dumps([kinds[0] | fields, kinds[1]])

    nested = json.loads(rotated_about)
    return {
        "no JSON": (tensors, "{"),
        "empty": (tensors, ""),
        "no layers": (tensors, "[]"),
        "a number": (tensors, "5"),
        "nothing": (tensors, "null"),
        "an object": (tensors, '{"kind": "linear"}'),
        "deep": (tensors, "[" * 100_000),
        "unknown kind": (tensors, changed(kind="hash")),
        "list for a kind": (tensors, changed(kind=[])),
        "origin is no JSON": (tensors, changed(origin="?")),
        "origin has other fields": (tensors, changed(origin='{"color": 1}')),
        "origin is a list": (tensors, changed(origin="[]")),
        "origin is missing": (tensors, json.dumps([{"kind": "linear"}])),
        "kind of another": (tensors, changed(kind="softmax")),
        "no tensors": ({}, about),
        "a tensor is missing": ({k: t for k, t in tensors.items() if k != "1.memory.memory"}, about),
        "no length": ({k: t for k, t in tensors.items() if k != "0.memory.length"}, about),
        "rotated of a list": (rotated, json.dumps([nested[0] | {"origin": "[]"}])),
        "rotated of nothing": (rotated, json.dumps([nested[0] | {"origin": "{}"}])),
        "rotated of a number": (rotated, json.dumps([nested[0] | {"origin": '{"map": 3}'}])),
        "denominator is missing": (
            rotated,
            json.dumps(
                [
                    part
                    | {
                        "origin": json.dumps(
                            {k: v for k, v in json.loads(part["origin"]).items() if k != "denominator"}
                        )
                    }
                    for part in nested
                ]
            ),
        ),
        "numerator is missing": ({k: t for k, t in rotated.items() if "numerator" not in k}, rotated_about),
    }


@pytest.mark.parametrize("what", damaged())
def test_what_is_no_state_is_refused(what):
    tensors, about = damaged()[what]
    with pytest.raises(ValueError, match="these tensors are not a model state"):
        ModelState.from_tensors(tensors, about)


def test_a_file_without_recent_inputs_is_refused_by_the_model():
    model = made("delta convolution")
    tensors, about = model(IDS, return_states=True)[1].tensors()
    short = ModelState.from_tensors({k: t for k, t in tensors.items() if "recent" not in k}, about)
    with pytest.raises(ValueError, match="recent inputs None"):
        model(IDS, states=short)
    with pytest.raises(ValueError, match="recent inputs None"):
        model.step(IDS[:, :1], short)


OTHERS = {
    "rule": ("linear", {"rule": "decay"}, "rule='decay'"),
    "map": ("linear", {"feature_map": "relu"}, "feature_map='relu"),
    "normalization": ("linear", {"normalize": "none"}, "normalize='none'"),
    "window": ("linear", {"window": 4}, "window=4"),
    "seed": ("exponential", {"map_options": {"num_features": 6, "seed": 8}}, "seed="),
    "heads": ("linear", {"key_heads": 2}, "key heads"),
    "kernel": ("delta convolution", {"convolution": 2}, "recent inputs"),
    "mixer": ("linear", {"mixer": "softmax"}, "KeyValueCache"),
    "map of rotated features": ("rotated", {"feature_map": "relu"}, "feature_map='relu"),
    "rotation": ("linear", {"position": "rotary-after"}, "RotatedState"),
    "softmax heads": ("softmax", {"key_heads": 2}, "state holds keys"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_state_of_another_model_is_refused(what):
    name, difference, message = OTHERS[what]
    model, other = made(name), made(name, **difference)
    _, states = other(IDS[:, :4], return_states=True)
    kept = numbers(states)
    for call in (lambda: model(IDS[:, 4:], states=states), lambda: model.step(IDS[:, 4:5], states)):
        with pytest.raises(ValueError) as found:
            call()
        assert message in str(found.value)
    assert_equal(states, kept)


def test_states_of_more_layers_or_sequences_are_refused():
    model, deep = made("linear"), language_model(config(), layers=3)
    states = deep(IDS, return_states=True)[1]
    for call in (lambda: model(IDS, states=states), lambda: model.step(IDS[:, :1], states)):
        with pytest.raises(ValueError, match="states have 3 layers, this model has 2"):
            call()
    for name in ("linear", "softmax", "rotated", "softmax rotary"):
        model = made(name)
        states = model(IDS, return_states=True)[1]
        with pytest.raises(ValueError, match="another batch"):
            model(IDS[:1], states=states)
        with pytest.raises(ValueError, match="another batch"):
            model.step(IDS[:1, :1], states)


# ---------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------


def tensors_in(states):
    for layer in states.layers:
        parts = vars(layer.memory) if hasattr(layer.memory, "__dict__") else {}
        inner = [m for m in parts.values() if hasattr(m, "_memory")] or [layer.memory]
        for memory in inner:
            if hasattr(memory, "_memory"):
                yield memory._memory
                if memory.tail is not None:
                    yield from (t for t in vars(memory.tail).values() if t is not None)
            else:
                yield from (memory.key, memory.value)
        if layer.recent is not None:
            yield layer.recent


@pytest.mark.parametrize("name", MODELS)
def test_detached_states_carry_no_graph(name):
    model = made(name)
    _, states = model(IDS[:, :5], return_states=True)
    assert any(t.requires_grad for t in tensors_in(states))
    assert not any(t.requires_grad for t in tensors_in(states.detach()))
    with torch.no_grad():
        _, states = model(IDS[:, :5], return_states=True)
    assert not any(t.requires_grad for t in tensors_in(states))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_through_a_state_are_those_of_the_whole(name):
    model = made(name)
    model(IDS).square().sum().backward()
    want = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    states, parts = None, []
    for start, stop in ((0, 3), (3, 4), (4, 11), (11, 16)):
        logits, states = model(IDS[:, start:stop], states=states, return_states=True)
        parts.append(logits)
    torch.cat(parts, 1).square().sum().backward()
    for key, parameter in model.named_parameters():
        error = (parameter.grad - want[key]).abs().max() / want[key].abs().max()
        assert error <= 3 * BUDGET[DOUBLE], f"{key}: {error:.3g}"


@pytest.mark.parametrize("name", ["linear", "softmax", "delta convolution"])
def test_training_over_segments_needs_one_segment_at_a_time(name):
    """Backward of a segment after that of the one before: nothing of the freed graph is needed."""
    model = made(name)
    states, whole = None, model(IDS)
    for start in range(0, 16, 4):
        logits, states = model(IDS[:, start : start + 4], states=states, return_states=True)
        assert_near(logits, whole[:, start : start + 4], BUDGET[DOUBLE])
        logits.square().sum().backward()
        states = states.detach()
