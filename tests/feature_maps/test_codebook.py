"""Codebook features: what the formula promises, that calibration finds it, and how it fails."""

import pytest
import torch

import reassoc
from reassoc.feature_maps import CodebookFeatures, PositiveFeatures, parameterless
from reassoc.feature_maps.codebook import k_means, score_metric


def data(seed, tokens=400, heads=4, groups=2, dim=8, mean=0.0):
    """Correlated queries and keys with scores of several units: (1, H, N, d), (1, G, N, d), (1, G, N, e)."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(3, dim, generator=torch.Generator().manual_seed(99), dtype=torch.float64)

    def rows(count):
        hidden = torch.randn(1, count, tokens, 3, generator=generator, dtype=torch.float64)
        noise = torch.randn(1, count, tokens, dim, generator=generator, dtype=torch.float64)
        return 0.45 * hidden @ basis + 0.1 * noise

    value = torch.randn(1, groups, tokens, 4, generator=generator, dtype=torch.float64)
    return rows(heads), rows(groups) + mean, value


def kernel(phi, q, k):
    """phi(q) . phi(k) as logarithms, (1, H, N, M), for a map per key head."""
    groups = q.shape[1] // k.shape[1]
    query = phi.log_query(q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)).unflatten(2, (groups, -1))
    terms = query[..., None, :] + phi.log_key(k)[:, :, None, None]
    return terms.logsumexp(-1).flatten(1, 2)


def scores(q, k, scale):
    return scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def softmax(q, k, v, scale):
    return scores(q, k, scale).softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@torch.no_grad()
def error(phi, q, k, v):
    true = softmax(q, k, v, phi.scale)
    return float((reassoc.linear_attention(q, k, v, phi) - true).norm() / true.norm())


def test_shares_add_up_to_one_and_favor_the_nearest_center():
    q, k, _ = data(0)
    phi = CodebookFeatures(8, 20, heads=2).double().calibrate_(q, k)
    shares = phi.key(k)
    assert (shares.sum(-1) - 1).abs().max() < 1e-12 and (shares >= 0).all()
    centers = phi.query_weight / phi.scale
    for head in range(2):
        group = q[0, 2 * head : 2 * head + 2].flatten(0, 1) * phi.scale
        gap = k[0, head][:, None] - centers[head]  # (n, r, d)
        distance = torch.einsum("nrd,de,nre->nr", gap, group.T @ group / len(group), gap)
        # The metric's floor (1e-8 of the largest direction) is not in this formula.
        want = (-phi.sharpness / 2 * distance).softmax(-1)
        assert (shares[0, head] - want).abs().max() < 1e-4


def test_when_every_key_is_a_center_it_is_softmax_and_at_its_true_scale():
    generator = torch.Generator().manual_seed(1)
    kinds = 3 * torch.randn(12, 8, generator=generator, dtype=torch.float64)
    which = torch.cat([torch.arange(12), torch.randint(12, (28,), generator=generator)])
    q, k, v = data(1, tokens=40)
    k = kinds[which].expand(1, 2, 40, 8)
    phi = CodebookFeatures(8, 12, sharpness=100.0).double()
    phi._set([(kinds, torch.eye(8, dtype=torch.float64))])
    ratio = kernel(phi, q, k) - scores(q, k, phi.scale)
    assert ratio.abs().max() < 1e-10  # the logarithm of one
    assert error(phi, q, k, v) < 1e-10


def test_k_means_finds_separated_clusters_and_lloyd_only_improves():
    generator = torch.Generator().manual_seed(2)
    middles = 20 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    points = middles.repeat(50, 1) + 0.1 * torch.randn(300, 5, generator=generator, dtype=torch.float64)
    found = k_means(points, 12, torch.Generator().manual_seed(0))
    assert found.dtype == torch.float64 and found.shape == (12, 5)
    inside = torch.cdist(points, found).amin(1)
    assert inside.max() < 1.0  # every point is in the cluster of a center: middles are 20 apart


def test_k_means_of_few_points_repeats_them():
    points = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    found = k_means(points, 8, torch.Generator().manual_seed(0))
    assert found.shape == (8, 2) and torch.cdist(points, found).amin(1).max() == 0
    same = k_means(torch.ones(50, 2, dtype=torch.float64), 8, torch.Generator().manual_seed(0))
    assert torch.equal(same, torch.ones(8, 2, dtype=torch.float64))


def test_the_metric_is_the_spread_of_the_scores():
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    second = x.T @ x / 400
    metric = score_metric(second)
    assert torch.allclose(metric, metric.mT) and torch.allclose(metric @ metric, second)
    flat = score_metric(torch.zeros(6, 6, dtype=torch.float64))
    assert flat.isfinite().all()
    assert torch.linalg.matrix_rank(score_metric(second[:, :1] @ second[:1])) == 6  # stays invertible


def test_more_centers_come_closer_on_other_data_and_beat_random_features():
    q, k, _ = data(4)
    other = data(5)
    errors = []
    for count in (4, 16, 64):
        errors.append(error(CodebookFeatures(8, count, heads=2).double().calibrate_(q, k), *other))
    assert errors == sorted(errors, reverse=True)
    random = PositiveFeatures(8, 64, heads=2).double().calibrate_(q, k)
    assert errors[-1] < 0.9 * error(random, *other)


def test_centers_of_its_own_for_each_key_head_pool_the_queries_of_its_group():
    q, k, v = data(6)
    each = CodebookFeatures(8, 20, heads=2).double().calibrate_(q, k)
    out = reassoc.linear_attention(q, k, v, each)
    for head in range(2):
        group = slice(2 * head, 2 * head + 2)
        alone = CodebookFeatures(8, 20, heads=1).double()
        own = {name: tensor[head : head + 1] for name, tensor in each.state_dict().items()}
        alone.load_state_dict(own)
        one = reassoc.linear_attention(q[:, group], k[:, head : head + 1], v[:, head : head + 1], alone)
        assert (out[:, group] - one).abs().max() < 1e-10
    swapped = CodebookFeatures(8, 20, heads=2).double().calibrate_(q.flip(1), k.flip(1))
    assert error(swapped, q.flip(1), k.flip(1), v.flip(1)) == pytest.approx(error(each, q, k, v), rel=0.5)


def test_batches_equal_one_call_while_everything_fits_in_their_number():
    q, k, _ = data(7)
    whole = CodebookFeatures(8, 400).double().calibrate_(q[:, :, :200], k[:, :, :200])
    parts = CodebookFeatures(8, 400).double()
    calibrator = parts.calibrator()
    for start in (0, 80, 160):
        stop = min(start + 80, 200)
        calibrator.update(q[:, :, start:stop], k[:, :, start:stop])
    calibrator.finish()
    # 400 rows for 400 centers: each is a center, in whatever order.
    ours, theirs = (phi.query_weight / phi.scale for phi in (whole, parts))
    assert torch.cdist(ours, theirs).amin(1).max() < 1e-6


def test_masked_rows_do_not_enter():
    q, k, _ = data(8)
    mask = torch.ones(1, 400, dtype=torch.bool)
    mask[:, 250:] = False
    bad_q, bad_k = q.clone(), k.clone()
    bad_q[:, :, 250:] = bad_k[:, :, 250:] = torch.nan
    masked = CodebookFeatures(8, 16, heads=2).double().calibrate_(bad_q, bad_k, mask)
    cut = CodebookFeatures(8, 16, heads=2).double().calibrate_(q[:, :, :250], k[:, :, :250])
    for name, tensor in masked.state_dict().items():
        assert torch.allclose(tensor, cut.state_dict()[name]), name
    with pytest.raises(ValueError, match="NaN or infinity"):
        CodebookFeatures(8, 16).calibrate_(bad_q, bad_k)


def test_the_same_seed_gives_the_same_map():
    q, k, _ = data(9)
    one, two, other = (CodebookFeatures(8, 16, seed=s).double().calibrate_(q, k) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.query_weight, other.query_weight)
    assert not torch.equal(
        CodebookFeatures(8, 16, seed=1).query_weight, CodebookFeatures(8, 16, seed=2).query_weight
    )


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_low_precision_of_the_parameters_costs_little(mean):
    """bfloat16 checkpoints: what all keys have in common does not eat the digits of the shares."""
    q, k, _ = data(10, mean=mean)
    phi = CodebookFeatures(8, 16, heads=2).double().calibrate_(q, k)
    shares = phi.key(k)
    rounded = CodebookFeatures(8, 16, heads=2)
    rounded.load_state_dict({name: t.bfloat16() for name, t in phi.state_dict().items()})
    # Half of the shares that bfloat16 would turn into noise, were the mean left in.
    assert (rounded.key(k.float()) - shares).abs().sum(-1).mean() < 0.25


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_little_data_is_finite(tokens):
    q, k, v = data(11)
    phi = CodebookFeatures(8, 16, heads=2).calibrate_(q[:, :, :tokens], k[:, :, :tokens])
    few = (t.float() for t in (q, k, v))
    assert reassoc.linear_attention(*few, phi, causal=True).isfinite().all()
    still = CodebookFeatures(8, 16).double().calibrate_(torch.zeros_like(q), torch.zeros_like(k))
    out = reassoc.linear_attention(q, torch.zeros_like(k), v, still)
    assert (out - v.mean(2, keepdim=True).repeat_interleave(2, 1)).abs().max() < 1e-10


def test_it_trains():
    """A few steps of gradient descent on the kernel's own error improve it."""
    q, k, v = data(12, tokens=100)
    phi = CodebookFeatures(8, 8, heads=2).double().calibrate_(q, k)
    before = error(phi, q, k, v)
    assert {name for name, _ in phi.named_parameters()} == {
        "query_weight", "query_bias", "key_weight", "key_bias",
    }  # fmt: skip
    optimizer = torch.optim.Adam(phi.parameters(), lr=0.03)
    true = softmax(q, k, v, phi.scale)
    for _ in range(40):
        optimizer.zero_grad()
        (reassoc.linear_attention(q, k, v, phi) - true).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in phi.parameters())
        optimizer.step()
    assert error(phi, q, k, v) < 0.9 * before


