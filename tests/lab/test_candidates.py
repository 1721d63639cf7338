"""Candidates: what a user writes becomes maps at widths, or one line that says what is wrong."""

import pytest
import torch

from reassoc import feature_maps, linear_attention
from reassoc.lab import InputError
from reassoc.lab.candidates import MEAN, OPTIONS, RANDOM, Candidate, MeanOfValues, candidates


def named(*found):
    return [(c.name, c.width) for c in found]


def test_random_maps_come_at_every_width_and_others_once():
    found = candidates(["favor+", "elu+1", "trig", "mean"], [8, 16])
    assert named(*found) == [
        ("favor+", 8), ("favor+", 16), ("elu+1", None), ("trig", 8), ("trig", 16), ("mean", None),
    ]  # fmt: skip


def test_options_are_put_in_order_and_repeats_dropped():
    texts = ["favor+:hyperbolic:calibrated", " favor+:calibrated:hyperbolic", "favor+:calibrated:calibrated"]
    assert named(*candidates(texts, [8])) == [("favor+:calibrated:hyperbolic", 8), ("favor+:calibrated", 8)]
    assert named(*candidates(["relu", "relu"], [8, 8])) == [("relu", None)]
    assert candidates([], [8]) == []


def test_parts_of_a_candidate():
    c = Candidate("favor+:calibrated:hyperbolic", 64)
    assert (c.base, c.options) == ("favor+", {"calibrated", "hyperbolic"})
    assert c.random and c.calibrated and c.per_projection == 2
    plain = Candidate("elu+1", None)
    assert not plain.random and not plain.calibrated and plain.options == frozenset()
    assert Candidate("landmark", 8).calibrated and Candidate("landmark", 8).random


ALL = [n for n in feature_maps.names() if n != "favor++"]
ALL += ["mean", "dpfp-5", "favor++:calibrated", "favor+:iid", "trig:calibrated:iid", "favor+:hyperbolic"]


@pytest.mark.parametrize("name", ALL)
def test_every_name_builds_the_map_it_names(name):
    (candidate,) = candidates([name], [10])
    phi = candidate.build(8, 2, 0.25, seed=3)
    assert phi.dim == 8
    assert phi.name.split("-")[0] in (candidate.base.split("-")[0], "favor+", "generalized")
    if candidate.random:
        assert phi.heads == 2 and phi.seed == 3 and phi.scale == 0.25
        assert phi.feature_dim == 10  # 10 = 4 * 5 / 2 is also what a landmark map of rank 4 has
    if candidate.random and candidate.base not in ("landmark", "codebook"):
        assert phi.orthogonal == ("iid" not in candidate.options)
        assert not phi.calibrated
    assert phi.heads == (2 if candidate.random or name in ("hedgehog", "t2r") else None)
    assert candidate.feature_operations(8, phi.feature_dim) > 0


def test_hyperbolic_and_optimal_reach_the_map():
    assert Candidate("favor+:hyperbolic", 8).build(4, 1, 0.5, 0).hyperbolic
    assert not Candidate("favor+", 8).build(4, 1, 0.5, 0).hyperbolic
    assert Candidate("favor++:calibrated", 8).build(4, 1, 0.5, 0).optimal


def test_seeds_draw_differently_and_repeatably():
    def build(seed):
        return Candidate("favor+", 8).build(4, 2, 0.5, seed).projections

    assert torch.equal(build(0), build(0)) and not torch.equal(build(0), build(1))


def test_operations_grow_with_features_and_calibration():
    for name in RANDOM:
        assert Candidate(name, 8).feature_operations(16, 64) > Candidate(name, 8).feature_operations(16, 8)
    plain, learned = Candidate("favor+", 8), Candidate("favor+:calibrated", 8)
    assert learned.feature_operations(16, 8) - plain.feature_operations(16, 8) == 2 * 16 * 16
    # Two features of one projection share its product.
    assert Candidate("trig", 8).feature_operations(16, 8) < plain.feature_operations(16, 8)


@pytest.mark.parametrize("width", [0, -8])
def test_widths_that_are_none(width):
    with pytest.raises(InputError, match=f"--widths: .* at least 1, got {width}"):
        candidates(["elu+1"], [8, width])


@pytest.mark.parametrize("name", ["trig", "favor+:hyperbolic", "favor++:calibrated:hyperbolic"])
def test_odd_widths_for_maps_in_pairs(name):
    assert named(*candidates([name], [2]))
    with pytest.raises(InputError, match=r"--widths: .*:?.* has features in pairs, 7 is odd"):
        candidates([name], [8, 7])
    assert named(*candidates(["favor+"], [7])) == [("favor+", 7)]


@pytest.mark.parametrize("name", ["performer", "", "dpfp-0", "dpfp-", "dpfp-x", "dpfp", "Favor+", ":iid"])
def test_unknown_maps_list_the_known_ones(name):
    with pytest.raises(InputError) as caught:
        candidates(["elu+1", name], [8])
    message = str(caught.value)
    assert message.startswith(f"--maps: unknown map {name.split(':')[0]!r}; known: ") and "\n" not in message
    for known in (*feature_maps.names(), MEAN):
        assert known in message


def test_unknown_options_list_the_known_ones():
    with pytest.raises(InputError, match=r"unknown option 'sharp' in 'favor.:sharp'; known: ") as caught:
        candidates(["favor+:sharp"], [8])
    for known in OPTIONS:
        assert known in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "elu+1:calibrated",
        "trig:hyperbolic",
        "mean:iid",
        "landmark:iid",
        "landmark:calibrated",
        "codebook:iid",
        "taylor:iid",
    ],
)
def test_options_for_other_maps(name):
    base, option = name.split(":")
    with pytest.raises(InputError) as caught:
        candidates([name], [8])
    assert str(caught.value).startswith(f"--maps: option {option!r} is for ")
    assert str(caught.value).endswith(f"not for {base!r}")


def test_the_optimal_map_needs_calibration():
    with pytest.raises(InputError, match=r"write favor\+\+:calibrated"):
        candidates(["favor++"], [8])


def test_mean_of_values_weighs_every_visible_value_the_same():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    phi = MeanOfValues(4)
    assert phi.feature_dim == 1 and phi.nonnegative
    everything = linear_attention(q, k, v, phi)
    # float64 sums of six values, in another order
    assert torch.allclose(everything, v.mean(2, keepdim=True).expand_as(v), rtol=1e-12, atol=1e-14)
    prefix = v.cumsum(2) / torch.arange(1, 7)[:, None]
    assert torch.allclose(linear_attention(q, k, v, phi, causal=True), prefix, rtol=1e-12, atol=1e-14)
