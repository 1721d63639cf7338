"""What the panel "Reassociation" answers, against the oracle, plain sums and the worked examples."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

import oracle
from reassoc import feature_maps
from reassoc.explorer.panels import answer
from reassoc.explorer.presets import PRESETS

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "worked_examples.json").read_text())["cases"]
}
# What the page calls a map, and the same map written out.
MAPS = {
    "identity": ({"map": "identity"}, lambda x: oracle.identity(x)),
    "elu+1": ({"map": "elu+1"}, lambda x: oracle.elu1(x)),
    "relu": ({"map": "relu"}, lambda x: oracle.relu(x)),
    "dpfp-1": ({"map": "dpfp", "nu": "1"}, lambda x: oracle.dpfp(x, 1)),
    "dpfp-2": ({"map": "dpfp", "nu": "2"}, lambda x: oracle.dpfp(x, 2)),
    "dpfp-3": ({"map": "dpfp", "nu": "3"}, lambda x: oracle.dpfp(x, 3)),
    "trig": ({"map": "trig", "m": "4", "seed": "2"}, lambda x: drawn("trig", oracle.trigonometric, x)),
    "favor+": ({"map": "favor+", "m": "4", "seed": "2"}, lambda x: drawn("favor+", oracle.positive, x)),
}
BUDGET = 1e-8  # answers travel with nine digits
POLICIES = {"nan": "NaN", "zero": "0"}


def drawn(name, formula, x):
    """A random map by its formula; only the projections are the library's."""
    size = x.shape[-1]
    rows = feature_maps.make(name, size, num_features=4, seed=2).projections.double()
    return formula(x, rows, scale=size**-0.5)


def asked(**given):
    return json.loads(answer("reassociation", given.items()), parse_constant=pytest.fail)


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(got, want, unit=None, what=""):
    """Numbers, or "NaN", within the budget of a unit: the number itself, or what it was made of."""
    want = want if isinstance(want, torch.Tensor) else tensor(want)
    got = tensor([float(x) for x in flat(got)]).reshape(want.shape)
    unit = want.abs() if unit is None else torch.as_tensor(unit, dtype=torch.float64).expand(want.shape)
    assert torch.equal(got.isnan(), want.isnan()), (what, got, want)
    wrong = (got - want).abs().nan_to_num() > BUDGET * unit.nan_to_num() + 1e-300
    assert not wrong.any(), (what, got, want)


def flat(numbers):
    return [x for part in numbers for x in flat(part)] if isinstance(numbers, list) else [numbers]


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_number_at_every_prefix(preset, name):
    parameters, phi = MAPS[name]
    found = asked(preset=preset, **parameters)
    start = PRESETS[preset]
    q, k, v = tensor(start.query), tensor(start.key), tensor(start.value)
    features, keys = phi(q).value(), phi(k).value()
    parts = features[:, None] * keys[None]  # (Q, n, r)
    scores, sizes = parts.sum(-1), parts.abs().sum(-1)
    close(found["query_features"], features, what="query features")
    close(found["key_features"], keys, what="key features")
    close(found["scores"], scores, sizes, "scores")
    close(found["terms"], scores[..., None] * v, sizes[..., None] * v.abs(), "terms")
    assert len(found["prefixes"]) == len(k) + 1
    for count, seen in enumerate(found["prefixes"]):
        what = f"prefix {count}"
        outer = keys[:, :, None] * v[:, None, :]  # (n, r, e)
        close(seen["S"], outer[:count].sum(0), outer[:count].abs().sum(0), f"S, {what}")
        close(seen["z"], keys[:count].sum(0), keys[:count].abs().sum(0), f"z, {what}")
        last = slice(max(count - 1, 0), count)
        close(seen["added_S"], outer[last].sum(0), what=f"added to S, {what}")
        close(seen["added_z"], keys[last].sum(0), what=f"added to z, {what}")
        want = oracle.attend(
            *(oracle.Features(*(part[None, None] for part in phi(x))) for x in (q, k[:count])),
            v[None, None, :count],
        )
        output, scale = want.output[0, 0], want.scale[0, 0]
        scale = scale + want.spread[0, 0, :, None] * 1e-6  # of a row whose terms are all zero
        close(seen["weights"], want.weights[0, 0], want.spread[0, 0, :, None], f"weights, {what}")
        terms = scores[:, :count, None] * v[:count]
        for i, way in itertools.product(range(len(q)), ("rescan", "state")):
            which = f"{way}, query {i}, {what}"
            given = seen[way][i]
            size = (sizes[i, :count, None] * v[:count].abs()).sum(0)
            close(given["numerator"], terms[i].sum(0), size, f"numerator, {which}")
            close(
                given["denominator"], scores[i, :count].sum(), sizes[i, :count].sum(), f"denominator, {which}"
            )
            close(given["output"], output[i], scale[i], f"output, {which}")
        undefined = [None if row is None else set(row) for row in seen["undefined"]]
        assert undefined == [
            {"nan", "zero", "raise"} if row else None for row in want.undefined[0, 0].tolist()
        ]
        for i, row in enumerate(seen["undefined"]):
            if row is not None:
                assert row["nan"] == "NaN" and row["zero"] == "0" and row["raise"].startswith("ValueError: ")
                assert "denominator is zero, or no key is visible" in row["raise"]
            else:
                assert seen["difference"][i] <= 1e-10 * scale[i].max()
        softmax_close(seen, q, k[:count], v[:count], what)