def test_a_checkpoint_of_tensors_brings_it_back():
    q, k, v = data(13)
    phi = CodebookFeatures(8, 16, heads=2).calibrate_(q, k)
    other = CodebookFeatures(8, 16, heads=2, seed=5)
    other.load_state_dict(phi.state_dict())
    q, k, v = q.float(), k.float(), v.float()
    assert torch.equal(reassoc.linear_attention(q, k, v, phi), reassoc.linear_attention(q, k, v, other))


def test_it_refuses_what_it_cannot_do():
    q, k, _ = data(14)
    with pytest.raises(ValueError, match="at least one real query"):
        CodebookFeatures(8, 16).calibrator().finish()
    hidden = torch.zeros(1, 400, dtype=torch.bool)
    with pytest.raises(ValueError, match="at least one real query"):
        CodebookFeatures(8, 16).calibrate_(q, k, hidden)
    with pytest.raises(ValueError, match="at least one real query"):
        CodebookFeatures(8, 16).calibrate_(q[:, :, :0], k)
    with pytest.raises(ValueError, match="heads=3"):
        CodebookFeatures(8, 16, heads=3).calibrate_(q, k)
    with pytest.raises(ValueError, match="kept by its owner"):
        parameterless("codebook", 8)
    for wrong in ({"num_features": 0}, {"sharpness": 0.0}, {"sharpness": -1.0}, {"scale": 0.0}, {"heads": 0}):
        with pytest.raises(ValueError, match="positive"):
            CodebookFeatures(8, **{"num_features": 16, **wrong})
    with pytest.raises(TypeError, match="queries and keys differently"):
        CodebookFeatures(8, 16)(q)
