"""Statistics of the benchmark: turns, ratios, crossovers, ceilings, words, with clocks that lie exactly."""

import math

import pytest

pytest.importorskip("matplotlib")

from reassoc.lab import InputError
from reassoc.lab.bench import DEFAULT_PROBLEMS, Problem, Settings
from reassoc.lab.bench import ceilings as ceilings_module
from reassoc.lab.bench.ceilings import counted, measure_ceilings, moved, shares
from reassoc.lab.bench.clock import ENOUGH, MOST, time_rounds, turns
from reassoc.lab.bench.contenders import SOFTMAX, Contender
from reassoc.lab.bench.ratios import crossover_text, crossovers, opponents, ratios
from reassoc.lab.bench.words import ratio_text, short_ratio, unrest


def contender(name, kind="ours", problem=DEFAULT_PROBLEMS[0], features=64):
    return Contender(name, kind, problem, features, prepare=None)


class Clock:
    """Time passes only in calls, as much as each is told."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def __call__(self):
        return self.now

    def call(self, name, *seconds):
        left = list(seconds)

        def run():
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_every_contender_is_first_and_last_and_follows_different_ones():
    orders = [turns(4, round_) for round_ in range(8)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {0, 1, 2, 3}
    for who in range(4):
        before = {order[order.index(who) - 1] for order in orders if order.index(who)}
        assert len(before) >= 2
    assert turns(0, 3) == [] and turns(1, 3) == [0]


def test_rounds_give_one_time_each_and_the_warm_up_counts_for_nothing():
    clock = Clock()
    calls = {"a": clock.call("a", 9.0, 0.25), "b": clock.call("b", 0.5, 0.5)}
    found = time_rounds(calls, 3, clock=clock)
    assert found["a"].seconds == (0.25, 0.25, 0.25) and found["a"].calls == 1
    assert found["b"].seconds == (0.5, 0.5, 0.5)
    timed = clock.log[-6:]
    assert timed == ["a", "b", "b", "a", "b", "a"]


def test_short_calls_are_repeated_until_the_clock_can_tell():
    clock = Clock()
    found = time_rounds({"a": clock.call("a", ENOUGH / 8), "b": clock.call("b", 0.0)}, 2, clock=clock)
    assert found["a"].calls == 8 and found["a"].seconds == pytest.approx((ENOUGH / 8,) * 2)
    assert found["b"].calls == MOST
    # The count goes by a warm call: loading code in the first one would hide how short it is.
    clock = Clock()
    late = time_rounds({"a": clock.call("a", ENOUGH / 2, ENOUGH / 64)}, 1, clock=clock)
    assert late["a"].calls == 64


def rows_of(name, samples, direction="forward", length=256, status="measured", reason=""):
    return {
        "contender": name, "direction": direction, "length": length, "status": status, "reason": reason,
        "samples": samples,
    }  # fmt: skip


OURS, SOFT = contender("ours"), contender("softmax (SDPA)", "softmax", SOFTMAX, 0)
PEER = contender("peer", "peer")


def test_ratios_are_of_rounds_and_not_of_medians():
    # Both slow down together in two rounds: every round says 2, medians alone would say 20.
    rows = [rows_of("ours", [1.0, 10.0, 10.0]), rows_of("softmax (SDPA)", [2.0, 20.0, 20.0])]
    (found,) = ratios(rows, [OURS, SOFT], Settings(lengths=(256,), directions=("forward",)))
    assert (found["ratio"], found["lower"], found["upper"]) == (2.0, 2.0, 2.0)
    rows = [rows_of("ours", [1.0, 1.0, 1.0]), rows_of("softmax (SDPA)", [1.0, 3.0, 2.0])]
    (found,) = ratios(rows, [OURS, SOFT], Settings(lengths=(256,), directions=("forward",)))
    assert (found["lower"], found["ratio"], found["upper"]) == (1.5, 2.0, 2.5)


@pytest.mark.parametrize("bad", ["ours", "softmax (SDPA)"])
def test_no_ratio_where_one_is_wrong(bad):
    rows = [rows_of(name, [1.0]) for name in ("ours", "softmax (SDPA)")]
    rows = [
        row if row["contender"] != bad else rows_of(bad, None, status="wrong", reason="off") for row in rows
    ]
    (found,) = ratios(rows, [OURS, SOFT], Settings(lengths=(256,), directions=("forward",)))
    assert found["ratio"] is None and found["status"] == "wrong" and bad in found["reason"]
    assert ratio_text(found) == "wrong" and crossovers([found]) == []


def test_who_is_compared_with_whom():
    other = contender("other", problem=Problem("favor+", "sum"))
    twin = contender("ours [torch]")
    everyone = [OURS, twin, other, SOFT, PEER]
    assert opponents(OURS, everyone) == [twin, SOFT, PEER]
    assert opponents(twin, everyone) == [SOFT, PEER]  # each pair once
    assert opponents(other, everyone) == [SOFT]
    assert opponents(SOFT, everyone) == opponents(PEER, everyone) == []


def crossover(*points):
    rows = [
        {"direction": "forward", "ours": "a", "other": "b", "length": n, "ratio": ratio}
        for n, ratio in points
    ]
    (found,) = crossovers(rows)
    return found


def test_crossover_is_interpolated_in_logarithms():
    # ratio = n / 1024 is a straight line there: exactly 1 at 1024.
    found = crossover((256, 0.25), (4096, 4.0))
    assert found["bound"] == "between" and found["tokens"] == pytest.approx(1024)
    assert crossover_text(found) == "from about 1,000 (interpolated)"


def test_crossover_means_never_slower_again():
    found = crossover((4096, 4.0), (256, 2.0), (1024, 0.5))  # in any order
    assert 1024 < found["tokens"] < 4096
    assert crossover((256, 1.0), (1024, 3.0))["bound"] == "below"
    beyond = crossover((256, 2.0), (1024, 0.9))
    assert beyond["bound"] == "beyond" and crossover_text(beyond) == "not up to 1,024"
    assert crossover_text(crossover((256, 1.5))) == "at every length measured (from 256)"
    assert crossovers([{"direction": "x", "ours": "a", "other": "b", "length": 1, "ratio": None}]) == []


def test_arithmetic_is_counted_by_the_formulas_of_the_report():
    s = Settings(batch=2, heads=3, head_dim=16, value_dim=8)
    favor = contender("f", features=40)
    assert counted(favor, s, "forward", 100) == 6 * 100 * (65 * 48 + 4 * 40 * 8)
    assert counted(favor, s, "backward", 100) == 3 * counted(favor, s, "forward", 100)
    delta = contender("d", problem=Problem("identity", "delta"), features=16)
    assert counted(delta, s, "forward", 100) == 6 * 100 * 6 * 16 * 8
    assert counted(SOFT, s, "forward", 100) == 6 * 100 * 101 * 24
    assert counted(SOFT, s, "step", 100) == 6 * 2 * 101 * 24
    assert counted(favor, s, "step", 100) == counted(favor, s, "step", 7) == 6 * 4 * 40 * 8
    full = Settings(batch=2, heads=3, head_dim=16, value_dim=8, causal=False)
    assert counted(favor, full, "forward", 100) == 6 * 100 * 4 * 40 * 8
    assert counted(SOFT, full, "forward", 100) == 6 * 100 * 200 * 24


def test_bytes_are_inputs_and_outputs_once():
    s = Settings(batch=1, heads=2, head_dim=16, value_dim=8, dtype="bfloat16")
    assert moved(OURS, s, "forward", 10, 0) == 2 * 10 * (32 + 16) * 2
    assert moved(OURS, s, "backward", 10, 0) == 2 * moved(OURS, s, "forward", 10, 0)
    gated = contender("g", problem=Problem("identity", "gated-delta"), features=16)
    assert moved(gated, s, "forward", 10, 0) == 2 * 10 * (32 + 16 + 2) * 2
    kda = contender("k", problem=Problem("identity", "kda"), features=16)
    assert moved(kda, s, "forward", 10, 0) == 2 * 10 * (32 + 16 + 17) * 2
    assert moved(OURS, s, "step", 10, 500) - moved(SOFT, s, "step", 10, 500) == 500


def test_shares_name_the_limit_that_binds():
    machine = {"flops": 100.0, "bytes": 10.0}
    found = shares(50.0, 1.0, 2.0, machine)
    assert found["limit"] == "arithmetic" and found["intensity"] == 50
    assert found["share"] == found["share_of_limit"] == 0.25
    found = shares(5.0, 5.0, 2.0, machine)
    assert found["limit"] == "memory" and found["share"] == 0.025 and found["share_of_limit"] == 0.25


def test_the_ceiling_says_where_it_comes_from(monkeypatch):
    class Native:
        def fma_peak(self, threads, double, seconds):
            assert threads == 1 and double is False and 0 < seconds < 1
            return 5e9

    monkeypatch.setattr(ceilings_module, "COPIED", 1 << 16)
    monkeypatch.setattr(ceilings_module, "MATMUL", 32)
    monkeypatch.setattr(ceilings_module, "library", lambda: Native())
    found = measure_ceilings(Settings())
    assert found["flops"] == 5e9 and "native" in found["flops_from"] and found["bytes"] > 0
    monkeypatch.setattr(ceilings_module, "library", lambda: None)
    found = measure_ceilings(Settings(dtype="float64"))
    assert "matmul" in found["flops_from"] and "float64" in found["flops_from"] and found["flops"] > 0


@pytest.mark.parametrize(
    ("value", "text"), [(0.0312, "0.031"), (0.999, "1.0"), (1.26, "1.3"), (9.96, "10"), (214.6, "215")]
)
def test_ratios_are_short(value, text):
    assert short_ratio(value) == text


def test_a_busy_machine_is_told():
    steady = {"status": "measured", "seconds": 1.0, "lower": 0.99, "upper": 1.01}
    busy = steady | {"upper": 1.41}
    assert unrest([]) == unrest([steady, steady, busy]) == "" == unrest([{"status": "wrong"}])
    assert "±21%" in unrest([steady, busy, busy])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": ()}, "--lengths"),
        ({"lengths": (0,)}, "--lengths: expected numbers of tokens from 1"),
        ({"heads": 0}, "--heads: expected a whole number from 1"),
        ({"repeats": 0}, "--repeats"),
        ({"features": -1}, "--features"),
        ({"seed": -1}, "--seed"),
        ({"limit": math.nan}, "--limit"),
        ({"dtype": "int8"}, "--dtype: expected one of float32"),
        ({"normalize": "both"}, "--normalize: expected one of attention"),
        ({"directions": ("up",)}, "--directions: expected a list of forward, backward, step; got 'up'"),
        ({"directions": ("step",), "causal": False}, "--bidirectional"),
        ({"problems": (Problem("elu+1", "add"),)}, "--rules"),
        ({"problems": (Problem("elu", "sum"),)}, "--maps: unknown map 'elu'"),
        ({"problems": (Problem("trig", "sum"),), "features": 7}, "--features: trig has features in pairs"),
        ({"backends": ("cuda",)}, "--backends"),
        ({"backends": ()}, "--backends"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with pytest.raises(InputError) as caught:
        Settings(**options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_settings_survive_json():
    import json

    s = Settings(lengths=(3, 5), peers=(), features=12)
    assert Settings.from_json(json.loads(json.dumps(s.to_json()))) == s
    assert Settings.from_json(json.loads(json.dumps(Settings().to_json()))) == Settings()


def test_normalization_is_the_published_one():
    s = Settings(head_dim=8)
    got = [
        s.normalization(Problem(*p)) for p in (("elu+1", "sum"), ("identity", "decay"), ("elu+1", "delta"))
    ]
    assert got == ["attention", "none", "sum"]
    assert s.normalization(Problem("identity", "gated-delta")) == "none"
    assert Settings(normalize="none").normalization(Problem("elu+1", "sum")) == "none"
