"""What the panels "Cost", "Approximation" and "Capacity" answer, against counting, closed forms and loops."""

import itertools
import json
import math
from pathlib import Path

import mpmath
import pytest
import torch

import oracle
from reassoc import feature_maps
from reassoc._errors import InputError
from reassoc.explorer import approximation, cost
from reassoc.explorer.panels import answer

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "worked_examples.json").read_text())["cases"]
}
DIGITS = 1e-8  # answers travel with nine digits


def asked(panel, **given):
    return json.loads(answer(panel, given.items()), parse_constant=pytest.fail)


def near(want, rel=DIGITS, **more):
    return pytest.approx(want, rel=rel, **more)


# ---------------------------------------------------------------------------------------------------------
# Cost
# ---------------------------------------------------------------------------------------------------------


def test_the_arithmetic_of_the_notes():
    case = CASES["state-arithmetic"]
    inputs, expect = case["inputs"], case["expect"]
    assert (inputs["r"], inputs["d_v"]) == (64, 64)
    counts = asked("cost", n=str(inputs["N"]), r="64", e="64")["counts"]
    assert counts["state"] == expect["state_scalars"] == 4160
    assert counts["pairs"] == counts["scores"] == expect["quadratic_scores"] == 1048576
    assert counts["passes"] == expect["linear_passes"] == 2048


def test_counts_are_those_of_the_loops():
    """Both ways written as loops over numbers; every multiplication that is added to something is one."""
    n, r, e = 16, 8, 16
    seen = dict.fromkeys(("pairs", "passes", "quadratic", "linear", "scores"), 0)
    for _query, _key in itertools.product(range(n), range(n)):
        seen["pairs"] += 1
        seen["scores"] += 1
        seen["quadratic"] += sum(1 for _ in range(r))  # a score
        seen["quadratic"] += sum(1 for _ in range(e))  # a weighted value
    for _key in range(n):
        seen["passes"] += 1
        seen["linear"] += sum(1 for _ in itertools.product(range(r), range(e + 1)))  # S and z
    for _query in range(n):
        seen["passes"] += 1
        seen["linear"] += sum(
            1 for _ in itertools.product(range(r), range(e + 1))
        )  # numerator and denominator
    found = asked("cost", n=str(n), r=str(r), e=str(e))
    assert found["counts"] == seen | {"state": sum(1 for _ in itertools.product(range(r), range(e + 1)))}
    counts = found["counts"]
    assert found["ratios"]["steps"] == near(counts["pairs"] / counts["passes"])
    assert found["ratios"]["arithmetic"] == near(counts["quadratic"] / counts["linear"])
    assert found["ratios"]["memory"] == near(counts["scores"] / counts["state"])


@pytest.mark.parametrize(("r", "e"), [("8", "1024"), ("64", "64"), ("1024", "8")])
def test_the_curves_cross_where_the_page_says(r, e):
    found = asked("cost", r=r, e=e)
    lengths = [line["n"] for line in found["lines"]]
    assert lengths == sorted(set(lengths)) and lengths[0] == 16 and lengths[-1] == 2**20
    for line in found["lines"]:
        assert (line["linear"] < line["quadratic"]) is (line["n"] > found["crossover"])
        alone = asked("cost", n=str(line["n"]), r=r, e=e)["counts"]
        assert alone == {name: line[name] for name in alone}


# ---------------------------------------------------------------------------------------------------------
# Measured times
# ---------------------------------------------------------------------------------------------------------


def bench(**changes):
    """Results of `reassoc bench`, small."""
    row = {
        "contender": "ours",
        "length": 64,
        "direction": "forward",
        "seconds": 2.0,
        "lower": 1.0,
        "upper": 3.0,
    }
    return {
        "command": "reassoc bench", "versions": {"torch": "9"}, "machine": {"processor": "P", "threads": 2},
        "settings": {"batch": 1, "heads": 8, "head_dim": 64, "value_dim": 64, "dtype": "float32",
        "causal": True},
        "contenders": [{"name": "ours", "kind": "ours"}, {"name": "soft", "kind": "softmax"}, {"name": "y",
        "kind": "yardstick"}],
        "rows": [row, row | {"contender": "soft"}, row | {"contender": "y"},
        row | {"direction": "backward"},
                 row | {"length": 128, "seconds": None, "lower": None, "upper": None}],
    } | changes  # fmt: skip


def test_times_come_from_the_folder(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(bench()))
    found = cost.measured(tmp_path)
    times = {"length": 64, "seconds": 2.0, "lower": 1.0, "upper": 3.0}
    assert found["rows"] == [{"name": "ours", **times}, {"name": "soft", **times}]
    assert found["here"] is True and found["command"] == "reassoc bench"
    assert found["about"].startswith("P, 2 threads, torch 9; batch 1, 8 heads") and found["about"].endswith(
        ", causal"
    )


