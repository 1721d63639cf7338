"""Associative recall: the task is what the paper describes, and small models learn it or cannot."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib")

from reassoc.lab import InputError
from reassoc.lab._study import render
from reassoc.lab.recall import Settings, Size, forget_parts, recall, size, study
from reassoc.lab.recall import run as run_module
from reassoc.lab.recall.data import IGNORED, POWER, draw
from reassoc.lab.recall.model import build, state_bytes

TINY = Settings(
    recipes=("softmax:conv=2", "elu+1:delta:conv=2"), head_dims=(8,), seeds=(0,), train=(Size(8, 2),),
    test=(Size(8, 2), Size(12, 3)), vocabulary=16, width=32, layers=1, heads=1, batch=32, steps=3, every=2,
    count=20,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """These models are too small to share: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_key_is_asked_once_and_its_label_is_its_value():
    tokens, labels = draw(Size(40, 6), 50, 32, chance())
    assert tokens.shape == labels.shape == (50, 40)
    for row, wanted in zip(tokens.tolist(), labels.tolist(), strict=True):
        keys, values = row[0:12:2], row[1:12:2]
        assert len(set(keys)) == len(set(values)) == 6
        assert all(1 <= key < 16 for key in keys) and all(16 <= value < 32 for value in values)
        asked = {at: value for at, value in enumerate(wanted) if value != IGNORED}
        assert min(asked) >= 12 and all((at - 12) % 2 == 0 for at in asked)
        assert sorted(row[at] for at in asked) == sorted(keys)
        assert all(dict(zip(keys, values, strict=True))[row[at]] == value for at, value in asked.items())


def test_the_smallest_sequence_is_full_and_everything_else_is_random():
    tokens, labels = draw(Size(8, 2), 400, 16, chance())
    assert torch.equal((labels != IGNORED).nonzero()[:, 1].unique(), torch.tensor([4, 6]))
    filler = tokens[:, [5, 7]].flatten().bincount(minlength=16)
    assert filler.min() > 0  # 800 draws of 16 tokens: one that never came has a probability of 1e-21


def test_the_gaps_of_questions_follow_the_power_law():
    # One pair: its place is one draw of the law itself.
    count = 20_000
    _, labels = draw(Size(22, 1), count, 16, chance())
    places = ((labels != IGNORED).nonzero()[:, 1] - 2) // 2
    weights = torch.arange(1, 11, dtype=torch.float64) ** (POWER - 1)
    expected = weights / weights.sum()
    found = places.bincount(minlength=10) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() < 5 * error).all()


def test_validation_test_and_training_are_different_sequences(monkeypatch):
    seen = []
    real = run_module.draw

    def recorded(wanted, count, vocabulary, generator):
        seen.append(generator.initial_seed())
        return real(wanted, count, vocabulary, generator)

    monkeypatch.setattr(run_module, "draw", recorded)
    recall(replace(TINY, recipes=("softmax",), seeds=(0, (1 << 31) - 1)))
    assert len(set(seen)) == 4  # two runs, validation, test


def learned(text, steps):
    """Accuracy of a recipe on two pairs out of seven keys and eight values."""
    settings = replace(
        TINY, recipes=(text,), test=(Size(8, 2),), steps=steps, every=25, stop=0.97, count=200, rates=(2e-2,)
    )
    row = recall(settings).rows[0]
    return row["accuracy"], row


@pytest.mark.parametrize("text", ["softmax:conv=2", "dpfp-1:delta:conv=2"])
def test_small_models_learn_a_small_task(text):
    accuracy, row = learned(text, 400)
    assert accuracy > 0.9 and row["ended"] == "stopped" and row["steps"] < 400


def test_without_neighbors_the_same_model_can_only_guess():
    # One layer whose keys do not know the token before them cannot tie a value to its key: the best it can
    # do is to name one of the two values it saw. Five standard errors of 400 answers above a half.
    accuracy, _ = learned("softmax", 150)
    assert accuracy < 0.5 + 5 * (0.25 / 400) ** 0.5


def test_an_untrained_model_is_at_chance():
    settings = replace(TINY, count=500)
    model, _ = build(settings, "softmax:conv=2", 8, 0)
    found = run_module.accuracy(model, settings, Size(8, 2), "test")
    assert found < 1 / 16 + 5 * (1 / 16 / 1000) ** 0.5


def test_linear_states_keep_their_size_and_softmax_grows():
    sizes = {}
    for text in TINY.recipes:
        model, features = build(TINY, text, 8, 0)
        sizes[text] = [state_bytes(model, tokens) for tokens in (8, 12)]
        assert features == 8
    short, long = sizes["softmax:conv=2"]
    assert long - short == 4 * 2 * 8 * 4  # four more keys and values of 8 floats, one head, one layer
    assert len(set(sizes["elu+1:delta:conv=2"])) == 1
    larger, _ = build(TINY, "elu+1:delta:conv=2", 16, 0)
    assert state_bytes(larger, 8) > 2 * sizes["elu+1:delta:conv=2"][0]


def test_rows_curves_and_the_page(tmp_path):
    settings = replace(TINY, seeds=(0, 1), rates=(1e-3, 1e-2), head_dims=(4, 8))
    results = recall(settings)
    assert len(results.rows) == 2 * 2 * 2 * 2 * 2 and len(results.times) == 16
    assert len(results.curves) == 16 * 2  # after steps 2 and 3
    for text in settings.recipes:
        for dim in settings.head_dims:
            mine = [r for r in results.rows if (r["recipe"], r["head_dim"]) == (text, dim)]
            rates = {r["rate"] for r in mine if r["chosen"]}
            assert len(rates) == 1
            means = {rate: sum(r["validation"] for r in mine if r["rate"] == rate) for rate in settings.rates}
            assert means[rates.pop()] == max(means.values())
    found = study(results)
    page = render(found, "reassoc recall")
    for text in ("softmax:conv=2", "elu+1:delta:conv=2", "12:3", "naming any value"):
        assert text in page
    assert {plot.name for plot in found.figures} == {"state", "pairs", "training"}
    assert "2 seeds" in found.lead and json.dumps(found.manifest)


