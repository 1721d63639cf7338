"""Parameters as they come from an address: whatever they are, a value in one spelling or a message."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reassoc._errors import InputError
from reassoc.explorer.controls import choice, grid, key, numbers, settle
from reassoc.explorer.panels import PAGE_ONLY, PANELS, answer
from reassoc.explorer.tables import LARGEST, MOST, TABLES, WIDEST

MAP = choice("map", "Map", {"plain": "plain", "drawn": "drawn by chance"})
SEED = numbers("seed", "Seed", (0, 1, 2), 0, when=("map", ("drawn",)))
SIZE = numbers("size", "Size", (0.5, 1, 1.5), 1, (0.5, 1.5))
NAMES = [control.name for panel in PANELS.values() for control in panel.controls] + [*TABLES, *PAGE_ONLY]


def refused(name, parameters):
    """The message, one line of a length that a page can show."""
    with pytest.raises(InputError) as caught:
        answer(name, parameters)
    message = str(caught.value)
    assert message and "\n" not in message and "\r" not in message and len(message) < 500
    assert message.isprintable()
    return message


# ---------------------------------------------------------------------------------------------------------
# One control
# ---------------------------------------------------------------------------------------------------------


def test_defaults_and_what_means_nothing_is_left_out():
    assert settle((MAP, SEED, SIZE), {}) == {"map": "plain", "size": "1"}
    assert settle((MAP, SEED, SIZE), {"map": "drawn", "seed": "2"}) == {
        "map": "drawn",
        "seed": "2",
        "size": "1",
    }
    assert settle((MAP, SEED, SIZE), {"seed": "nonsense"}) == {"map": "plain", "size": "1"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5", "1.5"),
        ("1.50", "1.5"),
        ("+1", "1"),
        ("10e-1", "1"),
        (".75", "0.75"),
        ("0.7500", "0.75"),
        ("1.", "1"),
    ],
)
def test_a_number_has_one_spelling(text, value):
    assert SIZE.read(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "nan", "NaN", "inf", "-Infinity", "1e999", "-1e999", "0x1", "1_0", "١", "1,5", "1 ", "\n1",
    "1\n", "1e", "--1", "true",
     "null", "[1]", "1\x00", "\ud800", "９", "1e9999999999999", "9" * 100_000, "1" + "0" * 308],
)  # fmt: skip
@pytest.mark.parametrize("control", [SEED, SIZE], ids=["whole", "broken"])
def test_what_is_no_number_of_the_range_is_refused(control, text):
    with pytest.raises(InputError, match=f"^{control.name} must ") as caught:
        control.read(text)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("text", ["0.4999", "1.51", "-1", "2"])
def test_outside_the_range(text):
    with pytest.raises(InputError, match=r"must lie between 0\.5 and 1\.5"):
        SIZE.read(text)


def test_whole_numbers_only():
    with pytest.raises(InputError, match="must be a whole number"):
        SEED.read("0.5")
    assert SEED.read("2.0") == "2"


@pytest.mark.parametrize("text", ["", "Plain", "plain ", "drawn by chance", "\x00", "../plain"])
def test_only_the_choices(text):
    with pytest.raises(InputError, match="map must be one of plain, drawn; got"):
        MAP.read(text)


def test_a_grid_names_everything_once():
    assert list(grid((MAP, SEED, SIZE))) == [
        {"map": "plain", "size": "0.5"}, {"map": "plain", "size": "1.5"},
        *({"map": "drawn", "seed": str(seed), "size": size} for seed in range(3) for size in ("0.5",
        "1.5")),
    ]  # fmt: skip
    assert key({"map": "drawn", "seed": "1"}) == "map=drawn&seed=1"


@pytest.mark.parametrize("name", PANELS)
def test_what_an_exported_page_starts_with_is_in_its_grid(name):
    """Its sliders stand on values of the grid, and its first answer is that of the defaults."""
    controls = PANELS[name].controls
    assert key(settle(controls, {})) in {key(found) for found in grid(controls)}
    for control in controls:
        assert set(control.grid) <= set(control.values) and control.default in control.values
        assert control.when is None or control.when[0] in {other.name for other in controls}
        assert all(control.read(value) == value for value in control.values)


# ---------------------------------------------------------------------------------------------------------
# Everything at once
# ---------------------------------------------------------------------------------------------------------

CHARACTERS = st.text(max_size=40)
SPELLED = st.one_of(
    st.floats().map(str), st.integers().map(str),
    st.sampled_from([v for p in PANELS.values() for c in p.controls for v in c.values]),
    st.lists(st.lists(st.floats(-2000, 2000).map(str), max_size=5).map(",".join), max_size=18)
    .map(";".join),
)  # fmt: skip


def strict(text):
    def wrong(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=wrong)


@given(
    st.sampled_from(list(PANELS)),
    st.lists(
        st.tuples(st.one_of(st.sampled_from(NAMES), CHARACTERS), st.one_of(SPELLED, CHARACTERS)), max_size=6
    ),
)
@example("reassociation", [("q", "1e3,-1e3"), ("k", "1e3,1e3"), ("v", "1e3"), ("map", "favor+")])
@example("reassociation", [("q", "0"), ("k", "0"), ("v", "0"), ("map", "dpfp"), ("nu", "3")])
@example("overwriting", [("\ud800", "\x00")])
@settings(max_examples=150)
def test_anything_gives_an_answer_or_a_message(name, parameters):
    start = time.perf_counter()
    try:
        found = strict(answer(name, parameters))
    except InputError:
        refused(name, parameters)
    else:
        assert isinstance(found, dict) and found
    assert time.perf_counter() - start < 1


ROWS = st.integers(1, 4).flatmap(
    lambda size: st.lists(
        st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=size, max_size=size), min_size=1, max_size=3
    )
)


@given(ROWS, ROWS, ROWS, st.sampled_from(["identity", "elu+1", "relu", "trig", "favor+", "dpfp"]))
@settings(max_examples=100)
def test_tables_that_fit_together_are_answered(q, k, v, name):
    size = min(len(q[0]), len(k[0]))
    k = [row[:size] for row in k] * (1 + len(v))
    given_ = {
        "q": [row[:size] for row in q], "k": k[: len(v)], "v": [row[:3] for row in v][: len(k)],
    }  # fmt: skip
    spelled = {part: ";".join(",".join(map(repr, row)) for row in rows) for part, rows in given_.items()}
    found = strict(answer("reassociation", [("map", name), *spelled.items()]))
    assert len(found["prefixes"]) == len(given_["k"]) + 1
    if all(isinstance(x, int | float) for row in found["key_features"] for x in row) and name == "identity":
        assert found["key_features"][0] == pytest.approx(given_["k"][0], rel=1e-8)


OWN = {"q": "1,2", "k": "1,2;3,4", "v": "1;2"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": "nan,1"}, "q must be a number such as"),
        ({"k": "1,2;inf,4"}, "k must be a number such as"),
        ({"v": "1e999;2"}, "v must be a number such as"),
        ({"q": "1000.001,0"}, "between -1000 and 1000"),
        ({"q": "1,2;"}, "q must be a number such as"),
        ({"q": "1"}, "q and k must have rows of one size, got 1 and 2"),
        ({"v": "1"}, "k and v must have as many rows: got 2 keys, 1 values"),
        ({"k": "1,2;3"}, "k: all rows must have the same size"),
        ({"k": ";".join(["1,2"] * 10_000)}, "k: at most 16 rows, got 10,000"),
        ({"q": ";".join(["1,2"] * 9)}, "q: at most 8 rows, got 9"),
        ({"q": ",".join(["1"] * 10_000)}, "q: rows of at most 4 numbers, got 10,000"),
        ({"v": "1,2,3,4;1,2,3,4"}, "v: rows of at most 3 numbers, got 4"),
        ({"q": ""}, "q, k and v go together; missing: q"),
        ({"q": "1", "k": "1;2", "map": "dpfp", "nu": "2"}, "nu: keys of size 1 allow shifts up to 1, got 2"),
        ({"q": "<script>alert(1)</script>"}, "q must be a number such as"),
        ({"q": "1,2\r\nSet-Cookie: a=b"}, "q must be a number such as"),
    ],
)
def test_tables_that_do_not_are_refused(change, words):
    assert words in refused("reassociation", (OWN | change).items())


def test_the_largest_tables_are_answered_within_a_second():
    full = {
        name: ";".join([",".join([f"{LARGEST}"] * WIDEST[name])] * MOST[name]) for name in ("q", "k", "v")
    }
    for name in ("dpfp", "favor+", "trig"):
        start = time.perf_counter()
        found = strict(answer("reassociation", {**full, "map": name, "nu": "3", "m": "16"}.items()))
        assert len(found["prefixes"]) == MOST["k"] + 1
        assert time.perf_counter() - start < 1


@pytest.mark.parametrize("name", PANELS)
def test_unknown_and_repeated_parameters(name):
    assert "unknown parameter 'x'; known: " in refused(name, [("x", "1")])
    assert refused(name, [("n", "64"), ("n", "64")]) == "n is given twice"
    assert "unknown parameter" in refused(name, [("<img src=x onerror=alert(1)>", "1")])
    assert "…" in refused(name, [("x" * 100_000, "1")])
    # What is shown is the page's affair; parameters of other panels do not matter here.
    everything = {c.name: c.default for p in PANELS.values() for c in p.controls} | dict.fromkeys(
        PAGE_ONLY, "junk"
    )
    assert answer(name, everything.items()) == answer(name, [])