def softmax_close(seen, q, k, v, what):
    """Softmax attention in plain numbers."""
    for i, query in enumerate(q.tolist()):
        if not len(k):
            assert seen["softmax_weights"][i] == []
            continue
        logits = [sum(map(float.__mul__, query, key)) / math.sqrt(len(query)) for key in k.tolist()]
        weights = [math.exp(x) for x in logits]
        shares = tensor([w / sum(weights) for w in weights])
        close(seen["softmax_weights"][i], shares, what=f"softmax weights, {what}")
        close(seen["softmax"][i], (shares[:, None] * v).sum(0), (shares[:, None] * v.abs()).sum(0), what)


# ---------------------------------------------------------------------------------------------------------
# The worked examples that the presets show
# ---------------------------------------------------------------------------------------------------------


def same(got, want):
    close(got, want, unit=tensor(want).abs() + 1e-7)


@pytest.mark.parametrize("query", [(1, 0), (0, 1), (1, 1), (2, -1)])
def test_four_exact_keys(query):
    case = CASES[f"identity-q{query}"]
    expect = case["expect"]
    assert [list(row) for row in PRESETS["exact"].key] == case["inputs"]["K"]
    found = asked(preset="exact", map="identity")
    seen = found["prefixes"][4]
    assert flat(seen["S"]) == expect["S"] and seen["z"] == expect["z"]
    for way in ("rescan", "state"):
        row = seen[way][PRESETS["exact"].query.index(query)]
        assert row["numerator"] == [expect["numerator"]] and row["denominator"] == expect["denominator"]
        same(row["output"], [expect["output"]])


def test_the_first_key_of_the_general_preset():
    expect = CASES["general-preset-prefix-1-elu"]["expect"]
    found = asked(preset="general", map="elu+1")
    seen = found["prefixes"][1]
    assert found["query_features"][0] == expect["phi_q"] and found["key_features"][0] == expect["phi_k"]
    assert flat(seen["S"]) == expect["S"] and seen["z"] == expect["z"]
    for way in ("rescan", "state"):
        assert flat(list(seen[way][0].values())) == [
            expect["numerator"], expect["denominator"], expect["output"]
        ]  # fmt: skip