def test_the_answer_compares_what_there_is_to_compare():
    names = ("elu+1", "elu+1:conv=2", "elu+1:delta:conv=2", "softmax:conv=2")
    results = recall(replace(TINY, recipes=names))
    accuracy = dict(zip(names, (0.3, 0.6, 0.9, 1.0), strict=True))
    for row in results.rows:
        row["accuracy"] = accuracy[row["recipe"]] / (1 + (row["pairs"] == 3))
    said = study(results).answer
    assert said[0].startswith(
        "Of linear attention elu+1:delta:conv=2 recalls most: 90% of the answers at 8:2"
    )
    assert any(
        "A short convolution matters for elu+1: 60% with one over 2 tokens, 30% without" in s for s in said
    )
    assert any(
        "The delta rule against the sum for elu+1: 90% against 60% at head size 8 (better)" in s for s in said
    )
    assert any("softmax:conv=2" in s and "100%" in s for s in said)
    assert any(s.startswith("At 12:3") and "elu+1:conv=2 30%" in s for s in said)


@pytest.mark.parametrize(
    ("deltas", "word"), [((0.6, 0.9), "better"), ((0.1, 0.15), "worse"), ((0.4, 0.9), "within the spread")]
)
def test_a_difference_counts_when_it_is_larger_than_the_spread_over_seeds(deltas, word):
    results = recall(replace(TINY, recipes=("elu+1", "elu+1:delta"), seeds=(0, 1)))
    for row in results.rows:
        row["accuracy"] = (deltas if "delta" in row["recipe"] else (0.2, 0.5))[row["seed"]]
    assert any(f"against 35% at head size 8 ({word})" in sentence for sentence in study(results).answer)


def test_a_diverged_run_is_a_result_and_told(monkeypatch):
    real = run_module.update
    calls = []

    def broken(*args, **options):
        calls.append(1)
        return real(*args, **options) if len(calls) != 2 else float("nan")

    monkeypatch.setattr(run_module, "update", broken)
    results = recall(replace(TINY, recipes=("elu+1:conv=2",)))
    row = results.rows[0]
    assert (row["ended"], row["steps"]) == ("diverged", 2) and 0 <= row["accuracy"] <= 1
    found = study(results)
    assert any(
        "diverged" in s and "elu+1:conv=2 (head size 8, rate 0.02, seed 0, step 2)" in s for s in found.answer
    )
    assert "2 diverged" in render(found, "")


def test_an_interrupted_experiment_goes_on_and_gives_the_same(tmp_path, monkeypatch):
    whole = recall(TINY)
    trained = []
    real = run_module.train

    def interrupted(settings, run):
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(run.recipe)
        return real(settings, run)

    monkeypatch.setattr(run_module, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recall(TINY, resume=tmp_path)
    monkeypatch.setattr(
        run_module, "train", lambda settings, run: trained.append(run.recipe) or real(settings, run)
    )
    results = recall(TINY, resume=tmp_path)
    assert trained == list(TINY.recipes)  # none twice
    assert results.rows == whole.rows and results.curves == whole.curves
    forget_parts(tmp_path, results)
    assert not list(tmp_path.iterdir())


def test_redrawn_features_are_redrawn(monkeypatch):
    drawn = []
    real = run_module.RedrawSchedule.step
    monkeypatch.setattr(run_module.RedrawSchedule, "step", lambda self: drawn.append(real(self)) or drawn[-1])
    recall(replace(TINY, recipes=("favor+:features=8:redraw=2",)))
    assert drawn == [False, False, True]  # the third step has features of its own


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": (Size(7, 2),)}, ("--train", "7:2", "4 tokens")),
        ({"test": (Size(8, 0),)}, ("--test", "8:0", "1 pair")),
        ({"test": (Size(64, 9),)}, ("--test", "64:9", "16", "--vocabulary")),
        ({"recipes": ()}, ("--models", "at least one")),
        ({"recipes": ("elu+1:carried",)}, ("carried", "segments")),
        ({"recipes": ("gauss",)}, ("gauss", "known")),
        ({"head_dims": (0,)}, ("--head-dims", "0")),
        ({"rates": (0.0,)}, ("--rates", "above 0")),
        ({"seeds": (-1,)}, ("--seeds", "-1")),
        ({"stop": 1.5}, ("--stop", "1.5")),
        ({"steps": 0}, ("--steps", "0")),
        ({"weight_decay": -1.0}, ("--weight-decay", "-1")),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(change, words):
    with pytest.raises(InputError) as caught:
        replace(TINY, **change)
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_a_recipe_that_does_not_fit_is_refused_before_any_work(tmp_path):
    with pytest.raises(InputError, match="recipe 'elu\\+1:rotary' with heads of size 3"):
        recall(replace(TINY, recipes=("softmax", "elu+1:rotary"), head_dims=(3,)), resume=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_sizes_on_the_command_line():
    assert size("--train", "64:8") == Size(64, 8)
    for wrong in ("64", "64:8:2", "a:b", ""):
        with pytest.raises(InputError, match="--train: expected TOKENS:PAIRS"):
            size("--train", wrong)