def test_times_of_another_machine_come_with_the_package():
    found = cost.measured(None)
    stored = json.loads((Path(cost.__file__).parent / "bench.json").read_text())
    kinds = {each["name"]: each["kind"] for each in stored["contenders"]}
    want = [
        (row["contender"], row["length"], row["seconds"], row["lower"], row["upper"])
        for row in stored["rows"]
        if row["direction"] == "forward" and kinds[row["contender"]] != "yardstick" and row["seconds"]
    ]
    assert found["here"] is False and [tuple(row.values()) for row in found["rows"]] == want
    assert len({row["name"] for row in found["rows"]}) == 2 and len(want) >= 8
    assert all(row["lower"] <= row["seconds"] <= row["upper"] for row in found["rows"])


BAD_ROW = {"contender": "ours", "length": 64, "direction": "forward", "seconds": 1.0, "lower": 1.0}
DAMAGED = {
    "not JSON": "{", "empty": "", "another kind": "[]", "a number": "7", "null": "null", "nothing": "{}",
    "no rows": json.dumps(bench(rows=[])),
    "rows of text": json.dumps(bench(rows="<script>alert(1)</script>")),
    "a row of text": json.dumps(bench(rows=["x"])),
    "a row without an upper quartile": json.dumps(bench(rows=[BAD_ROW])),
    "seconds in words": json.dumps(bench(rows=[BAD_ROW | {"seconds": "soon", "upper": 1}])),
    "an unknown contender": json.dumps(bench(rows=[BAD_ROW | {"contender": "x", "upper": 1}])),
    "settings of text": json.dumps(bench(settings="x")),
    "contenders null": json.dumps(bench(contenders=None)),
    "deep": "[" * 100_000,
    "NaN": json.dumps(bench(rows=[BAD_ROW | {"seconds": math.nan, "upper": 1}])),
    "infinite": json.dumps(bench(rows=[BAD_ROW | {"upper": math.inf}])),
    "an endless length": json.dumps(bench(rows=[BAD_ROW | {"upper": 1, "length": math.inf}])),
    "negative": json.dumps(bench(rows=[BAD_ROW | {"upper": 1, "lower": -1}])),
    "no length": json.dumps(bench(rows=[BAD_ROW | {"upper": 1, "length": 0}])),
    "huge": json.dumps(bench(rows=[BAD_ROW | {"upper": 1, "length": 1}])).replace('"length": 1',
    '"length": ' + "9" * 5000),
}  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_bench_is_refused(tmp_path, text):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(InputError, match=r"^--bench: .* holds no readable results of reassoc bench"):
        cost.measured(tmp_path)


