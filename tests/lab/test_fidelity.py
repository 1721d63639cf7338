"""The sweep: rows, repeatability, resuming; the answer; tables, synthetic input and times."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from reassoc.lab import (
    Activations,
    InputError,
    Results,
    Site,
    answers,
    fidelity,
    synthetic,
    timing,
    write_tables,
)
from reassoc.lab import fidelity as fidelity_function
from reassoc.lab.measure import HEAD_COLUMNS, SEED_COLUMNS, Measured

module = __import__("sys").modules[fidelity_function.__module__]

NAN = float("nan")
MAPS, WIDTHS, SEEDS = ["mean", "elu+1", "favor+", "trig:calibrated"], [4, 8], [0, 1, 2]
TOTAL = 2 * (2 + 2 * 2)  # two sites, two maps of one size, two maps of two widths


def site(name="a", heads=(0, 1), groups=(0, 1), lengths=(4, 5), causal=False, model="m", seed=0, d=4, e=3):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(len(h), sum(lengths), size, generator=generator)
        for h, size in ((heads, d), (groups, d), (groups, e))
    )
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Site(name, query, key, value, bounds, causal, 0.5, model, 3, groups, heads)


def activations(*sites):
    sites = sites or (
        site("a"),
        site("b", heads=(4, 5, 6, 7), groups=(2, 3), lengths=(9,), causal=True, seed=1),
    )
    return Activations(tuple(sites), {"made": "here"}, "ab" * 32)


def sweep(folder=None, **options):
    options = {"maps": MAPS, "widths": WIDTHS, "seeds": SEEDS} | options
    return fidelity(activations(), "input.safetensors", resume=folder, **options)


def same(mine, theirs):
    """Equal to the last bit, NaN for NaN, in the same order."""
    return (
        repr((mine.seeds, mine.heads)) == repr((theirs.seeds, theirs.heads))
        and mine.manifest == theirs.manifest
    )


@pytest.fixture()
def counted(monkeypatch):
    """Every candidate that is measured, in order."""
    calls = []
    original = module.measure

    def measure(candidate, data, seeds):
        calls.append((candidate.name, candidate.width))
        return original(candidate, data, seeds)

    monkeypatch.setattr(module, "measure", measure)
    return calls


# ---------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------


def test_rows_and_columns():
    found = sweep()
    heads = 2 + 4
    assert len(found.heads) == heads * (2 + 2 * 2)
    assert len(found.seeds) == heads * (2 + 2 * 2 * 3)  # maps without randomness once
    about = ["site", "model", "layer", "causal", "map", "features", "head"]
    assert all(list(row) == [*about, "seed", *SEED_COLUMNS] for row in found.seeds)
    assert all(
        list(row) == [*about, "operations_per_token", "state_bytes", *HEAD_COLUMNS] for row in found.heads
    )
    assert {(r["site"], r["head"], r["causal"]) for r in found.heads} == {
        ("a", 0, False), ("a", 1, False), ("b", 4, True), ("b", 5, True), ("b", 6, True), ("b", 7, True),
    }  # fmt: skip
    assert {(r["map"], r["features"]) for r in found.heads} == {
        ("mean", 1), ("elu+1", 4), ("favor+", 4), ("favor+", 8),
        ("trig:calibrated", 4), ("trig:calibrated", 8),
    }  # fmt: skip
    assert {r["seed"] for r in found.seeds if r["map"] == "favor+"} == {0, 1, 2}
    assert {r["seed"] for r in found.seeds if r["map"] == "elu+1"} == {0}
    assert {r["layer"] for r in found.heads} == {3} and {r["model"] for r in found.heads} == {"m"}


def test_rows_hold_what_was_measured_in_the_right_place(monkeypatch):
    def measure(candidate, data, seeds):
        heads = data.judged[0].query.shape[1]
        of = {s: {c: [100 * s + h for h in range(heads)] for c in SEED_COLUMNS} for s in seeds}
        return Measured(7, of, {c: [0.5 + h for h in range(heads)] for c in HEAD_COLUMNS})

    monkeypatch.setattr(module, "measure", measure)
    found = sweep(maps=["favor+"], widths=[7], seeds=[2, 0])
    for row in found.seeds:
        place = row["head"] - (0 if row["site"] == "a" else 4)
        assert all(row[c] == 100 * row["seed"] + place for c in SEED_COLUMNS)
    for row in found.heads:
        assert all(row[c] == 0.5 + row["head"] - (0 if row["site"] == "a" else 4) for c in HEAD_COLUMNS)
        assert row["state_bytes"] == 4 * 7 * (3 + 1)  # float32: S of 7 x 3, and z
    # A group of two query heads shares the work of its key.
    work = {row["site"]: row["operations_per_token"] for row in found.heads}
    assert work["b"] == pytest.approx(work["a"] * 1.5 / 2, abs=1)


def test_defaults(monkeypatch):
    asked = []

    def measure(candidate, data, seeds):
        asked.append((candidate.name, candidate.width, tuple(seeds)))
        numbers = {c: [0.5, 0.5] for c in (*SEED_COLUMNS, *HEAD_COLUMNS)}
        return Measured(candidate.width or 1, dict.fromkeys(seeds, numbers), numbers)

    monkeypatch.setattr(module, "measure", measure)
    found = fidelity(activations(site()), "x")
    assert {a[:2] for a in asked} >= {("mean", None), ("favor+", 64), ("favor+", 1024), ("favor+", 4096)}
    assert {a[2] for a in asked} == {(0, 1, 2, 3, 4)}
    assert found.manifest["target_error"] == 0.1 and found.manifest["seeds"] == [0, 1, 2, 3, 4]
    assert len(asked) == len(set(asked)) == len(found.manifest["candidates"])
    asked.clear()
    fidelity(activations(site()), "x", widths=[64])  # the yardstick belongs to the default sweep only
    assert ("favor+", 4096) not in {a[:2] for a in asked} and ("favor+", 64) in {a[:2] for a in asked}


def test_manifest_says_what_was_measured():
    manifest = sweep(seeds=[2, 0, 0, 1], target=0.25).manifest
    assert manifest["seeds"] == [0, 1, 2] and manifest["target_error"] == 0.25
    assert manifest["input"] == {
        "name": "input.safetensors",
        "sha256": "ab" * 32,
        "provenance": {"made": "here"},
    }
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["candidates"][2] == {"map": "favor+", "features": 4}
    b = manifest["sites"]["b"]
    assert (b["query_heads"], b["key_heads"], b["sequence_lengths"]) == ([4, 5, 6, 7], [2, 3], [9])
    assert (b["head_size"], b["value_size"], b["causal"], b["scale"]) == (4, 3, True, 0.5)
    json.dumps(manifest)


def test_the_same_seeds_give_the_same_rows():
    first, again = sweep(), sweep()
    assert same(first, again)
    fewer = sweep(seeds=[1])
    mine = [r for r in first.seeds if r["seed"] == 1 and r["map"] == "favor+"]
    theirs = [r for r in fewer.seeds if r["map"] == "favor+"]
    assert repr(mine) == repr(theirs)  # a seed does not depend on the others


def test_progress_counts_to_the_end():
    told = []
    sweep(progress=lambda *news: told.append(news))
    assert [t[0] for t in told] == list(range(TOTAL + 1)) and {t[1] for t in told} == {TOTAL}
    assert told[0][2] == "a  mean " and told[2][2] == "a  favor+ 4" and told[-1][2] == ""


@pytest.mark.parametrize(
    "options, match",
    [
        ({"maps": ["performer"]}, "--maps: unknown map 'performer'; known: "),
        ({"widths": [0]}, "--widths: .* at least 1, got 0"),
        ({"widths": [5]}, "trig:calibrated has features in pairs, 5 is odd"),
        ({"seeds": []}, "--seeds: give at least one seed"),
        ({"seeds": [-1, 2]}, "--seeds: .* each 0 or more"),
        ({"target": 0.0}, "--target: a relative error above 0, got 0"),
        ({"target": -0.1}, "--target: .*got -0.1"),
        ({"target": NAN}, "--target: .*got nan"),
        ({"target": math.inf}, "--target: .*got inf"),
    ],
)
def test_mistakes_come_before_work(options, match, counted, tmp_path):
    with pytest.raises(InputError, match=match):
        sweep(tmp_path / "out", **options)
    assert not counted and not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------
# Interrupted and continued
# ---------------------------------------------------------------------------------------------------------


class Stop(Exception):  # noqa: N818
    pass


def stop_at(place):
    def progress(done, total, what):
        if done == place:
            raise Stop

    return progress


def unfinished(folder):
    return sorted(folder.glob(".unfinished-*"))


@pytest.mark.parametrize("place", [1, 5, TOTAL - 1, TOTAL])
def test_an_interrupted_sweep_continues(place, counted, tmp_path):
    whole = sweep()
    every = list(counted)
    assert len(every) == TOTAL
    counted.clear()
    with pytest.raises(Stop):
        sweep(tmp_path, progress=stop_at(place))
    assert counted == every[:place]
    (folder,) = unfinished(tmp_path)
    assert len(list(folder.iterdir())) == place
    counted.clear()
    assert same(sweep(tmp_path), whole)
    assert counted == every[place:]
    counted.clear()
    assert same(sweep(tmp_path), whole) and not counted  # finished parts stay until they are forgotten


def test_ctrl_c_inside_a_measurement_keeps_the_finished_parts(monkeypatch, counted, tmp_path):
    original = module.measure

    def measure(candidate, data, seeds):
        if len(counted) == 3:
            raise KeyboardInterrupt
        return original(candidate, data, seeds)

    monkeypatch.setattr(module, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path)
    monkeypatch.setattr(module, "measure", original)
    assert len(counted) == 3
    assert same(sweep(tmp_path), sweep())
    assert len(counted) == TOTAL + TOTAL


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("null"),
        lambda path: path.write_text('{"features": 4}'),
        lambda path: path.write_text('{"features": 4, "seeds": {"x": {}}, "heads": {}}'),
        lambda path: path.unlink(),
        lambda path: path.write_text('{"features": 4, "seeds": [], "heads": {}}'),
        lambda path: path.write_text('{"features": 4, "seeds": {"0": {}}, "heads": {}}'),
    ],
    ids=["cut", "empty", "binary", "list", "null", "incomplete", "seed", "missing", "seeds", "columns"],
)
def test_a_damaged_part_is_measured_again(damage, counted, tmp_path):
    whole = sweep(tmp_path)
    (folder,) = unfinished(tmp_path)
    damage(folder / "00002.json")
    counted.clear()
    assert same(sweep(tmp_path), whole)
    assert counted == [("favor+", 4)]
    counted.clear()
    sweep(tmp_path)
    assert not counted


@pytest.mark.parametrize(
    "change",
    [{"maps": MAPS[::-1]}, {"widths": [4, 16]}, {"seeds": [0, 1]}, {"target": 0.2}],
    ids=["maps", "widths", "seeds", "target"],
)
def test_parts_of_another_sweep_are_not_used(change, counted, tmp_path):
    sweep(tmp_path)
    counted.clear()
    assert same(sweep(tmp_path, **change), sweep(**change))
    assert len(counted) == 2 * TOTAL
    assert len(unfinished(tmp_path)) == 2


def test_parts_of_another_input_are_not_used(counted, tmp_path):
    sweep(tmp_path)
    counted.clear()
    other = Activations(activations().sites, {"made": "here"}, "cd" * 32)
    fidelity(other, "input.safetensors", maps=MAPS, widths=WIDTHS, seeds=SEEDS, resume=tmp_path)
    assert len(counted) == TOTAL


def test_forget_parts_removes_its_own_folder_only(tmp_path):
    mine, other = sweep(tmp_path), sweep(tmp_path, seeds=[0])
    (tmp_path / "notes.txt").write_text("keep")
    assert len(unfinished(tmp_path)) == 2
    module.forget_parts(tmp_path, mine)
    assert len(unfinished(tmp_path)) == 1
    module.forget_parts(tmp_path, mine)  # nothing left to forget
    module.forget_parts(tmp_path, other)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_no_folder_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep()
    assert not list(Path().iterdir())


def test_a_full_disk_leaves_no_half_part(tmp_path, monkeypatch, counted):
    write = Path.write_text

    def full(self, text, *arguments, **options):
        if ".00003." in self.name:
            write(self, text[:10])
            raise OSError(28, "No space left on device")
        return write(self, text, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        sweep(tmp_path)
    monkeypatch.setattr(Path, "write_text", write)
    (folder,) = unfinished(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["00000.json", "00001.json", "00002.json"]
    counted.clear()
    assert same(sweep(tmp_path), sweep())
    assert len(counted) == TOTAL - 3 + TOTAL


def test_a_site_too_short_leaves_no_folder(tmp_path):
    with pytest.raises(InputError, match="site 'a' has 1 tokens: at least 2 are needed"):
        fidelity(activations(site(lengths=(1,))), "x", maps=MAPS, widths=WIDTHS, resume=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------
# The answer
# ---------------------------------------------------------------------------------------------------------


def row(name, features, head, error, *, work=None, variance=NAN, site="s", model="m"):
    return {
        "site": site, "model": model, "layer": 0, "causal": False, "map": name,
        "features": features, "head": head,
        "operations_per_token": 10 * features if work is None else work, "state_bytes": 4 * features,
        "output_error": error, "predicted_relative_variance": variance, "observed_relative_variance": NAN,
        "output_squared_bias": NAN, "output_variance": NAN,
    }  # fmt: skip


def judge(table, target=0.1):
    """``{(map, features): [error of each head]}`` -> the answer."""
    heads = [row(m, r, h, error) for (m, r), errors in table.items() for h, error in enumerate(errors)]
    (answer,) = answers(Results([], heads, {"target_error": target}))
    return answer


def test_the_cheapest_map_within_the_target_is_chosen():
    answer = judge(
        {
            ("favor+", 64): [0.05, 0.06],
            ("elu+1", 8): [0.3, 0.4],
            ("favor+", 16): [0.08, 0.12],
            ("mean", 1): [0.5, 0.6],
        }
    )
    assert (answer.choice.map, answer.choice.features) == ("favor+", 16)  # median exactly at the target
    assert (
        answer.choice.median == pytest.approx(0.1) and answer.choice.within == 1 and answer.choice.heads == 2
    )
    assert (answer.choice.best, answer.choice.worst) == (0.08, 0.12)
    assert (answer.closest.map, answer.closest.features) == ("favor+", 64)
    assert [(line.map, line.features) for line in answer.lines] == [
        ("mean", 1), ("elu+1", 8), ("favor+", 16), ("favor+", 64),
    ]  # fmt: skip
    assert answer.per_head == {("s", 0): ("favor+", 16), ("s", 1): ("favor+", 64)}
    assert "the cheapest map" in answer.sentences[0] and "favor+ at 16" in answer.sentences[0]
    assert not any("none of these" in s for s in answer.sentences)


def test_cost_decides_and_not_the_number_of_features():
    heads = [row("taylor", 100, 0, 0.05, work=10), row("favor+", 8, 0, 0.01, work=11)]
    (answer,) = answers(Results([], heads, {"target_error": 0.1}))
    assert answer.choice.map == "taylor" and answer.closest.map == "favor+"
    assert answer.per_head == {("s", 0): ("taylor", 100)}


def test_none_will_do():
    answer = judge({("favor+", 64): [0.7, 0.9], ("elu+1", 8): [0.3, 0.4], ("mean", 1): [0.35, 0.35]})
    assert answer.choice is None and answer.closest.map == "elu+1"
    assert answer.per_head == {("s", 0): None, ("s", 1): None}
    text = " ".join(answer.sentences)
    assert "none of these will do" in answer.sentences[0] and "elu+1 at 8" in answer.sentences[0]
    assert "For none of the 2 heads" in text
    assert "No better than giving every visible value the same weight" in text and "favor+ (64)" in text


def test_the_mean_of_values_is_never_the_choice():
    answer = judge({("mean", 1): [0.01, 0.02], ("elu+1", 8): [0.05, 0.06]})
    assert answer.choice.map == "elu+1" and answer.closest.map == "elu+1"
    assert set(answer.per_head.values()) == {("elu+1", 8)}
    worse = judge({("mean", 1): [0.01, 0.02], ("elu+1", 8): [0.5, 0.6]})
    assert worse.choice is None and set(worse.per_head.values()) == {None}


def test_some_heads_have_a_map():
    answer = judge({("elu+1", 8): [0.05, 0.4, 0.5], ("favor+", 64): [0.5, 0.09, 0.5]})
    assert answer.choice is None
    assert answer.per_head == {("s", 0): ("elu+1", 8), ("s", 1): ("favor+", 64), ("s", 2): None}
    assert any(s.startswith("2 of 3 heads have a map within 0.1") for s in answer.sentences)


def test_errors_that_are_no_numbers_count_as_the_worst():
    answer = judge({("identity", 8): [NAN, 0.01, NAN], ("elu+1", 9): [0.3, 0.4, 0.2]})
    broken = next(line for line in answer.lines if line.map == "identity")
    assert (broken.median, broken.best, broken.worst, broken.within) == (math.inf, 0.01, math.inf, 1)
    assert answer.choice is None and answer.closest.map == "elu+1"
    assert answer.per_head == {("s", 0): None, ("s", 1): ("identity", 8), ("s", 2): None}
    everything = judge({("identity", 8): [NAN], ("trig", 9): [math.inf]})
    assert everything.choice is None and everything.closest.median == math.inf
    assert all(sentence for sentence in everything.sentences)


def test_doubtful_variance_is_said():
    heads = [row("favor+", 8, h, 0.05, variance=v) for h, v in enumerate((30.0, 2.0, NAN))]
    (answer,) = answers(Results([], heads, {"target_error": 0.1}))
    assert answer.lines[0].predicted_variance == 16.0  # median of what there is
    assert any(s.startswith("Warning: the predicted relative variance") for s in answer.sentences)
    heads = [row("favor+", 8, h, 0.05, variance=0.5) for h in range(2)] + [row("elu+1", 9, 0, 0.5)]
    (answer,) = answers(Results([], heads, {"target_error": 0.1}))
    assert answer.lines[1].predicted_variance is None
    assert not any("Warning" in s for s in answer.sentences)


def test_one_answer_for_each_model_in_order():
    heads = [row("elu+1", 8, 0, 0.05, model="z"), row("elu+1", 8, 0, 0.5, model="b", site="t")]
    first, second = answers(Results([], heads, {"target_error": 0.1}))
    assert (first.model, second.model) == ("z", "b")
    assert first.choice is not None and second.choice is None
    assert list(first.per_head) == [("s", 0)] and list(second.per_head) == [("t", 0)]


def test_the_answer_of_a_sweep():
    found = sweep()
    (answer,) = answers(found)
    assert len(answer.lines) == 6 and {line.heads for line in answer.lines} == {6}
    assert list(answer.per_head) == [("a", 0), ("a", 1), ("b", 4), ("b", 5), ("b", 6), ("b", 7)]


def test_an_input_without_a_model_has_a_name_in_sentences():
    heads = [row("elu+1", 8, 0, 0.5, model="")]
    (answer,) = answers(Results([], heads, {"target_error": 0.1}))
    assert not answer.sentences[0].startswith(":")


# ---------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------


def test_tables_are_the_rows_and_the_same_bytes_twice(tmp_path):
    found = sweep()
    names = ("results.csv", "heads.csv", "manifest.json")
    content = []
    for _ in range(2):
        write_tables(found, tmp_path)
        content.append([(tmp_path / name).read_bytes() for name in names])
    assert content[0] == content[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)
    assert b"\r" not in content[0][0]
    assert json.loads((tmp_path / "manifest.json").read_text()) == found.manifest
    for name, rows in (("results.csv", found.seeds), ("heads.csv", found.heads)):
        with (tmp_path / name).open(newline="") as file:
            read = list(csv.DictReader(file))
        assert len(read) == len(rows) and list(read[0]) == list(rows[0])
        for mine, theirs in zip(read, rows, strict=True):
            for column, value in theirs.items():
                if isinstance(value, float):
                    written = float(mine[column]) if mine[column] else NAN
                    assert written == pytest.approx(value, rel=1e-5, nan_ok=True)  # six digits
                else:
                    assert mine[column] == str(value)


def test_awkward_cells(tmp_path):
    rows = [
        {
            "site": 'a,"b"\nc',
            "layer": None,
            "causal": True,
            "error": NAN,
            "huge": math.inf,
            "tiny": 1.23456789e-30,
        }
    ]
    write_tables(Results(rows, [], {}), tmp_path)
    with (tmp_path / "results.csv").open(newline="") as file:
        (read,) = csv.DictReader(file)
    assert read == {
        "site": 'a,"b"\nc', "layer": "", "causal": "True", "error": "", "huge": "inf", "tiny": "1.23457e-30",
    }  # fmt: skip
    assert (tmp_path / "heads.csv").read_bytes() == b"\n"


# ---------------------------------------------------------------------------------------------------------
# Synthetic input
# ---------------------------------------------------------------------------------------------------------


def test_synthetic_axes():
    made = synthetic([0.5, 2.0], [3, 400], dim=16)
    assert [s.name for s in made.sites] == list(made.provenance["axes"])
    assert list(made.provenance["axes"].values()) == [
        {"norm": norm, "length": length} for norm in (0.5, 2.0) for length in (3, 400)
    ]
    for s in made.sites:
        about = made.provenance["axes"][s.name]
        assert s.cu_seqlens.tolist() == [0, about["length"], 2 * about["length"]]
        assert s.query.shape == s.key.shape == (2, 2 * about["length"], 16) and s.scale == 0.25
        assert s.model == "synthetic" and not s.causal
        if about["length"] == 400:  # 25,600 numbers: a root mean square within 1 %
            for part in (s.query, s.key):
                rms = (part * s.scale**0.5).square().sum(-1).mean().sqrt()
                assert rms == pytest.approx(about["norm"], rel=0.02)


def test_synthetic_repeats_and_differs_by_seed():
    first, again, other = synthetic([1.0], [4]), synthetic([1.0], [4]), synthetic([1.0], [4], seed=1)
    assert first.sha256 == again.sha256 != other.sha256
    assert torch.equal(first.sites[0].query, again.sites[0].query)
    assert not torch.equal(first.sites[0].query, other.sites[0].query)
    assert len(synthetic().sites) == 12


@pytest.mark.parametrize(
    "norms, lengths",
    [
        ([], [4]),
        ([1.0], []),
        ([0.0], [4]),
        ([-1.0], [4]),
        ([NAN], [4]),
        ([math.inf], [4]),
        ([1e4], [4]),
        ([1.0], [0]),
    ],
)
def test_synthetic_refuses_what_cannot_be(norms, lengths):
    with pytest.raises(InputError, match=r"synthetic norms must be in .* lengths at least 1, got "):
        synthetic(norms, lengths)


def test_synthetic_with_a_value_given_twice():
    try:
        names = [s.name for s in synthetic([1.0, 1.0], [4]).sites]
    except InputError:
        return
    assert len(set(names)) == len(names)


def test_larger_norms_are_harder():
    found = fidelity(
        synthetic([0.3, 3.0], [16], dim=8), "synthetic", maps=["favor+"], widths=[16], seeds=[0, 1]
    )
    errors = {
        norm: [r["output_error"] for r in found.heads if r["site"].startswith(f"norm {norm},")]
        for norm in (0.3, 3)
    }
    assert max(errors[0.3]) < min(errors[3])


# ---------------------------------------------------------------------------------------------------------
# Times
# ---------------------------------------------------------------------------------------------------------


def test_times(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "LENGTH", 32)
    monkeypatch.setattr(timing, "REPEATS", 2)
    ticks = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    found = sweep(maps=[*MAPS, "landmark"], widths=[4])
    told = []
    times = timing.measure_times(found, lambda *news: told.append(news))
    assert [(t.map, t.features) for t in times] == [
        ("mean", 1), ("elu+1", 4), ("favor+", 4), ("trig:calibrated", 4), ("landmark", 3),
    ]  # fmt: skip
    for t in times:  # every call took one tick of a clock that counts calls
        assert (t.model, t.length, t.milliseconds, t.softmax_milliseconds, t.ratio) == (
            "m",
            32,
            1e3,
            1e3,
            1.0,
        )
    assert [news[:2] for news in told] == [(i, 5) for i in range(5)]
    timing.write_times(times, tmp_path)
    with (tmp_path / "times.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [r["map"] for r in read] == [t.map for t in times] and read[0]["ratio"] == "1"
    timing.write_times([], tmp_path)
    assert (tmp_path / "times.csv").read_text() == "\n"


def test_times_of_grouped_and_causal_layers(monkeypatch):
    monkeypatch.setattr(timing, "LENGTH", 16)
    monkeypatch.setattr(timing, "REPEATS", 1)
    shapes = []
    original = timing.linear_attention

    def remember(query, key, value, phi, **options):
        shapes.append((tuple(query.shape), tuple(key.shape), tuple(value.shape), options))
        return original(query, key, value, phi, **options)

    monkeypatch.setattr(timing, "linear_attention", remember)
    grouped = site("g", heads=(0, 1, 2, 3), groups=(0, 1), causal=True)
    found = fidelity(activations(grouped), "x", maps=["elu+1"], widths=[4], seeds=[0])
    (time,) = timing.measure_times(found)
    assert time.milliseconds > 0 and time.softmax_milliseconds > 0 and time.ratio > 0
    assert set(map(repr, shapes)) == {repr(((1, 4, 16, 4), (1, 2, 16, 4), (1, 2, 16, 3), {"causal": True}))}
