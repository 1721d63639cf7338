"""Capacity by experiment: the retrieval task, the model, training, resuming, sentences, report."""

import itertools
import json
import math

import pytest
import torch

pytest.importorskip("matplotlib")

from reassoc.lab import InputError
from reassoc.lab._study import write_study
from reassoc.lab.capacity import Results, Settings, capacity, forget_parts, study
from reassoc.lab.capacity import run as run_module
from reassoc.lab.capacity import train as train_module
from reassoc.lab.capacity.answer import answer
from reassoc.lab.capacity.cases import Case, case
from reassoc.lab.capacity.model import EPS, Retrieval
from reassoc.lab.capacity.published import published
from reassoc.lab.capacity.task import Batch, answers, draw, pairs
from reassoc.lab.capacity.train import SOLVED, Outcome, Run, train


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# The task


def test_setting_1_has_every_key_and_value_once():
    batch = draw(7, 7, 50, False, generator())
    for keys, values, query, target in zip(*(t.tolist() for t in batch), strict=True):
        assert sorted(keys) == sorted(values) == list(range(7))
        assert target == values[keys.index(query)]
    assert len({tuple(k) for k in batch.keys.tolist()}) > 40 and len(set(batch.query.tolist())) == 7


def test_setting_2_asks_for_the_last_value():
    batch = draw(4, 8, 200, True, generator())
    repeated = 0
    for keys, values, query, target in zip(*(t.tolist() for t in batch), strict=True):
        assert target == dict(zip(keys, values, strict=True))[query]  # a dict keeps the last one
        repeated += keys.count(query) > 1
    assert repeated > 100
    keys, values = pairs(4, 8, 50, True, generator())
    target, asked = answers(keys, values, 4)
    for row in range(50):
        last = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        assert asked[row].tolist() == [key in last for key in range(4)]
        assert all(target[row, key] == value for key, value in last.items())


# The model

CASES = ["softmax", "elu+1", "dpfp-1", "elu+1:sum:sum", "identity:none", "elu+1:delta", "dpfp-2:delta"]
CASES += ["elu+1:delta:attention", "favor+:features=8"]


@pytest.mark.parametrize("text", CASES)
def test_training_loss_is_the_loss_of_the_operator(text):
    """Weights in training, the operator in evaluation: the same number; and gradients reach every weight."""
    model = Retrieval(case(text), 5, 8, 11, 0, generator()).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)  # small features: the delta rule without sum normalization stays stable
    for repeats, length in ((False, 5), (True, 10)):
        keys, values = pairs(5, length, 1, repeats, generator(1))
        target, asked = answers(keys, values, 5)
        queries = asked[0].nonzero()[:, 0]
        batch = Batch(
            keys.expand(len(queries), -1), values.expand(len(queries), -1), queries, target[0, queries]
        )
        loss = model.loss(batch)
        assert model.evaluate(keys, values) == pytest.approx(loss.item(), rel=1e-8)
    loss.backward()
    assert all(weight.grad.abs().max() > 0 for weight in model.parameters())


def test_softmax_by_hand():
    model = Retrieval(case("softmax"), 4, 8, 9, 0, generator())
    batch = draw(4, 4, 3, False, generator(2))
    with torch.no_grad():
        one_hot, found = torch.eye(4), []
        for keys, values, query, target in zip(*batch, strict=True):
            inputs = torch.cat([one_hot[values], model.embedding[keys]], dim=1)
            key = inputs @ model.key_weight.T + model.key_bias
            question = model.query_weight @ model.embedding[query] + model.query_bias
            answer = torch.softmax(key @ question / math.sqrt(8), 0) @ one_hot[values]
            found.append(0.5 * (answer - one_hot[target]).square().sum())
        assert float(model.loss(batch)) == pytest.approx(float(torch.stack(found).mean()), rel=1e-5)


def test_first_weights_are_as_published():
    for text, bound in (("elu+1", 1 / 8), ("softmax", math.sqrt(6 / (64 + 220 + 100)))):
        model = Retrieval(case(text), 100, 64, 220, 0, generator())
        assert model.embedding.shape == (100, 220) and model.key_weight.shape == (64, 320)
        # 20,480 draws: the largest is within a thousandth of the bound but for a chance of e^-20.
        assert 0.999 * bound < model.key_weight.abs().max().item() <= bound
        assert model.embedding.std().item() == pytest.approx(1, abs=5 / math.sqrt(2 * 22_000))


