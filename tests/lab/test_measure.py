"""One candidate on one site: the truth, the split, and every number against what it should be."""

import dataclasses
import math

import pytest
import torch

from reassoc.lab import InputError, Site
from reassoc.lab.candidates import Candidate
from reassoc.lab.measure import HEAD_COLUMNS, SEED_COLUMNS, measure
from reassoc.lab.softmax import split

ROUNDING = 1e-12  # float64 sums of a few dozen terms, relative


def site(lengths=(6, 9), *, heads=2, groups=2, causal=False, norm=1.0, d=8, e=3, seed=0, name="site"):
    """Gaussian input whose scaled queries and keys have root mean square norm ``norm``."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    factor = norm * d**-0.25
    query = torch.randn(heads, total, d, generator=generator) * factor
    key = torch.randn(groups, total, d, generator=generator) * factor
    value = torch.randn(groups, total, e, generator=generator)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    of = tuple(range(heads)), tuple(range(groups))
    return Site(name, query, key, value, bounds, causal, d**-0.5, "model", 0, of[1], of[0])


def measured(name, width=None, seeds=(0,), **options):
    return measure(Candidate(name, width), split(site(**options)), list(seeds))


def column(result, name, seed=0):
    return torch.tensor(result.seeds[seed][name], dtype=torch.float64)


def over(result, name):
    return torch.tensor(result.heads[name], dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------
# The split and the truth
# ---------------------------------------------------------------------------------------------------------


def test_half_of_the_sequences_calibrates():
    input = site((3, 4, 5, 6, 2))
    found = split(input)
    assert [q.shape for q, _ in found.calibration] == [(1, 2, 3, 8), (1, 2, 4, 8)]
    assert [s.query.shape[2] for s in found.judged] == [5, 6, 2] == [s.rows for s in found.judged]
    assert torch.equal(found.calibration[1][1][0], input.key[:, 3:7].double())
    assert torch.equal(found.judged[0].value[0], input.value[:, 7:12].double())


def test_empty_sequences_do_not_count():
    found = split(site((0, 3, 0, 4, 0)))
    assert len(found.calibration) == 1 and [s.rows for s in found.judged] == [4]


@pytest.mark.parametrize("length", [2, 7])
def test_one_sequence_is_cut_by_position(length):
    input = site((length,))
    found = split(input)
    half = length // 2
    ((query, key),) = found.calibration
    assert torch.equal(query[0], input.query[:, :half].double())
    assert torch.equal(key[0], input.key[:, :half].double())
    (judged,) = found.judged
    assert judged.query.shape[2] == length and judged.rows == length - half  # all keys stay visible
    assert judged.output.shape == (2, length - half, 3)
    assert not judged.cotangent[:, :, :half].any() and judged.cotangent[:, :, half:].all()


@pytest.mark.parametrize("lengths", [(1,), (0, 1, 0), (0,)])
def test_too_short_to_divide(lengths):
    with pytest.raises(InputError, match=f"site 'site' has {sum(lengths)} tokens: at least 2 are needed"):
        split(site(lengths))


@pytest.mark.parametrize("causal", [False, True])
def test_the_truth_is_softmax_attention(causal):
    input = site((5, 8), heads=4, causal=causal)
    (s,) = split(input).judged
    query, key, value = (t[:, 5:].double().requires_grad_() for t in (input.query, input.key, input.value))
    want = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=causal, scale=input.scale, enable_gqa=True
    )[0]
    assert torch.allclose(s.output, want, rtol=ROUNDING, atol=ROUNDING)
    assert torch.allclose(s.weights.sum(-1), torch.ones(4, 8, dtype=torch.float64), rtol=ROUNDING)
    assert torch.equal(
        s.log_kernel.isinf(), torch.ones(8, 8, dtype=torch.bool).triu(1).expand(4, 8, 8) & causal
    )
    gradients = torch.autograd.grad(want, (query, key, value), s.cotangent[0])
    for mine, theirs in zip(s.gradients, gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=ROUNDING)


def test_the_loss_depends_on_the_site_only():
    first, again, other = (split(site(name=name)).judged[0].cotangent for name in ("a", "a", "b"))
    assert torch.equal(first, again) and not torch.equal(first, other)


# ---------------------------------------------------------------------------------------------------------
# Known answers
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(6, 9), (11,)])
def test_the_mean_of_values(causal, lengths):
    input = site(lengths, causal=causal, norm=1.5)
    result = measured("mean", lengths=lengths, causal=causal, norm=1.5)
    (s,) = split(input).judged
    n = s.query.shape[2]
    visible = torch.ones(n, n, dtype=torch.bool).tril() if causal else torch.ones(n, n, dtype=torch.bool)
    uniform = (visible.double() / visible.sum(-1, keepdim=True))[n - s.rows :]
    output = uniform @ s.value[0]
    error = ((output - s.output).square().sum((1, 2)) / s.output.square().sum((1, 2))).sqrt()
    p = s.weights
    wanted = {
        "output_error": error,
        "total_variation": (p - uniform).abs().sum(-1).mean(-1) / 2,
        "kl_divergence": torch.where(p > 0, p * (p / uniform).log(), 0.0).sum(-1).mean(-1),
        "query_gradient_error": torch.ones(2),  # it does not depend on the query,
        "key_gradient_error": torch.ones(2),  # nor on the key
        "effective_features": torch.ones(2),
        "negative_weight_share": torch.zeros(2),
        "undefined_row_share": torch.zeros(2),
        "kl_undefined_row_share": torch.zeros(2),
        "smallest_denominator": torch.ones(2),
    }
    weight = torch.zeros(n, n, dtype=torch.float64)
    weight[n - s.rows :] = uniform
    gradient = weight.mT @ s.cotangent[0]
    wanted["value_gradient_error"] = (
        (gradient - s.gradients[2]).square().sum((1, 2)) / s.gradients[2].square().sum((1, 2))
    ).sqrt()
    mass = visible.double().sum(-1)[n - s.rows :].log() - s.log_kernel.logsumexp(-1)
    wanted["smallest_mass_ratio"] = mass.amin(-1).exp()
    assert set(wanted) == set(SEED_COLUMNS)
    for name, numbers in wanted.items():
        assert torch.allclose(column(result, name), numbers.double(), rtol=1e-10, atol=1e-12), name
    assert result.features == 1 and list(result.seeds) == [0]
    assert result.heads["output_error"] == result.seeds[0]["output_error"]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_a_map_that_is_softmax_has_no_error(causal, groups):
    """With scores s of about 1e-4 Taylor's kernel is exp(s) to s^3 / 6, its slope to s^2 / 2."""
    result = measured("taylor", lengths=(7, 12), heads=4, groups=groups, causal=causal, norm=1e-2)
    for name in ("output_error", "total_variation", "kl_divergence"):
        assert column(result, name).abs().max() < 1e-10, name
    for part in ("query", "key"):
        assert column(result, f"{part}_gradient_error").max() < 1e-6, part
    assert column(result, "value_gradient_error").max() < 1e-10
    assert torch.allclose(column(result, "smallest_mass_ratio"), torch.ones(4).double(), rtol=1e-10)
    # The same map where the scores are of order one is not softmax: the bounds above can fail.
    far = measured("taylor", lengths=(7, 12), heads=4, groups=groups, causal=causal, norm=2.0)
    assert column(far, "output_error").min() > 1e-3 and column(far, "query_gradient_error").min() > 1e-2