def test_a_folder_without_a_bench_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds no bench\.json; run: reassoc bench --out"):
        cost.measured(tmp_path)
    (tmp_path / "bench.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"^--bench: "):
        cost.measured(tmp_path)
    (tmp_path / "bench.json").unlink()
    (tmp_path / "bench.json").mkdir()
    with pytest.raises(InputError, match=r"^--bench: "):
        cost.measured(tmp_path)


# ---------------------------------------------------------------------------------------------------------
# Approximation
# ---------------------------------------------------------------------------------------------------------

D = approximation.DIM
SOME = [("0.5", "1", "60"), ("1", "1", "0"), ("1", "2", "120"), ("1.5", "1.5", "180"), ("0.75", "0.25", "90")]


def squares(qnorm, knorm, angle):
    """(x.y, |x + y|^2, |x - y|^2) by the law of cosines."""
    q, k = float(qnorm), float(knorm)
    product = q * k * math.cos(math.radians(float(angle)))
    return product, q * q + k * k + 2 * product, q * q + k * k - 2 * product


def estimates(pair, **given):
    return asked("approximation", qnorm=pair[0], knorm=pair[1], angle=pair[2], **given)


@pytest.mark.parametrize("pair", SOME, ids="-".join)
@pytest.mark.parametrize("kind", ["positive", "optimal", "trig"])
@pytest.mark.parametrize("orthogonal", ["no", "yes"])
def test_the_band_is_the_variance_in_closed_form(kind, orthogonal, pair):
    product, plus, minus = squares(*pair)
    found = estimates(pair, kind=kind, orthogonal=orthogonal)
    assert found["truth"] == near(math.exp(product)) and found["product"] == near(product, abs=1e-15)
    assert found["exact"] is (kind == "positive" or (kind == "trig" and orthogonal == "no"))
    for width in found["widths"]:
        m = width["m"]
        if kind == "trig":  # E cos^2 - (E cos)^2, over exp(-|x - y|^2)
            variance = math.exp(minus) * (1 - math.exp(-minus)) ** 2 / 2 / m
        else:  # uncalibrated, the optimal map is the positive one with a bound that knows of no blocks
            variance = (math.exp(plus) - 1) / m
        if kind == "positive" and orthogonal == "yes":
            # Two rows of a block of d are at right angles and of chi lengths: w_i.z + w_j.z is a length of
            # chi^2(2d) along one of many directions, E = e^-s 1F1(d; d/2; s/2) beside 1 if they were apart.
            pairs = sum(size * (size - 1) for size in [min(D, m - start) for start in range(0, m, D)])
            together = math.exp(-plus) * mpmath.hyp1f1(D, D / 2, plus / 2)
            variance += pairs / m**2 * (float(together) - 1)
        assert width["predicted"] ** 2 == near(variance, rel=1e-7, abs=1e-12), m


def test_the_variances_of_the_worked_example():
    """The pairs at whole degrees, by length and angle; what one feature gives is m times the variance."""
    case = CASES["estimator-variance-times-m"]
    compared = 0
    for (x, y), want in zip(case["inputs"]["pairs"], case["expect"]["values"], strict=True):
        lengths = math.hypot(*x), math.hypot(*y)
        cosine = sum(map(float.__mul__, x, y)) / math.prod(lengths)
        angle = math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
        if abs(angle - round(angle)) > 1e-5:
            continue
        pair = [*(f"{length:.16f}" for length in lengths), str(round(angle))]
        for kind in ("trig", "positive"):
            found = estimates(pair, kind=kind, orthogonal="no")
            compared += 1
            for width in found["widths"]:
                got = width["predicted"] ** 2 * width["m"] * found["truth"] ** 2
                assert got == near(want[kind], rel=1e-6, abs=1e-9), (kind, x, y)
    assert compared == 2 * 4


@pytest.mark.parametrize("kind", ["positive", "optimal", "trig"])
@pytest.mark.parametrize("calibrated", ["no", "yes"])
def test_what_is_seen_agrees_with_what_is_predicted(kind, calibrated):
    """Means and deviations of 32 draws: those of an estimate that is nearly normal, within five sigma."""
    judged = 0
    for pair, orthogonal in itertools.product(SOME, ("no", "yes")):
        found = estimates(pair, kind=kind, orthogonal=orthogonal, calibrated=calibrated)
        for width in found["widths"]:
            seen = torch.tensor(width["estimates"], dtype=torch.float64)
            assert len(seen) == approximation.DRAWS
            assert width["mean"] == near(seen.mean().item(), abs=1e-8)
            assert width["deviation"] == near(seen.std().item(), abs=1e-8)
            predicted = width["predicted"]
            if predicted > 0.15 or predicted * math.sqrt(width["m"]) > 1.2:
                continue  # far from normal: 32 draws say little
            judged += 1
            assert abs(width["mean"] - 1) <= 5 * predicted / math.sqrt(len(seen)) + 1e-9
            assert width["deviation"] <= predicted * (1 + 5 / math.sqrt(2 * 31)) + 1e-9
            if found["exact"]:
                assert width["deviation"] >= predicted * (1 - 4 / math.sqrt(2 * 31)) - 1e-9
    assert judged >= 15
    if kind != "trig":
        assert found["negative"] == 0


def test_negative_estimates_are_counted():
    found = estimates(("2", "2", "180"), kind="trig")
    assert found["negative"] == sum(x < 0 for width in found["widths"] for x in width["estimates"]) > 0


def test_a_request_does_not_change_the_next():
    """Calibrating works on a copy: maps are kept between requests."""
    before = estimates(SOME[0], kind="optimal")
    estimates(SOME[0], kind="optimal", calibrated="yes")
    from reassoc.explorer import panels

    panels._answer.cache_clear()
    assert estimates(SOME[0], kind="optimal") == before


# ---------------------------------------------------------------------------------------------------------
# Capacity
# ---------------------------------------------------------------------------------------------------------

SIZE = 8
FEATURES = {
    "identity": oracle.identity, "elu+1": oracle.elu1, "relu": oracle.relu,
    "dpfp-1": lambda x: oracle.dpfp(x, 1), "dpfp-2": lambda x: oracle.dpfp(x, 2),
    "favor+": lambda x: oracle.positive(
        x, feature_maps.make("favor+", SIZE, num_features=32, seed=0).projections.double(), scale=SIZE**-0.5
    ),
}  # fmt: skip
NAMES = dict(
    zip(FEATURES, ["identity", "ELU+1", "ReLU", "DPFP-1", "DPFP-2", "positive (FAVOR+)"], strict=True)
)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def remembered(phi, keys, values, queries, rule, beta, decay):
    """Keys (n, d), values (n, e), queries (Q, d): written one after the other, then read, (Q, e)."""
    features, asked_with = phi(keys).value(), phi(queries).value()
    if rule == "sum":
        weights = asked_with @ features.T
        total = weights.sum(-1, keepdim=True)
        return torch.where(total == 0, 0.0, weights @ values / torch.where(total == 0, 1.0, total))
    memory = torch.zeros(features.shape[-1], values.shape[-1], dtype=torch.float64)
    for feature, value in zip(features, values, strict=True):
        if rule == "gated delta":
            memory = decay * memory
        length = feature @ feature
        if length > 0:
            memory = memory + torch.outer(feature, value - feature @ memory) * (beta / length)
    return asked_with @ memory


def retrieval_error(name, rule, count, passes, beta, decay):
    keys, values = normal(8, 1, 64, SIZE, seed=0)[:, 0, :count], normal(8, 1, count, SIZE, seed=1)[:, 0]
    wrong = [
        remembered(FEATURES[name], k.repeat(passes, 1), v.repeat(passes, 1), k, rule, beta, decay) - v
        for k, v in zip(keys, values, strict=True)
    ]
    return (torch.stack(wrong).square().mean() / values.square().mean()).item()


SETTINGS = [
    ("dpfp-2", "8", "1", "1", "0.95"),
    ("elu+1", "16", "4", "0.5", "0.8"),
    ("favor+", "32", "1", "0.3", "1"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids="-".join)
def test_retrieval_errors_are_those_of_a_plain_memory(settings):
    name, pairs, passes, beta, decay = settings
    found = asked("capacity", memory=name, pairs=pairs, passes=passes, beta=beta, decay=decay)
    how = int(passes), float(beta), float(decay)
    assert found["features"] == FEATURES[name](torch.ones(1, SIZE, dtype=torch.float64)).sign.shape[-1]
    assert [line["pairs"] for line in found["lines"]][-1] == 64
    for line, rule in itertools.product(found["lines"], ("sum", "delta", "gated delta")):
        if line["pairs"] in (1, 6, 24):
            assert line[rule] == near(retrieval_error(name, rule, line["pairs"], *how), rel=1e-6, abs=1e-9)
    assert [row["name"] for row in found["maps"]] == list(NAMES.values())
    for row, other in zip(found["maps"], NAMES, strict=True):
        for rule in ("sum", "delta", "gated delta"):
            want = retrieval_error(other, rule, int(pairs), *how)
            # Signed denominators may nearly vanish, and rounding with them is large.
            assert row[rule] == near(want, rel=1e-4 if want > 1e3 else 1e-6, abs=1e-9), (other, rule)


@pytest.mark.parametrize("name", FEATURES)
def test_the_bound_is_what_the_best_memory_of_that_size_leaves(name):
    """Least squares on the features leave 1 - rank / n of random values: here by projecting onto them."""
    found = asked("capacity", memory=name)
    for line in found["lines"]:
        keys = normal(8, 1, 64, SIZE, seed=0)[:, 0, : line["pairs"]]
        features = FEATURES[name](keys).value()
        left, singular, _ = torch.linalg.svd(features, full_matrices=False)
        real = singular > 1e-9 * singular.amax(-1, keepdim=True).clamp_min(1e-300)
        projected = (left * real[:, None]).square().sum((-1, -2))  # traces of the projections
        assert line["bound"] == near(1 - projected.mean().item() / line["pairs"], abs=1e-9)
        assert 0 <= line["bound"] <= 1


def test_a_key_written_again():
    found = asked("overwriting", memory="elu+1", beta="0.7", decay="0.9")
    names = "abc"
    keys = dict(zip(names, normal(1, 1, 64, SIZE, seed=0)[0, 0, :3], strict=True))
    queries = torch.stack([keys[name] for name in names])
    seen, wanted = [], dict.fromkeys(names)
    assert [(write["key"], write["value"]) for write in found["writes"]] == [
        ("a", 1), ("b", -1), ("a", 3), ("c", 2), ("b", 1), ("a", -2)
    ]  # fmt: skip
    for write in found["writes"]:
        seen.append((keys[write["key"]], write["value"]))
        wanted[write["key"]] = write["value"]
        assert write["wanted"] == wanted
        k = torch.stack([key for key, _ in seen])
        v = torch.tensor([[value] for _, value in seen], dtype=torch.float64)
        for rule in ("sum", "delta", "gated delta"):
            want = remembered(FEATURES["elu+1"], k, v, queries, rule, 0.7, 0.9)[:, 0]
            assert list(write["reads"][rule].values()) == near(want.tolist(), rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("memory", FEATURES)
def test_the_delta_rules_read_at_once_what_was_written(memory):
    found = asked("overwriting", memory=memory, beta="1", decay="0.8")
    for write in found["writes"]:
        for rule in ("delta", "gated delta"):
            assert write["reads"][rule][write["key"]] == near(write["value"], rel=1e-7)