def test_no_model_passes_the_floor():
    model = Retrieval(case("elu+1"), 40, 4, 88, 0, generator())
    assert EPS == 1e-6 and model.evaluate(*pairs(40, 40, 20, False, generator())) > 0.5 * (1 - 4 / 40)


# Training


def quick(text, count, *, dim=16, setting=1, limit=300, seed=0):
    return train(Run(setting, case(text), count, seed), dim=dim, limit=limit, report=lambda _: None)


def test_retrieval_works_below_the_number_of_features_and_not_above():
    below, above = quick("elu+1", 8, limit=800), quick("elu+1", 40, limit=500)
    floor = 0.5 * (1 - 16 / 40)
    assert below.loss < 0.02  # of 0.5
    assert floor <= above.loss < floor + 0.05  # as good as 16 features can be, which is bad
    assert quick("softmax", 40).loss < 0.02


def test_delta_corrects_what_sum_cannot():
    delta, sums = (quick(text, 6, setting=2, limit=500) for text in ("dpfp-1:delta", "dpfp-1"))
    assert delta.long_loss < 0.05 < 0.1 < sums.long_loss


def test_a_seed_decides_everything():
    one, two, other = (quick("favor+:features=16", 4, seed=seed, limit=100) for seed in (0, 0, 1))
    assert one._replace(seconds=0, processor=0) == two._replace(seconds=0, processor=0)
    assert one.loss != other.loss


def losses(monkeypatch, values):
    """Train nothing; evaluations give these losses, the last one again and again."""
    given = itertools.chain(values, itertools.repeat(values[-1]))
    monkeypatch.setattr(Retrieval, "evaluate", lambda *_: next(given))
    monkeypatch.setattr(train_module, "EVERY", 1)


@pytest.mark.parametrize(
    ("values", "steps", "stopped", "best"),
    [
        ([0.5, 0.2, 0.001], 3, "solved", 0.001),
        ([0.5, 0.2, 0.3], 2 + 11, "stalled", 0.2),
        ([0.5] + [0.6] * 10 + [0.4, 0.45], 12 + 11, "stalled", 0.4),
        ([float("nan")], 11, "diverged", math.inf),
        ([0.5 - 0.01 * i for i in range(40)], 30, "limit", 0.5 - 0.29),
    ],
)
def test_when_training_stops(monkeypatch, values, steps, stopped, best):
    losses(monkeypatch, values)
    found = quick("elu+1", 4, limit=30)
    assert (found.steps, found.stopped, found.best) == (steps, stopped, pytest.approx(best))
    assert len(found.curve) == steps and found.curve[-1][0] == steps


def test_a_limit_between_evaluations_is_evaluated():
    found = quick("elu+1", 4, limit=130)
    assert [step for step, _ in found.curve] == [100, 130] and found.stopped == "limit"


# The experiment

TINY = Settings(parts=("closed", "1", "2"), models=("elu+1", "elu+1:delta"), pairs=(3,), dim=6, limit=20)


