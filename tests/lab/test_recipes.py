"""Recipes: every part is read into the configuration, names are canonical, mistakes say what is valid."""

import pytest

from reassoc import feature_maps
from reassoc.lab import InputError
from reassoc.lab.recipes import RULES, grid, recipe, recipes


@pytest.mark.parametrize(
    ("text", "mixer", "feature_map", "rule", "decay", "normalize"),
    [
        ("softmax-features", "linear", "softmax", "sum", "token", "attention"),
        ("elu+1", "linear", "elu+1", "sum", "token", "attention"),
        ("elu+1:sum:sum", "linear", "elu+1", "sum", "token", "sum"),
        ("elu+1:attention:delta", "linear", "elu+1", "delta", "token", "attention"),
        ("relu:delta", "linear", "relu", "delta", "token", "sum"),
        ("relu:sum+attention:kda", "linear", "relu", "gated-delta", "feature", "sum+attention"),
        # Features that can be negative have no sum to divide by.
        ("identity:delta", "linear", "identity", "delta", "token", "none"),
        ("trig:gated-delta", "linear", "trig", "gated-delta", "token", "none"),
        ("dpfp-7:gla:none", "linear", "dpfp-7", "decay", "feature", "none"),
        ("elu+1:retention", "linear", "elu+1", "decay", "fixed", "attention"),
        ("elu+1:decay:sum", "linear", "elu+1", "decay", "token", "sum"),
    ],
)
def test_map_rule_and_normalization(text, mixer, feature_map, rule, decay, normalize):
    made = recipe(text).attention
    got = (made.mixer, made.feature_map, made.rule, made.decay, made.normalize)
    assert got == (mixer, feature_map, rule, decay, normalize)


def test_options():
    made = recipe("favor+:conv=4:rotary:features=64:iid:redraw=100:carried")
    assert made.attention.map_options == {"num_features": 64, "orthogonal": False}
    assert (made.attention.convolution, made.attention.position) == (4, "rotary")
    assert (made.carried, made.redraw, made.learned) == (True, 100, False)
    assert recipe("elu+1:learned").learned and not recipe("elu+1").carried
    assert recipe("softmax:rotary").attention.mixer == "softmax"
    assert recipe("relu:rotary-after").attention.position == "rotary-after"


def test_features_are_counted_as_the_state_counts_them():
    options = recipe("trig:features=64").attention.map_options
    assert feature_maps.make("trig", 16, **options).feature_dim == 64
    with pytest.raises(InputError, match="groups of 2"):
        recipe("trig:features=63")


def test_sized_fills_in_heads_and_seed():
    made = recipe("favor+:features=32").sized(heads=8, key_heads=2, seed=5)
    assert (made.heads, made.key_heads) == (8, 2)
    assert made.map_options == {"num_features": 32, "seed": 5}
    assert "seed" not in recipe("elu+1").sized(heads=4, seed=5).map_options


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" elu+1 : sum ", "elu+1"),
        ("elu+1:attention", "elu+1"),
        ("elu+1:delta:sum", "elu+1:delta"),
        ("elu+1:none:sum", "elu+1:none"),
        ("elu+1:sum:sum", "elu+1:sum:sum"),
        ("favor+:carried:iid:delta:redraw=9:features=64", "favor+:delta:features=64:redraw=9:iid:carried"),
    ],
)
def test_names_are_canonical_and_mean_the_same(text, name):
    assert recipe(text).name == name and recipe(name) == recipe(text)


def test_every_map_and_rule_has_a_name_that_reads_back():
    maps = [m for m in feature_maps.names() if m not in ("favor++", "landmark")]
    found = grid(maps, list(RULES), [None, "attention", "none"], ["truncated", "carried"]).texts
    assert len(found) > 14 * 7 * 2 * 2
    for text in found:
        assert recipe(text).name == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "unknown map ''; known: softmax, softmax-features, identity, elu+1"),
        ("elu", "unknown map 'elu'"),
        ("dpfp-0", "unknown map"),
        ("landmark", "fitted to data"),
        ("favor++", "fitted to data"),
        ("elu+1:deltas", "unknown part 'deltas'; known: sum, decay, gla"),
        ("elu+1:delta:decay", "'decay' contradicts"),
        ("elu+1:delta:sum:sum", "'sum' contradicts"),
        ("elu+1:sum:attention:none", "'none' contradicts"),
        ("elu+1:features=8", "features is for random maps: trig, favor+, generalized-relu"),
        ("elu+1:redraw=8", "redraw is for random maps"),
        ("favor+:features=0", "features= takes a whole number from 1"),
        ("favor+:features=x", "features= takes a whole number"),
        ("favor+:features=8:features=9", "repeats"),
        ("elu+1:rotary:learned", "rotary and learned exclude each other"),
        ("elu+1:learned:carried", "take rotary with carried"),
        ("softmax:delta", "softmax attention has no delta"),
        ("softmax:none", "softmax attention has no none"),
        ("softmax:carried", "a cache that grows"),
    ],
)
def test_mistakes_are_one_line_that_says_what_is_valid(text, words):
    with pytest.raises(InputError) as caught:
        recipe(text)
    message = str(caught.value)
    assert words in message and "\n" not in message and message.startswith("recipe ")


def test_recipes_come_once_each_in_order():
    assert [r.name for r in recipes(["relu", "elu+1", "relu:sum"])] == ["relu", "elu+1"]
    with pytest.raises(InputError, match="at least one"):
        recipes([])


def test_grid_leaves_out_what_means_nothing_and_says_so():
    found = grid(
        ["softmax", "elu+1", "trig:features=8"],
        ["sum", "delta"],
        ["attention", "sum"],
        ["truncated", "carried"],
    )
    assert found.texts == [
        "softmax", "elu+1", "elu+1:carried", "elu+1:sum:sum", "elu+1:sum:sum:carried",
        "elu+1:delta:attention", "elu+1:delta:attention:carried", "elu+1:delta", "elu+1:delta:carried",
        "trig:features=8", "trig:features=8:carried", "trig:delta:attention:features=8",
        "trig:delta:attention:features=8:carried",
    ]  # fmt: skip
    assert len(found.left_out) == 1 + 4
    assert found.left_out[0].startswith("softmax:carried: softmax attention would carry a cache")
    assert all("no sum to divide by" in line for line in found.left_out[1:])


def test_grid_refuses_unknown_names():
    for arguments, word in (
        ((["elu"],), "unknown map"),
        ((["elu+1"], ["deltas"]), "--rules"),
        ((["elu+1"], ["sum"], ["l2"]), "--normalize"),
        ((["elu+1"], ["sum"], [None], ["long"]), "--context"),
    ):
        with pytest.raises(InputError, match=word):
            grid(*arguments)