def test_all_keys_negative():
    expect = CASES["all-negative-relu"]["expect"]
    assert expect["output"] is None
    assert [list(row) for row in PRESETS["negative"].key] == CASES["all-negative-relu"]["inputs"]["K"]
    seen = asked(preset="negative", map="relu")["prefixes"][3]
    assert seen["z"] == expect["z"] and seen["undefined"][0] is not None
    for way in ("rescan", "state"):
        assert seen[way][0] == {
            "numerator": [expect["numerator"]], "denominator": expect["denominator"], "output": ["NaN"]
        }  # fmt: skip
    expect = CASES["all-negative-elu"]["expect"]
    seen = asked(preset="negative", map="elu+1")["prefixes"][3]
    same(seen["z"], expect["z"])
    same(seen["S"], expect["S"])
    for way in ("rescan", "state"):
        same([seen[way][0]["numerator"][0], seen[way][0]["denominator"], seen[way][0]["output"][0]],
             [expect["numerator"], expect["denominator"], expect["output"]])  # fmt: skip


def test_the_running_example():
    case, full, soft = (
        CASES[name] for name in ("elu-causal-normalised", "elu-full-normalised", "softmax-causal")
    )
    start = PRESETS["running"]
    assert [[list(row) for row in rows] for rows in (start.query, start.key, start.value)] == [
        case["inputs"][name] for name in "QKV"
    ]
    found = asked(preset="running", map="elu+1")
    assert found["query_features"] == case["expect"]["phi_Q"]
    assert found["key_features"] == case["expect"]["phi_K"]
    for t in range(4):
        for way in ("rescan", "state"):  # query t, prefix t: causal attention; all four keys: the whole
            same(found["prefixes"][t + 1][way][t]["output"], case["expect"]["outputs"][t])
            same(found["prefixes"][4][way][t]["output"], full["expect"]["outputs"][t])
        same(found["prefixes"][t + 1]["softmax"][t], soft["expect"]["outputs"][t])


@pytest.mark.parametrize("nu", [1, 2])
def test_dpfp(nu):
    case = CASES[f"dpfp-{nu}"]
    keys = case["inputs"]["keys"]
    spelled = ";".join(",".join(map(str, key)) for key in keys)
    values = ";".join("1" for _ in keys)
    found = asked(map="dpfp", nu=str(nu), q="1,1", k=spelled, v=values)
    same(found["key_features"], case["expect"]["phi"])
    assert {tuple(key) for key in keys} & {tuple(map(float, key)) for key in PRESETS["mixed"].key}


# ---------------------------------------------------------------------------------------------------------
# Numbers of one's own
# ---------------------------------------------------------------------------------------------------------


def test_own_numbers_take_the_place_of_the_preset():
    start = PRESETS["running"]
    own = {
        name: ";".join(",".join(f" {x:+.3e} " for x in row) for row in rows)
        for name, rows in zip("qkv", (start.query, start.key, start.value), strict=True)
    }
    assert asked(map="elu+1", **own) == asked(preset="running", map="elu+1")
    assert asked(map="elu+1", preset="negative", **own) == asked(preset="running", map="elu+1")


def test_what_depends_on_nothing_else():
    """A seed and a number of projections matter to random maps only; another seed is another draw."""
    assert asked(map="relu", m="7", seed="3", nu="2") == asked(map="relu")
    assert asked(map="favor+", seed="3") != asked(map="favor+", seed="4")
    assert (
        asked(map="favor+", m="7")["query_features"][0][6:]
        and len(asked(map="trig", m="7")["key_features"][0]) == 14
    )


def test_a_note_of_the_map_is_shown():
    notes = asked(map="identity", q="1,2", k="1,2", v="1")["notes"]
    odd = asked(map="dpfp", q="1", k="1", v="1")["notes"]
    assert all(isinstance(note, str) for note in [*notes, *odd])


def test_the_largest_numbers_leave_a_readable_answer():
    """1000 in every place: exp(1000) has no number, and the answer says so in words."""
    for parameters in ({"map": "favor+"}, {"map": "trig"}, {"map": "elu+1"}, {"map": "dpfp", "nu": "3"}):
        for sign in (1, -1):
            found = asked(q="1000,1000", k=f"{1000 * sign},-1000;1000,1000", v="1000,1;-1000,2", **parameters)
            assert len(found["prefixes"]) == 3
            assert {x for x in flat(found["scores"]) if isinstance(x, str)} <= {
                "NaN",
                "Infinity",
                "-Infinity",
            }