def test_interrupted_continues_after_the_last_finished_training(tmp_path, monkeypatch):
    whole = capacity(TINY)
    trained = []

    def third_fails(run, **options):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(run)
        return train(run, **options)

    monkeypatch.setattr(run_module, "train", third_fails)
    with pytest.raises(KeyboardInterrupt):
        capacity(TINY, resume=tmp_path)
    assert len(trained) == 2
    monkeypatch.setattr(run_module, "train", lambda run, **o: trained.append(run) or train(run, **o))
    told = []
    again = capacity(TINY, resume=tmp_path, progress=lambda *what: told.append(what))
    assert len(trained) == 4 and len(set(trained)) == 4
    assert (again.runs, again.closed, again.curves, again.manifest) == (
        whole.runs, whole.closed, whole.curves, whole.manifest,
    )  # fmt: skip
    total = told[-1][1]
    assert told[-1] == (total, total, "") and total == 4 + 3
    assert any("setting 2: elu+1:delta, 3 pairs, seed 0, step 20, loss" in what for _, _, what in told)
    forget_parts(tmp_path, TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_part_is_trained_again(tmp_path):
    settings = Settings(parts=("1",), models=("elu+1",), pairs=(3,), dim=6, limit=20)
    whole = capacity(settings, resume=tmp_path)
    (part,) = tmp_path.rglob("*.json")
    for damage in ("{}", '{"steps": 1', json.dumps(json.loads(part.read_text()) | {"curve": []})):
        part.write_text(damage)
        assert capacity(settings, resume=tmp_path).runs == whole.runs


def test_every_row_says_what_it_is(tmp_path):
    results = capacity(TINY)
    assert [(r["setting"], r["case"], r["rule"], r["features"]) for r in results.runs] == [
        (1, "elu+1", "sum", 6), (1, "elu+1:delta", "delta", 6), (2, "elu+1", "sum", 6),
        (2, "elu+1:delta", "delta", 6),
    ]  # fmt: skip
    assert all(r["ended"] == "step limit" and r["published"] is None for r in results.runs)
    assert [r["floor"] for r in results.runs] == [0, 0, None, None]
    # Without repeats sequences are as long in evaluation as in training: two samples of one loss.
    assert results.runs[0]["long_loss"] == pytest.approx(results.runs[0]["loss"], rel=0.5)
    assert len(results.closed) == 3 * 2 and {row["keys"] for row in results.closed} == {
        "orthogonal", "Gaussian", "clustered",
    }  # fmt: skip
    write_study(study(results), tmp_path / "a", "reassoc capacity")
    write_study(study(capacity(TINY)), tmp_path / "b", "reassoc capacity")
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert {"capacity.csv", "closed.csv", "curves.csv", "times.csv", "report.html"} <= {p.name for p in files}
    for name in files:
        same = (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert same or name.name == "times.csv", name


def row(setting, name, pairs, loss, *, features=64, theirs=math.nan, ended="no gain", seed=0):
    found = Case("softmax", "softmax", "sum", "attention") if name == "softmax" else case(name)
    floor = None if name == "softmax" or setting == 2 else 0.5 * max(0, 1 - features / pairs)
    return {
        "setting": setting, "case": name, "map": found.map, "rule": found.rule, "normalize": found.normalize,
        "features": None if name == "softmax" else features, "pairs": pairs, "seed": seed, "loss": loss,
        "published": theirs, "floor": floor, "best": loss, "long_loss": 2 * loss, "steps": 100,
        "ended": ended,
    }  # fmt: skip


def results(rows, rows_closed=()):
    manifest = {"dim": 64, "limit": 500, "versions": {}, "machine": {}}
    return Results(list(rows), list(rows_closed), [], [], manifest)


def test_sentences_say_what_the_numbers_say():
    found = answer(results([
        row(1, "softmax", 40, 1e-5), row(1, "softmax", 300, 0.02, ended="step limit"),
        row(1, "elu+1", 40, 9e-4, theirs=8e-4), row(1, "elu+1", 60, 0.025, theirs=0.0246),
        row(1, "elu+1", 100, 0.198, theirs=0.172), row(1, "elu+1", 100, 0.2, theirs=0.172, seed=1),
        row(1, "dpfp-1", 60, 1e-4, features=128, theirs=0.2),
        row(1, "favor+:features=128", 20, 0.1, features=128),
        row(2, "elu+1:delta", 20, 0.001), row(2, "elu+1", 20, 0.1), row(2, "elu+1:delta", 60, 0.3),
        row(2, "elu+1", 60, 0.2), row(2, "dpfp-1:delta", 60, 0.2),
    ]))  # fmt: skip
    assert found.pop(0) == "No memory held more pairs than it has features."
    assert found[0] == (
        "Pairs held: elu+1 (64 features) held 40 and lost 60; dpfp-1 (128 features) held 60 (all tried); "
        "favor+:features=128 (128 features) held none and lost 20."
    )
    assert found[1] == "Softmax attention, tried up to 300 pairs, lost 300."
    assert "at 1 point, the loss is 1.11 to 1.11 times the floor" in found[2]
    assert found[3] == (
        "Of 4 points with a published loss, 3 agree on what was solved; not so setting 1, dpfp-1, 60 pairs: "
        "10⁻⁴ here, 0.20 there."
    )
    assert found[4].startswith(
        "Where it was not solved, the losses differ by 0.20 at most (setting 1, dpfp-1"
    )
    assert found[5] == (
        "Where keys come again with new values, the delta rule beats the sum rule at 1 of 2 points with "
        "elu+1: loss 0.0010 against 0.10 at 20, 0.30 against 0.20 at 60 pairs."
    )
    assert found[6] == (
        "1 training hit the limit of 500 steps, so that the loss might have fallen further: setting 1, "
        "softmax, 300 pairs."
    )
    assert len(found) == 7


def test_a_memory_that_holds_more_than_its_features_is_not_denied():
    found = answer(results([row(1, "elu+1", 40, 1e-4), row(1, "elu+1", 80, 1e-4)]))
    assert found[0] == "Pairs held: elu+1 (64 features) held 80 (all tried)."
    assert answer(results([])) == []


def test_report_marks_what_was_cut_off_and_draws_what_is_there(tmp_path):
    rows = [row(1, "elu+1", 40, 9e-4), row(1, "elu+1", 60, 0.03, ended="step limit")]
    rows += [row(1, "elu+1", 60, math.nan, ended="no number", seed=1), row(2, "dpfp-1:delta", 20, 0.1)]
    found = study(results(rows))
    assert [section.title for section in found.sections] == ["Setting 1", "Setting 2"]
    text = write_study(found, tmp_path, "reassoc capacity").read_text()
    assert '<span class="warn">step limit, no number</span>' in text
    assert "nan" not in text.split("</style>")[1].split("<svg")[0]
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {
        f"setting-{n}.{kind}" for n in (1, 2) for kind in ("png", "svg")
    }


def test_published_losses_are_those_of_the_field_notes():
    for setting, name, count, loss in (
        (1, "elu+1", 60, 0.0246), (1, "elu+1", 600, 0.452), (1, "dpfp-1", 120, 0.0086),
        (1, "dpfp-2", 260, 0.0097), (1, "dpfp-3", 400, 0.036), (1, "favor+:features=128", 60, 0.49),
        (1, "favor+:features=1024", 100, 0.5),
        (1, "softmax", 500, 0.174), (2, "dpfp-1", 20, 0.105), (2, "dpfp-1:delta", 100, 9e-5),
        (2, "dpfp-2:delta", 100, 0.085), (2, "elu+1:delta", 200, 0.342),
    ):  # fmt: skip
        assert published(setting, name, count) == pytest.approx(
            loss, rel=0.06
        )  # the notes round to two digits
    for setting, name, count in ((1, "elu+1", 30), (1, "elu+1", 0), (1, "elu+1", 620), (2, "softmax", 20)):
        assert math.isnan(published(setting, name, count))
    assert SOLVED == 1e-3


# Input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": ("3",)}, "--setting: expected a list of closed, 1, 2; got '3'"),
        ({"parts": ()}, "--setting: give at least one"),
        ({"models": ("elu",)}, "unknown map 'elu'"),
        ({"models": ("elu+1:decay",)}, "--models: 'elu+1:decay' has a rule that forgets"),
        ({"models": ("elu+1:conv=3",)}, "--models: 'elu+1:conv=3' has an option that means nothing here"),
        ({"models": ("hedgehog",)}, "--models: hedgehog has weights that must be learned"),
        ({"models": ("elu+1:sum+attention",)}, "normalize by attention or by sum"),
        ({"models": ("favor+:features=7",)}, "features in pairs"),
        ({"models": ("dpfp-9",), "dim": 4}, "--models: dpfp-9 does not fit keys of size 4"),
        ({"pairs": (1,)}, "--pairs: expected numbers from 2 to 2,048, got 1"),
        ({"seeds": (-1,)}, "--seeds: expected whole numbers from 0"),
        ({"dim": 1}, "--dim: expected"),
        ({"limit": 0}, "--max-steps: expected at least 1, got 0"),
    ],
)
def test_settings_refuse(options, words):
    with pytest.raises(InputError) as caught:
        Settings(**options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_defaults_surround_the_features_by_two_points():
    for name, features in (("elu+1", 64), ("dpfp-1", 128), ("dpfp-2", 256)):
        counts = [r.pairs for r in Settings(parts=("1",), full=True).runs() if r.case.name == name]
        assert sum(n < features for n in counts) >= 2 and sum(n > features for n in counts) >= 2
    full = {(r.case.name, r.pairs) for r in Settings(parts=("2",), full=True).runs()}
    assert {(name, n) for name in ("dpfp-1", "dpfp-1:delta", "dpfp-2:delta") for n in (20, 60, 100)} <= full
    assert len(Settings().runs()) < len(Settings(full=True).runs())


def test_an_outcome_survives_its_file(tmp_path):
    kept = Outcome(200, "solved", 1e-4, 1e-4, 2e-4, [(100, 0.5), (200, 1e-4)], 1.5, 1.25)
    again = run_module._finished(json.loads(json.dumps(kept._asdict())))
    assert again is not None and [tuple(point) for point in again.curve] == kept.curve
    assert run_module._finished({"steps": 1}) is None and run_module._finished(None) is None