def test_random_maps_approach_softmax():
    """Errors fall as m^-1/2: 256 times the features, a sixteenth of the error. Four draws know it roughly."""
    few, many = (measured("favor+", m, range(4), norm=0.1) for m in (16, 4096))
    for c in ("output_error", "query_gradient_error", "key_gradient_error", "value_gradient_error"):
        large, small = (
            torch.stack([column(r, c, seed) for seed in range(4)]).median(0).values for r in (few, many)
        )
        assert (small < 0.25 * large).all() and (small > 0.02 * large).all(), c


@pytest.mark.parametrize("name, groups", [("favor+:iid", 2), ("trig:iid", 1), ("favor+:hyperbolic:iid", 2)])
def test_observed_variance_is_the_predicted_one(name, groups):
    """Two hundred draws know a variance to (2 / 200)^1/2 = 10 %."""
    result = measured(name, 16, range(200), lengths=(4, 5), groups=groups, norm=0.3)
    predicted = over(result, "predicted_relative_variance")
    observed = over(result, "observed_relative_variance")
    assert (predicted > 0).all()
    assert ((observed / predicted - 1).abs() < 0.2).all(), observed / predicted


@pytest.mark.parametrize("name", ["favor+", "favor++:calibrated", "trig", "landmark", "generalized-relu"])
def test_squared_bias_and_variance_are_the_squared_error(name):
    """An identity of sums: the mean of |o_s - t|^2 over draws is |mean - t|^2 - var / S + var."""
    result = measured(name, 10, range(6), lengths=(5, 7, 6, 8))
    errors = torch.stack([column(result, "output_error", seed) for seed in range(6)])
    parts = over(result, "output_squared_bias") + over(result, "output_variance")
    assert torch.allclose(errors.square().mean(0), parts, rtol=1e-9)
    assert (over(result, "output_variance") > 0).all()
    middle = errors.sort(0).values[2:4].mean(0)
    assert torch.allclose(over(result, "output_error"), middle, rtol=ROUNDING)


