"""Capacity in closed form: against the operator, by hand, and for keys of files."""

import math

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("matplotlib")

from reassoc import linear_attention, read
from reassoc.feature_maps import make
from reassoc.lab import InputError
from reassoc.lab.capacity import Settings, capacity, load_keys, study
from reassoc.lab.capacity.cases import capacity as capacity_of
from reassoc.lab.capacity.cases import case
from reassoc.lab.capacity.closed import closed, delta_matrix, passes, sum_matrix
from reassoc.lab.capacity.keys import Stored, made_keys
from reassoc.lab.capacity.weights import delta_weights, sum_weights
from reassoc.rules import Delta

EXACT = 1e-10  # the float64 budget of the operator


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def apart(found, expected):
    """Largest difference, relative to the largest entry."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


# Weights of one query


@pytest.mark.parametrize("normalize", ["attention", "sum", "none"])
@pytest.mark.parametrize("name", ["elu+1", "dpfp-2", "favor+", "relu"])
def test_sum_weights_are_those_of_the_operator(name, normalize):
    phi = make(name, 6).double()
    query, key, value = normal(3, 6), normal(3, 9, 6, seed=1), normal(3, 9, 4, seed=2)
    query, key = (t.requires_grad_() for t in (query, key))
    eps = 0.3 if normalize == "attention" else 0.0
    found = (sum_weights(query, key, phi, normalize, eps)[:, None] @ value)[:, 0]
    options = {"normalize": normalize, "eps": eps, "undefined": "zero"}
    expected = linear_attention(query[:, None, None], key[:, None], value[:, None], phi, **options)[:, 0, 0]
    assert apart(found, expected) < EXACT
    for mine, theirs in zip(
        torch.autograd.grad(found.square().sum(), (query, key)),
        torch.autograd.grad(expected.square().sum(), (query, key)),
        strict=True,
    ):
        assert apart(mine, theirs) < 3 * EXACT


@pytest.mark.parametrize("normalize", ["attention", "sum", "none"])
@pytest.mark.parametrize("name", ["elu+1", "dpfp-2", "favor+"])
def test_delta_weights_are_those_of_the_operator(name, normalize):
    phi = make(name, 6).double()
    query, key, value = normal(3, 6), normal(3, 9, 6, seed=1), normal(3, 9, 4, seed=2)
    # Strengths that keep the unnormalized recurrence stable: beta |phi|^2 <= 2.
    beta = torch.rand(3, 9, dtype=torch.float64, generator=generator(3)) / phi.key(key).square().sum(
        -1
    ).clamp(min=1)
    query, key, beta = (t.requires_grad_() for t in (query, key, beta))
    eps = 0.3 if normalize == "attention" else 0.0
    found = (delta_weights(query, key, beta, phi, normalize, eps)[:, None] @ value)[:, 0]
    expected = linear_attention(
        query[:, None, None].expand(-1, -1, 9, -1), key[:, None], value[:, None], phi, causal=True,
        rule=Delta(beta[:, None]), normalize=normalize, eps=eps, undefined="zero",
    )[:, 0, -1]  # fmt: skip
    assert apart(found, expected) < EXACT
    for mine, theirs in zip(
        torch.autograd.grad(found.square().sum(), (query, key, beta)),
        torch.autograd.grad(expected.square().sum(), (query, key, beta)),
        strict=True,
    ):
        assert apart(mine, theirs) < 3 * EXACT


def test_eps_of_sum_normalization_is_added_to_the_query_alone():
    phi = make("elu+1", 5).double()
    query, key = normal(2, 5), normal(2, 7, 5, seed=1)
    q, k = phi(query), phi(key)
    expected = ((k / k.sum(-1, keepdim=True)) @ (q / (q.sum(-1, keepdim=True) + 0.7))[..., None])[..., 0]
    assert apart(sum_weights(query, key, phi, "sum", 0.7), expected) < EXACT


# Closed form


@pytest.mark.parametrize("text", ["elu+1", "dpfp-2", "elu+1:sum:sum", "relu:none", "favor+:features=8"])
def test_closed_form_of_the_sum_rule_is_the_operator(text):
    found, key, value = case(text), normal(11, 6), normal(11, 3, seed=1)
    phi = found.build(6, 0).double()
    expected = linear_attention(
        key[None, None], key[None, None], value[None, None], phi, normalize=found.normalize, undefined="zero"
    )[0, 0]
    features = phi.key(key)
    if found.normalize == "sum":
        features = features / features.sum(1, keepdim=True)
    weights = sum_matrix(features @ features.T, found.normalize)
    assert apart(weights @ value, expected) < EXACT
    row = closed(Stored("mine", 0, key, value), found, 0)
    assert row["value_error"] == pytest.approx(
        float((expected - value).square().sum() / value.square().sum())
    )


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("text", ["elu+1:delta", "dpfp-2:delta", "identity:delta"])
def test_closed_form_of_the_delta_rule_is_the_operator(text, times):
    found, key, value = case(text), normal(11, 6) / 6, normal(11, 3, seed=1)
    phi = found.build(6, 0).double()
    features = phi.key(key)
    if found.normalize == "sum":
        features = features / features.sum(1, keepdim=True)
    keys, values = (t.repeat(times, 1)[None, None] for t in (key, value))
    rule = Delta(torch.ones(1, 1, 11 * times, dtype=torch.float64))
    _, state = linear_attention(
        keys, keys, values, phi, rule=rule, normalize=found.normalize, causal=True, return_state=True
    )
    expected = read(key[None, None], phi, state)[0, 0]
    gram = features @ features.T
    weights = passes(delta_matrix(gram, torch.ones(11, dtype=torch.float64)), times)
    assert apart(weights @ value, expected) < EXACT


def test_two_keys_by_hand():
    """Keys (0, 1) and (1, 0): features (1, 2) and (2, 1); signal 5, crosstalk 4, normalized 5/9 and 4/9."""
    key = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    plain = closed(Stored("hand", 0, key), case("elu+1:none"), 0)
    assert (plain["signal"], plain["crosstalk"], plain["ratio"], plain["rank"]) == (5, 4, 1.25, 2)
    assert plain["error"] == pytest.approx(16 + 16) and plain["least_error"] == pytest.approx(16 / 41)
    normalized = closed(Stored("hand", 0, key), case("elu+1"), 0)
    assert normalized["signal"] == pytest.approx(5 / 9) and normalized["error"] == pytest.approx(32 / 81)
    assert normalized["least_error"] == pytest.approx(16 / 41)
    # Features of sum 1: (1, 2)/3 and (2, 1)/3. The second write takes 4/9 of the first value away.
    delta = closed(Stored("hand", 0, key), case("elu+1:delta"), 0)
    weights = [[5 / 9 - 16 / 81, 4 / 9], [4 / 9 - 20 / 81, 5 / 9]]
    assert delta["signal"] == pytest.approx((weights[0][0] + weights[1][1]) / 2)
    assert delta["crosstalk"] == pytest.approx((weights[0][1] + weights[1][0]) / 2)


def test_orthonormal_keys_are_read_exactly_without_a_feature_map():
    key = torch.linalg.qr(normal(6, 6))[0][:4]
    for text in ("identity:none", "identity:delta"):
        row = closed(Stored("orthonormal", 0, key), case(text), 0)
        assert row["error"] < EXACT and row["crosstalk"] < EXACT and row["ratio"] > 1 / EXACT
        assert row["rank"] == 4 and row["bound"] == 0


def test_positive_features_are_never_orthogonal_but_delta_ends_exact():
    """Errata 10 of the sources: independence is enough for the delta rule, never for the sum rule."""
    key = torch.linalg.qr(normal(16, 16))[0][:4] * 4
    row = closed(Stored("orthogonal", 0, key), case("elu+1:none"), 0)
    assert row["rank"] == 4 and row["crosstalk"] > 0.5 and row["least_error"] > 0.1
    delta = closed(Stored("orthogonal", 0, key), case("elu+1:delta"), 0)
    # Linear convergence: a second 64 passes at least square what the first left of the slowest direction.
    assert delta["exact_error_passes"] < 1e-3 < delta["exact_error"]


@pytest.mark.parametrize("text", ["elu+1", "elu+1:delta", "dpfp-1", "dpfp-1:delta", "identity:delta", "relu"])
def test_no_error_is_below_the_bound(text):
    """Eckart and Young: with rank R of N no weights come closer to the identity."""
    for stored in made_keys(4, (3, 12, 40), 0):
        row = closed(stored, case(text), 0)
        assert row["bound"] == 1 - row["rank"] / row["pairs"]
        assert row["rank"] <= min(row["pairs"], capacity_of(case(text).build(4, 0)))
        for name in ("error", "error_passes", "exact_error", "exact_error_passes"):
            assert row[name] is None or not row[name] < row["bound"] * (1 - 1e-9)


def test_expected_error_is_what_random_values_give():
    value = normal(20, 20_000, seed=3)
    (stored,) = [s for s in made_keys(8, (20,), 0) if s.name == "Gaussian"]
    for text in ("elu+1", "dpfp-1:delta"):
        row = closed(stored._replace(value=value), case(text), 0)
        # 400,000 squares of which each has relative spread sqrt(2) at most: five standard errors.
        assert row["value_error"] == pytest.approx(row["error"], rel=5 * math.sqrt(2 / 20_000))


def test_capacity_of_dpfp_stops_growing_at_d():
    with pytest.warns(UserWarning, match="same capacity"):
        phi = make("dpfp-15", 8)
    assert (capacity_of(phi), capacity_of(make("dpfp-3", 8)), capacity_of(make("elu+1", 8))) == (112, 48, 8)
    features = phi.double().key(normal(400, 8))
    assert int(torch.linalg.matrix_rank(features)) == 112


def test_made_keys_have_one_size():
    found = made_keys(16, (8, 32), 1)
    assert [(s.name, len(s.key)) for s in found] == [
        ("orthogonal", 8), ("Gaussian", 8), ("clustered", 8), ("Gaussian", 32), ("clustered", 32),
    ]  # fmt: skip
    for stored in found:
        # Mean squared norm d; a mean of 8 x 16 or more squares of spread sqrt(2), clusters not independent.
        assert stored.key.square().sum(1).mean() == pytest.approx(16, rel=0.6)
    assert apart(found[0].key @ found[0].key.T, 16 * torch.eye(8, dtype=torch.float64)) < EXACT
    assert torch.equal(made_keys(16, (8,), 1)[1].key, found[1].key)


def test_sentences_count_what_is_exact():
    """Without a feature map orthogonal keys are read exactly; others by the delta rule alone, in time."""
    found = capacity(
        Settings(parts=("closed",), models=("identity:none", "identity:delta"), pairs=(3, 20), dim=12)
    )
    text = study(found).answer
    assert text[0] == (
        "Closed form, features of all keys independent: the sum rule reads exactly in 1 of 3 cases, the "
        "delta rule in 3 of 3 cases after 64 passes of exact writes."
    )
    (section,) = study(found).sections
    assert len(section.lines) == 3 * 2 and "3 keys" in section.text  # at the largest number up to the size
    assert [plot.name for plot in study(found).figures] == ["closed.Gaussian", "closed.clustered"]


# Keys of files


def test_keys_from_files(tmp_path):
    key, value = normal(3, 9, 4), normal(3, 9, 2, seed=1)
    save_file({"key": key.bfloat16(), "value": value.float()}, tmp_path / "a.safetensors")
    found, digest = load_keys(tmp_path / "a.safetensors")
    assert [(s.name, s.head, s.key.dtype) for s in found] == [("a", h, torch.float64) for h in range(3)]
    assert torch.equal(found[1].key, key[1].bfloat16().double()) and len(digest) == 64
    save_file({"key": key[0]}, tmp_path / "b.safetensors")
    (one,), _ = load_keys(tmp_path / "b.safetensors")
    assert torch.equal(one.key, key[0]) and one.value is None
    settings = Settings(parts=("closed",), models=("elu+1", "elu+1:delta"))
    results = capacity(settings, keys=(found, digest, "a.safetensors"))
    assert len(results.closed) == 6 and all(r["value_error"] > 0 for r in results.closed)
    assert results.manifest["keys"] == {"name": "a.safetensors", "sha256": digest}
    page = study(results)
    assert "a.safetensors" in page.lead and page.figures == [] and len(page.sections[0].lines) == 6
    with pytest.raises(InputError, match="dpfp-8 does not fit keys of size 4"):
        capacity(Settings(parts=("closed",), models=("dpfp-8",)), keys=(found, digest, "a"))


def test_keys_of_a_capture():
    from reassoc.lab import sample_path

    found, _ = load_keys(sample_path())
    assert len({s.name for s in found}) > 1 and all(s.value is not None for s in found)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"value": torch.ones(3, 2)}, "no tensor 'key'"),
        ({"key": torch.ones(3)}, "must be floating point, (N, d) or (heads, N, d), got float32 (3,)"),
        ({"key": torch.ones(3, 2, dtype=torch.int64)}, "got int64 (1, 3, 2)"),
        ({"key": torch.ones(0, 2)}, "got float32 (1, 0, 2)"),
        ({"key": torch.ones(3, 2), "value": torch.ones(4, 2)}, "'value' must be (heads, N, e)"),
        ({"key": torch.ones(1, 2)}, "has 1 keys a head; expected 2 to 2,048"),
        ({"key": torch.tensor([[1.0, math.nan], [0.0, 1.0]])}, "has NaN or infinity"),
    ],
)
def test_keys_that_are_refused(tmp_path, tensors, words):
    save_file(tensors, tmp_path / "keys.safetensors")
    with pytest.raises(InputError) as caught:
        load_keys(tmp_path / "keys.safetensors")
    assert words in str(caught.value) and str(caught.value).startswith("--keys: ")


def test_files_that_are_no_keys(tmp_path):
    (tmp_path / "text").write_text("key")
    for path in (tmp_path / "text", tmp_path / "missing", tmp_path):
        with pytest.raises(InputError, match="not a readable safetensors file") as caught:
            load_keys(path)
        assert "\n" not in str(caught.value)
