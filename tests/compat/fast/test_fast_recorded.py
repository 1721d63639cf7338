"""``legacy="exact"`` against results recorded with the original (benchmarks/record_fast_transformers.py)."""

from pathlib import Path

import fast_cases
import pytest
import torch
from safetensors import safe_open

DATA = Path(__file__).parent / "data"
# One step at a time there is no sequence on axis 1: the original warns, and takes the heads for one.
axis = pytest.mark.filterwarnings("ignore:Favor.stabilize=True. takes axis 1")


def read(name):
    """Inputs, weights and results of one case."""
    parts = {"input": {}, "weight": {}, "result": {}}
    with safe_open(DATA / f"{name.replace(' ', '_')}.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            part, _, rest = key.partition(" ")
            parts[part][rest] = file.get_tensor(key)
    return parts["input"], parts["weight"], parts["result"]


def test_every_case_is_recorded_and_the_whole_is_small():
    """A case that nobody recorded would pass for tested; data of megabytes would not belong here."""
    files = {path.stem.replace("_", " "): path.stat().st_size for path in DATA.glob("*.safetensors")}
    assert files.keys() == set(fast_cases.RECORDED)
    assert sum(files.values()) < 1_000_000


@axis
@pytest.mark.parametrize("name", fast_cases.RECORDED)
def test_outputs_states_and_gradients_are_the_original_s(name):
    """Its weights load strictly, and ours have the same names and shapes, so that they load there."""
    given, weights, results = read(name)
    case = fast_cases.CASES[name]
    model = fast_cases.build(fast_cases.OURS, case)
    model.load_state_dict(weights, strict=True)
    ours = model.state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in weights.items()}
    fast_cases.assert_repeats(fast_cases.run(fast_cases.OURS, model, case, given), results)


@axis
def test_a_changed_epsilon_would_show():
    """The tolerance is below what the original's epsilon changes where denominators are small."""
    given, weights, results = read("linear favor-stabilized")
    case = fast_cases.CASES["linear favor-stabilized"]
    model = fast_cases.build(fast_cases.OURS, case)
    model.load_state_dict(weights)
    for layer in model.layers:
        layer.attention.inner_attention.eps = 0.0
    with pytest.raises(AssertionError, match="of the largest entry"):
        fast_cases.assert_repeats(fast_cases.run(fast_cases.OURS, model, case, given), results)


@pytest.mark.parametrize("name", [n for n in fast_cases.RECORDED if n.endswith((" elu", " smoothed"))])
def test_the_clean_operator_is_the_original_without_its_epsilon(name):
    """For maps that both compute alike, 1e-6 beside denominators above 1 is all that differs."""
    given, weights, results = read(name)
    case = fast_cases.CASES[name]
    model = fast_cases.build(fast_cases.OURS, case, legacy=None)
    model.load_state_dict(weights, strict=True)
    got = fast_cases.run(fast_cases.OURS, model, case, given)
    torch.testing.assert_close(got["output"], results["output"], rtol=1e-4, atol=1e-4)