def test_a_biased_map_shows_its_bias():
    """Generalized ReLU features estimate another kernel: the bias stays, the variance goes."""
    few, many = (measured("generalized-relu", m, range(5), norm=2.0) for m in (16, 2048))
    assert max(many.heads["output_variance"]) < 0.2 * min(few.heads["output_variance"])
    assert min(many.heads["output_squared_bias"]) > 10 * max(many.heads["output_variance"])


# ---------------------------------------------------------------------------------------------------------
# Ranges, and what has no meaning
# ---------------------------------------------------------------------------------------------------------

POSITIVE = ["elu+1", "exp", "softmax", "hedgehog", "favor+", "favor+:calibrated", "favor++:calibrated"]
SIGNED = ["identity", "trig", "trig:calibrated"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*POSITIVE, "mean", "relu", "dpfp-1", "taylor", "landmark", *SIGNED])
def test_ranges(name, causal):
    result = measured(name, 10, [0, 1], lengths=(8, 9), causal=causal, norm=1.5)
    random = len(result.seeds) == 2
    assert random == Candidate(name, 10).random
    for seed in result.seeds:
        assert list(result.seeds[seed]) == list(SEED_COLUMNS)
        for c in SEED_COLUMNS:
            numbers = column(result, c, seed)
            assert len(numbers) == 2 and (numbers.isfinite().all() or c == "kl_divergence"), c
            assert (numbers >= 0).all() or c == "kl_divergence", c
        for c in ("negative_weight_share", "undefined_row_share", "kl_undefined_row_share"):
            assert (column(result, c, seed) <= 1).all(), c
        effective = column(result, "effective_features", seed)
        assert (effective <= result.features * (1 + 1e-9)).all()
        if name not in SIGNED:
            assert (column(result, "total_variation", seed) <= 1 + 1e-9).all()
            assert (column(result, "negative_weight_share", seed) == 0).all()
        if name in POSITIVE:
            assert (column(result, "kl_divergence", seed) > 0).all()
            assert (column(result, "kl_undefined_row_share", seed) == 0).all()
            assert torch.allclose(column(result, "smallest_denominator", seed), torch.ones(2).double())
            assert (effective >= 1 - 1e-9).all()
    assert list(result.heads) == list(HEAD_COLUMNS) or set(result.heads) == set(HEAD_COLUMNS)
    predicted = name.split(":")[0] in ("favor+", "favor++", "trig")
    for c in HEAD_COLUMNS[1:]:
        meant = {"predicted_relative_variance": predicted, "observed_relative_variance": predicted and random}
        numbers = result.heads[c]
        assert all(math.isfinite(x) == meant.get(c, random) for x in numbers), c


def test_signed_maps_show_negative_weights():
    result = measured("identity", lengths=(8, 9))
    assert column(result, "negative_weight_share").min() > 0.1
    assert column(result, "kl_undefined_row_share").min() > 0.5
    assert column(result, "smallest_denominator").max() < 0.9


def test_one_draw_says_nothing_about_variance():
    result = measured("favor+", 8, [3])
    assert list(result.seeds) == [3]
    assert all(math.isfinite(x) for x in result.heads["predicted_relative_variance"])
    for c in ("observed_relative_variance", "output_squared_bias", "output_variance"):
        assert all(math.isnan(x) for x in result.heads[c])


def test_undefined_rows_are_counted_and_give_zero():
    input = site((5, 6))
    input = dataclasses.replace(input, query=-input.query.abs())
    result = measure(Candidate("relu", None), split(input), [0])
    for c in ("undefined_row_share", "output_error", "kl_undefined_row_share", "value_gradient_error"):
        assert column(result, c).tolist() == [1.0, 1.0], c
    assert column(result, "smallest_denominator").tolist() == [0.0, 0.0]
    assert column(result, "kl_divergence").isnan().all()
    assert column(result, "effective_features").tolist() == [0.0, 0.0]


def test_kernels_beyond_float64_are_still_measured():
    result = measured("favor+", 8, [0, 1], lengths=(4, 5), norm=60.0)
    assert all(math.isfinite(x) for s in (0, 1) for x in result.seeds[s]["output_error"])
    assert column(result, "total_variation").max() <= 1 + 1e-9


def test_the_same_seed_the_same_numbers():
    first, again = (measured("favor+:calibrated", 8, [0, 1]) for _ in range(2))
    assert vars(first) == vars(again)
    assert first.seeds[0] != first.seeds[1]


# ---------------------------------------------------------------------------------------------------------
# Heads and calibration
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["elu+1", "exp", "dpfp-1", "identity"])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_equal_repeated_ones(name, causal):
    grouped = site((5, 7), heads=4, groups=2, causal=causal)
    key, value = (t.repeat_interleave(2, 0) for t in (grouped.key, grouped.value))
    repeated = dataclasses.replace(grouped, key=key, value=value, key_heads=(0, 0, 1, 1))
    one, other = (measure(Candidate(name, None), split(s), [0]) for s in (grouped, repeated))
    for c in SEED_COLUMNS:
        if not c.startswith(("key", "value")):  # gradients by a shared key are those of all its readers
            assert torch.allclose(column(one, c), column(other, c), rtol=1e-9, equal_nan=True), c
    for c in ("key_gradient_error", "value_gradient_error"):
        a, b, c_, d = column(one, c)
        assert a == b and c_ == d and a != c_


def test_a_head_does_not_depend_on_the_others():
    both = site((5, 7))
    second = dataclasses.replace(
        both, query=both.query[1:], key=both.key[1:], value=both.value[1:], key_heads=(1,), query_heads=(1,)
    )
    name = Candidate("exp", None)
    one, other = (measure(name, split(s), [0]) for s in (both, second))
    for c in SEED_COLUMNS:
        if "gradient" not in c:  # the loss is drawn for all heads together
            assert torch.allclose(column(one, c)[1:], column(other, c), rtol=1e-9), c


def judged_changed(input):
    """The same site, other queries and keys where it is judged."""
    bounds = input.cu_seqlens.tolist()
    start = bounds[(len(bounds) - 1) // 2] if len(bounds) > 2 else bounds[1] // 2
    query, key = input.query.clone(), input.key.clone()
    query[:, start:] += 5.0
    key[:, start:] *= -7.0
    return dataclasses.replace(input, query=query, key=key)


@pytest.mark.parametrize("lengths", [(6, 9), (4, 5, 6, 7, 3), (13,)])
@pytest.mark.parametrize("name", ["favor+:calibrated", "favor++:calibrated", "trig:calibrated", "landmark"])
def test_calibration_never_sees_judged_tokens(name, lengths, monkeypatch):
    built = []
    build = Candidate.build

    def remember(self, *arguments):
        built.append(build(self, *arguments))
        return built[-1]

    monkeypatch.setattr(Candidate, "build", remember)
    input = site(lengths)
    kept = [measure(Candidate(name, 10), split(s), [0]) for s in (input, judged_changed(input))]
    learned = [phi.state_dict() for phi in built]
    assert learned[0].keys() == learned[1].keys()
    for part in learned[0]:
        assert torch.equal(learned[0][part], learned[1][part]), part
    assert built[0].fingerprint == built[1].fingerprint
    assert kept[0].seeds != kept[1].seeds  # but what is judged did change
    # And what calibrates is seen: the mirror image of the above.
    reversed_roles = dataclasses.replace(input, query=input.query + 1.0, key=input.key * 2.0)
    measure(Candidate(name, 10), split(reversed_roles), [0])
    assert built[2].fingerprint != built[0].fingerprint


def test_the_calibrator_gets_exactly_the_calibration_half(monkeypatch):
    from reassoc.feature_maps import Calibrator

    seen = []
    update = Calibrator.update

    def remember(self, query, key, mask=None):
        seen.append((query, key))
        return update(self, query, key, mask)

    monkeypatch.setattr(Calibrator, "update", remember)
    data = split(site((4, 5, 6, 7, 3)))
    measure(Candidate("favor+:calibrated", 8), data, [0])
    assert len(seen) == len(data.calibration) == 2
    for (query, key), (want_query, want_key) in zip(seen, data.calibration, strict=True):
        assert torch.equal(query, want_query) and torch.equal(key, want_key)
    measure(Candidate("favor+", 8), data, [0])
    assert len(seen) == 2
