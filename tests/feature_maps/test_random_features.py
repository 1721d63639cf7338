"""Random features against closed forms: bias within 4 standard errors, variance within 10 %, |x + y|^2 <= 1.

Formulas (z = x + y, SM = exp(x.y), L = exp(-(|x|^2 + |y|^2) / 2)) are those of Choromanski et al. 2021 and
Likhosherstov et al. 2022, corrected where simulation corrects them. With independent projections one map of
many features gives many single estimates; with orthogonal ones each block of d rows gives one of m = d.
"""

import math

import pytest
import torch
from scipy import special, stats

import reassoc
from reassoc import feature_maps
from reassoc.feature_maps import GeneralizedFeatures, PositiveFeatures, TrigonometricFeatures, orthogonalize

D = 8


def pair(sum_square, difference_square, d=D, seed=0):
    """x and y with given |x + y|^2 and |x - y|^2, in a random direction each."""
    directions = torch.randn(2, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plus, minus = directions / directions.norm(dim=1, keepdim=True)
    plus, minus = plus * math.sqrt(sum_square), minus * math.sqrt(difference_square)
    return (plus + minus) / 2, (plus - minus) / 2


def products(phi, x, y):
    """phi(x)_f phi(y)_f of each projection, times their number: (m,) single estimates of the kernel."""
    m = matrix(phi).shape[-2]
    x, y = x[None], y[None]
    factor = phi.log_query_factor(x)
    factor = 0.0 if factor is None else torch.as_tensor(factor).reshape(-1)[0]
    if hasattr(phi, "log_query"):
        terms = (phi.log_query(x) + phi.log_key(y) + factor).exp()[0]
    else:
        terms = (phi.query(x) * phi.key(y) * torch.as_tensor(factor).exp())[0]
    return m * terms.reshape(-1, m).sum(0)


def matrix(phi):
    """The projections (m, d)."""
    return phi.state_dict()["projections"]


def check(samples, mean, variance):
    """Bias within 4 standard errors, variance within 10 %."""
    error = math.sqrt(variance / samples.numel())
    assert abs(samples.mean().item() - mean) <= 4 * error, (
        f"bias {(samples.mean().item() - mean) / error:.1f} errors"
    )
    assert samples.var().item() == pytest.approx(variance, rel=0.1)


def trig_variance(x, y):
    z2, d2 = (x + y).square().sum().item(), (x - y).square().sum().item()
    return 0.5 * math.exp(z2) * math.exp(-2 * (x @ y).item()) * (1 - math.exp(-d2)) ** 2


def positive_variance(x, y):
    z2 = (x + y).square().sum().item()
    return math.exp(z2) * math.exp(2 * (x @ y).item()) * (1 - math.exp(-z2))


def optimal_variance(x, y, g):
    d, z2 = x.shape[0], (x + y).square().sum().item()
    r = 2 * d / (2 * g + d + math.sqrt((2 * g + d) ** 2 + 8 * d * g))
    norm2 = (x.square().sum() + y.square().sum()).item()
    raw = ((1 + r) ** 2 / (4 * r)) ** (d / 2) * math.exp((1 + r) * z2) * math.exp(-norm2)
    return raw - math.exp(2 * (x @ y).item())


PAIRS = [(0.1, 1.0), (0.5, 0.5), (1.0, 0.2), (1.0, 2.0)]
MANY = 200_000


@pytest.mark.parametrize(("plus", "minus"), PAIRS)
def test_trigonometric(plus, minus):
    x, y = pair(plus, minus)
    phi = TrigonometricFeatures(D, MANY, orthogonal=False, scale=1.0, seed=1)
    check(products(phi, x, y), math.exp(x @ y), trig_variance(x, y))


@pytest.mark.parametrize(("plus", "minus"), PAIRS)
def test_gaussian_kernel(plus, minus):
    x, y = pair(plus, minus)
    phi = TrigonometricFeatures(D, MANY, kernel="gaussian", orthogonal=False, scale=1.0, seed=2)
    factor = math.exp(-(x.square().sum() + y.square().sum()).item() / 2)
    check(products(phi, x, y), math.exp(-minus / 2), trig_variance(x, y) * factor**2)


@pytest.mark.parametrize(("plus", "minus"), PAIRS)
def test_positive(plus, minus):
    x, y = pair(plus, minus)
    phi = PositiveFeatures(D, MANY, orthogonal=False, scale=1.0, seed=3)
    check(products(phi, x, y), math.exp(x @ y), positive_variance(x, y))


@pytest.mark.parametrize(("plus", "minus"), PAIRS)
def test_hyperbolic(plus, minus):
    x, y = pair(plus, minus)
    phi = PositiveFeatures(D, MANY, orthogonal=False, hyperbolic=True, scale=1.0, seed=4)
    assert phi.feature_dim == 2 * MANY
    want = positive_variance(x, y) * (1 - math.exp(-plus)) / 2
    check(products(phi, x, y), math.exp(x @ y), want)


def isotropic(phi, g):
    """Calibrate on a cloud of mean 0 and equal spread, E|x + y|^2 = g: only the optimal A is learned."""
    d = phi.dim
    cloud = math.sqrt(g / 2) * torch.cat([torch.eye(d), -torch.eye(d)])[None, None]
    phi.calibrate_(cloud, cloud)
    return phi


@pytest.mark.parametrize(("plus", "minus"), [*PAIRS, (3.02, 1.0)])
def test_optimal(plus, minus):
    x, y = pair(plus, minus)
    phi = isotropic(PositiveFeatures(D, 2 * MANY, orthogonal=False, optimal=True, scale=1.0, seed=5), plus)
    variance = optimal_variance(x, y, plus)
    assert variance < positive_variance(x, y)
    check(products(phi, x, y), math.exp(x @ y), variance)


def test_optimal_ratios_of_the_field_notes():
    """The formula itself: 0.705 of positive's variance at |z|^2 = 1.17 and 0.319 at 3.02, d = 8."""
    for z2, ratio in ((1.17, 0.705), (3.02, 0.319)):
        x, y = pair(z2, 0.3)
        assert optimal_variance(x, y, z2) / positive_variance(x, y) == pytest.approx(ratio, abs=5e-3)


def test_optimal_survives_tiny_norms():
    """g -> 0: the textbook formula for r loses all digits there."""
    x, y = pair(1e-14, 1e-14)
    phi = isotropic(PositiveFeatures(D, 64, optimal=True, scale=1.0), 1e-14)
    assert products(phi, x, y).mean().item() == pytest.approx(1.0, abs=1e-5)


# ------------------------------------------------------------------------------------- orthogonal rows


def blocks(phi, x, y, m=D):
    """Estimates of whole blocks of m rows."""
    return products(phi, x, y).unflatten(-1, (-1, m)).mean(-1)


def orthogonal_positive_variance(x, y, m):
    d, z2 = x.shape[0], (x + y).square().sum().item()
    L2 = math.exp(-(x.square().sum() + y.square().sum()).item())
    gain = L2 * (math.exp(z2) - special.hyp1f1(d, d / 2, z2 / 2))
    return positive_variance(x, y) / m - (m - 1) / m * gain


@pytest.mark.parametrize(("plus", "minus"), PAIRS)
def test_orthogonal_positive(plus, minus):
    x, y = pair(plus, minus)
    phi = PositiveFeatures(D, D * 20_000, scale=1.0, seed=6)
    exact = orthogonal_positive_variance(x, y, D)
    assert exact < 0.97 * positive_variance(x, y) / D or plus < 0.3
    check(blocks(phi, x, y), math.exp(x @ y), exact)


@pytest.mark.parametrize(("plus", "minus"), [(0.5, 0.5), (1.0, 2.0)])
def test_orthogonal_trigonometric(plus, minus):
    x, y = pair(plus, minus)
    phi = TrigonometricFeatures(D, D * 20_000, scale=1.0, seed=7)
    norms = math.exp((x.square().sum() + y.square().sum()).item())
    gain = norms * (math.exp(-minus) - special.hyp1f1(D, D / 2, -minus / 2))
    check(blocks(phi, x, y), math.exp(x @ y), trig_variance(x, y) / D - (D - 1) / D * gain)


@pytest.mark.slow
def test_more_rows_than_dimensions():
    """m = 12 in d = 8: a block of 8 and one of 4; over redraws of one map."""
    x, y = pair(1.0, 0.3)
    phi = PositiveFeatures(D, 12, scale=1.0, seed=8)
    estimates = []
    for _ in range(6000):
        estimates.append(products(phi, x, y).mean())
        phi.redraw_()
    gain = (positive_variance(x, y) / D - orthogonal_positive_variance(x, y, D)) * D / (D - 1)
    variance = positive_variance(x, y) / 12 - (8 * 7 + 4 * 3) / 12**2 * gain
    check(torch.stack(estimates), math.exp(x @ y), variance)


def test_regularized_rows():
    """norms="sqrt_dim" estimates SMREG: mean L 0F1(; d/2; d|z|^2/4), second moment L^2 0F1(; d/2; d|z|^2)."""
    x, y = pair(1.0, 0.5)
    z2 = 1.0
    L = math.exp(-(x.square().sum() + y.square().sum()).item() / 2)
    mean = L * special.hyp0f1(D / 2, D * z2 / 4)
    variance = L**2 * special.hyp0f1(D / 2, D * z2) - mean**2
    for orthogonal in (False, True):
        phi = PositiveFeatures(D, 25_000 * D, orthogonal=orthogonal, norms="sqrt_dim", scale=1.0, seed=9)
        samples = products(phi, x, y)
        if orthogonal:  # rows of a block depend on each other: take one of each
            samples = samples[::D]
        check(samples, mean, variance)
    assert math.exp(x @ y) - mean > 5 * math.sqrt(variance / (25_000 * D)), (
        "the softmax kernel would pass as well"
    )


def test_rows_are_orthogonal_inside_blocks_and_only_there():
    m = 3 * D + 3
    rows = matrix(PositiveFeatures(D, m, seed=10)).double()
    gram = rows @ rows.T / (rows.norm(dim=1)[:, None] * rows.norm(dim=1)[None])
    block = torch.arange(m) // D
    same = block[:, None] == block[None]
    off = ~torch.eye(m, dtype=torch.bool)
    assert gram[same & off].abs().max() < 1e-6
    assert gram[~same].abs().max() > 0.1
    assert gram[~same].abs().min() < 0.1
    assert rows.shape == (m, D)


@pytest.mark.parametrize("m", [1, 3, D, D + 1])
def test_a_cut_block_is_orthogonal_too(m):
    rows = matrix(PositiveFeatures(D, m, seed=11)).double()
    gram = rows[:D] @ rows[:D].T
    assert (gram - torch.diag(gram.diagonal())).abs().max() < 1e-5


@pytest.mark.parametrize("orthogonal", [True, False])
def test_row_norms_are_chi_distributed(orthogonal):
    """Independent chi(d): the marginal of each row stays Gaussian."""
    rows = matrix(PositiveFeatures(D, D * 1000, orthogonal=orthogonal, seed=12)).double()
    norms = rows.norm(dim=1)
    assert stats.kstest(norms.numpy(), stats.chi(D).cdf).pvalue > 1e-3
    assert stats.kstest(rows[:, 0].numpy(), stats.norm.cdf).pvalue > 1e-3
    first, second = norms.unflatten(0, (-1, D))[:, :2].T
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.15
    fixed = matrix(PositiveFeatures(D, D * 3, orthogonal=orthogonal, norms="sqrt_dim", seed=12)).double()
    assert (fixed.norm(dim=1) - math.sqrt(D)).abs().max() < 1e-5


def test_signs_are_unbiased():
    """LAPACK's QR alone gives entries whose mean is far from zero."""
    d, count = 4, 20_000
    rows = matrix(PositiveFeatures(d, d * count, seed=13)).double().unflatten(0, (count, d))
    error = rows.std(0) / math.sqrt(count)
    assert (rows.mean(0).abs() <= 4.5 * error).all(), rows.mean(0) / error
    skew = (rows.sign().mean(0) * math.sqrt(count)).abs()
    assert (skew <= 4.5).all(), skew


def test_positive_estimates_are_unbiased_along_the_diagonal():
    """d = 16, x + y = 0.25 in every coordinate: 14 % off without the sign fix."""
    d = 16
    x = torch.full((d,), 0.125, dtype=torch.float64)
    phi = PositiveFeatures(d, d * 8000, scale=1.0, seed=14)
    samples = blocks(phi, x, x, d)
    error = samples.std() / math.sqrt(samples.numel())
    assert abs(samples.mean() - math.exp(x @ x)) <= 4 * error
    assert error < 0.01


def test_orthogonalize_keeps_directions_and_signs():
    given = torch.randn(11, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fixed = orthogonalize(given, norms="sqrt_dim")
    assert fixed.shape == given.shape
    for start in (0, 5, 10):
        block, own = fixed[start : start + 5], given[start : start + 5]
        torch.testing.assert_close(block @ block.T, 5.0 * torch.eye(block.shape[0], dtype=torch.float64))
        assert ((block * own).sum(1) > 0).all()
        torch.testing.assert_close(block[0] / block[0].norm(), own[0] / own[0].norm())


# ------------------------------------------------------------------------------------- draws

RANDOM = {
    "positive": lambda **o: PositiveFeatures(D, 20, **o),
    "hyperbolic": lambda **o: PositiveFeatures(D, 20, hyperbolic=True, **o),
    "optimal": lambda **o: PositiveFeatures(D, 20, optimal=True, **o),
    "trig": lambda **o: TrigonometricFeatures(D, 20, **o),
    "gaussian": lambda **o: TrigonometricFeatures(D, 20, kernel="gaussian", **o),
    "generalized": lambda **o: GeneralizedFeatures(D, 20, **o),
}


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("heads", [None, 3])
def test_randomness_comes_from_the_seed_and_the_draw_count(kind, heads):
    make = RANDOM[kind]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = make(seed=5, heads=heads)
    assert torch.equal(torch.get_rng_state(), before), "the global generator was used"
    torch.manual_seed(99)
    two = make(seed=5, heads=heads)
    other = make(seed=6, heads=heads)
    assert torch.equal(matrix(one), matrix(two))
    assert not torch.equal(matrix(one), matrix(other))
    seen = [matrix(one).clone()]
    for _ in range(3):
        one.redraw_()
        two.redraw_()
        assert torch.equal(matrix(one), matrix(two))
        assert all((matrix(one) != old).all() for old in seen), "an earlier draw came back"
        seen.append(matrix(one).clone())
    if heads:
        assert matrix(one).shape == (heads, 20, D)
        assert not torch.equal(matrix(one)[0], matrix(one)[1])


@pytest.mark.parametrize("kind", RANDOM)
def test_nothing_redraws_by_itself(kind):
    phi = RANDOM[kind]()
    x = torch.randn(2, 2, 5, D, generator=torch.Generator().manual_seed(0))
    before = matrix(phi).clone()
    for mode in (phi.train, phi.eval):
        mode()
        reassoc.linear_attention(x, x, x, phi, causal=True)
        assert torch.equal(matrix(phi), before)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("kind", RANDOM)
def test_state_dict_round_trip(kind, calibrated):
    """Matrix, seed, draw count and calibration travel: same features, same next draw, same fingerprint."""
    if calibrated and kind in ("gaussian", "generalized"):
        pytest.skip("not a softmax kernel: nothing to calibrate")
    phi = RANDOM[kind](seed=7)
    x = torch.randn(2, 2, 9, D, generator=torch.Generator().manual_seed(1))
    if calibrated:
        phi.calibrate_(2 * x + 1, x * torch.linspace(0.1, 2, D) - 1)
    phi.redraw_()
    copy = RANDOM[kind](seed=1)
    copy.load_state_dict(phi.state_dict())
    assert torch.equal(copy.query(x), phi.query(x))
    assert torch.equal(copy.key(x), phi.key(x))
    _, state = reassoc.linear_attention(x, x, x, phi, return_state=True)
    reassoc.read(x, copy, state)
    phi.redraw_()
    copy.redraw_()
    assert torch.equal(copy.key(x), phi.key(x))


def test_defaults():
    """ceil(d ln d) projections, scale d^-1/2: E phi(q).phi(k) = exp(q.k / sqrt d)."""
    for d in (1, 2, 8, 33):
        assert PositiveFeatures(d).feature_dim == max(1, math.ceil(d * math.log(d)))
    x, y = pair(0.4, 0.4)
    phi = PositiveFeatures(D, MANY, orthogonal=False)
    scaled = (x * D**-0.25, y * D**-0.25)
    check(products(phi, x, y), math.exp(x @ y / math.sqrt(D)), positive_variance(*scaled))


def test_given_projections_are_used():
    given = torch.randn(5, D, generator=torch.Generator().manual_seed(3))
    for make in (PositiveFeatures, TrigonometricFeatures, GeneralizedFeatures):
        assert torch.equal(matrix(make(D, 5, projections=given)), given)
        with pytest.raises(ValueError, match="projections"):
            make(D, 5, projections=given[:, :3])


def test_meaningless_options_are_refused():
    with pytest.raises(ValueError, match="sqrt_dim"):
        PositiveFeatures(D, 5, optimal=True, norms="sqrt_dim")
    with pytest.raises(ValueError, match="norms"):
        PositiveFeatures(D, 5, norms="gauss")
    with pytest.raises(ValueError, match="kernel"):
        TrigonometricFeatures(D, 5, kernel="laplace")
    with pytest.raises(ValueError, match="function"):
        GeneralizedFeatures(D, 5, function="no such function")
    for number in (0, -1, 2.5):
        with pytest.raises((ValueError, TypeError)):
            PositiveFeatures(D, number)
    with pytest.raises((ValueError, TypeError)):
        PositiveFeatures(D, 5, scale=-1.0)


def test_generalized_features_are_the_function_of_the_projections():
    phi = GeneralizedFeatures(D, 12, function="relu", scale=1.0).double()
    x, y = pair(1.0, 1.0)
    u, w = matrix(phi) @ x, matrix(phi) @ y
    want = (u.relu() * w.relu()).sum()
    assert (phi(x) @ phi(y)).item() == pytest.approx(want.item() / 12)


# ------------------------------------------------------------------------------------- calibration


def anisotropic(heads=1, n=400, d=6, seed=0):
    """Queries and keys with large means and very unequal spread, (1, 2 heads, n, d) and (1, heads, n, d)."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-0.6, 0.6, d)
    head = torch.arange(1, heads + 1)[None, :, None, None]
    query = torch.randn(1, 2 * heads, n, d, generator=generator) * spread + 0.4 * head.repeat_interleave(2, 1)
    key = torch.randn(1, heads, n, d, generator=generator) / spread - 1.0 * head
    return 0.5 * query, 0.5 * key


CALIBRATED = {
    "positive": lambda m, **o: PositiveFeatures(6, m, orthogonal=False, **o),
    "hyperbolic": lambda m, **o: PositiveFeatures(6, m, orthogonal=False, hyperbolic=True, **o),
    "optimal": lambda m, **o: PositiveFeatures(6, m, orthogonal=False, optimal=True, **o),
    "trig": lambda m, **o: TrigonometricFeatures(6, m, orthogonal=False, **o),
}


def estimated(phi, query, key):
    """The estimated kernel (H, N, M) with the dropped factor put back, query heads grouped."""
    return reassoc.attention_matrix(query.double(), key.double(), phi, normalize="none")[0]


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("kind", CALIBRATED)
def test_calibration_keeps_the_kernel(kind, heads):
    """With many features the calibrated estimate is exp(scale q.k): every identity is exact."""
    query, key = anisotropic(heads=2)
    phi = CALIBRATED[kind](2**16, heads=heads, seed=1).double()
    phi.calibrate_(query, key)
    small_q, small_k = query[:, :, :5], key[:, :, :6]
    got = estimated(phi, small_q, small_k)
    grouped = small_k.repeat_interleave(2, 1)
    want = (small_q @ grouped.mT / math.sqrt(6)).exp()[0].double()
    ratio = got / want
    assert (ratio - 1).abs().median() < 0.05
    assert (ratio.mean() - 1).abs() < 0.05


@pytest.mark.parametrize("heads", [None, 2])
def test_calibration_is_an_exact_identity(heads):
    """q.k = q'.k' + (what the weights of query and key add), without any statistics.

    With the projections 0, e_1, ..., e_d the logarithm of a product of features is
    `w.(q' + k') - |q'|^2 / 2 - |k'|^2 / 2 + weights - log m`: the first gives the constant, the others the
    vector q' + k', and half its square plus the constant must be scale * q.k.
    """
    d = 6
    query, key = (x.double() for x in anisotropic(heads=2))
    frame = torch.cat([torch.zeros(1, d), torch.eye(d)])
    phi = PositiveFeatures(
        d, d + 1, heads=heads, projections=frame if heads is None else frame.expand(2, -1, -1)
    )
    phi = phi.double()
    plain = phi.key(key).clone()
    phi.calibrate_(query, key)
    assert not torch.allclose(phi.key(key), plain), "calibration did nothing"
    q = query[:, :, :5].unflatten(1, (2, 2)).flatten(2, 3)  # (1, 2, 10, d): query heads beside their key head
    k = key[:, :, :7]
    log_q = phi.log_query(q) + torch.as_tensor(phi.log_query_factor(q)).reshape(1, 2, 10, 1)
    log = log_q[:, :, :, None] + phi.log_key(k)[:, :, None] + math.log(d + 1)
    total = log[..., 1:] - log[..., :1]
    got = total.square().sum(-1) / 2 + log[..., 0]
    torch.testing.assert_close(got, q @ k.mT / math.sqrt(d), rtol=1e-9, atol=1e-9)


def test_a_streaming_calibrator_sees_all_batches():
    query, key = anisotropic(heads=2, n=90)
    one, two = PositiveFeatures(6, 8, heads=2, optimal=True), PositiveFeatures(6, 8, heads=2, optimal=True)
    one.calibrate_(query, key)
    calibrator = two.calibrator()
    for part in (slice(0, 20), slice(20, 21), slice(21, 90)):
        calibrator.update(query[:, :, part], key[:, :, part])
    calibrator.finish()
    torch.testing.assert_close(two.query(query[:, ::2]), one.query(query[:, ::2]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(two.key(key), one.key(key), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "optimal"])
def test_calibration_cuts_the_error_on_real_shaped_data(kind):
    query, key = anisotropic()
    value = torch.randn(1, 1, 400, 3, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.scaled_dot_product_attention(
        query, key.expand(-1, 2, -1, -1), value.expand(-1, 2, -1, -1)
    )
    plain, calibrated = [], []
    for seed in range(8):
        phi = CALIBRATED[kind](64, seed=seed)
        plain.append((reassoc.linear_attention(query, key, value, phi) - exact).square().mean())
        phi.calibrate_(query, key)
        calibrated.append((reassoc.linear_attention(query, key, value, phi) - exact).square().mean())
    assert torch.stack(calibrated).mean() < 0.5 * torch.stack(plain).mean()


def test_calibration_per_head_beats_pooled_where_heads_differ():
    query, key = anisotropic(heads=2)
    query[:, 2:] = query[:, 2:].flip(-1)
    key[:, 1:] = key[:, 1:].flip(-1) + 1.5
    value = torch.randn(1, 2, 400, 3, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    )
    errors = {}
    for heads in (None, 2):
        total = 0.0
        for seed in range(8):
            phi = PositiveFeatures(6, 64, heads=heads, seed=seed)
            phi.calibrate_(query, key)
            total += (reassoc.linear_attention(query, key, value, phi) - exact).square().mean().item()
        errors[heads] = total
    assert errors[2] < errors[None]


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("kind", CALIBRATED)
def test_rank_deficient_data(kind, heads):
    """Data in a plane, in a line, and a single point: covariances are shrunk, the kernel stays."""
    query, key = anisotropic(heads=2)
    for rank in (2, 1, 0):
        flat_q, flat_k = query.clone(), key.clone()
        flat_q[..., rank:] = 0.3
        flat_k[..., rank:] = -0.2
        phi = CALIBRATED[kind](2**14, heads=heads, seed=2).double()
        phi.calibrate_(flat_q, flat_k)
        for q, k in ((flat_q[:, :, :4], flat_k[:, :, :5]), (0.5 * query[:, :, :4], 0.5 * key[:, :, :5])):
            got = estimated(phi, q, k)
            assert got.isfinite().all()
            want = (q @ k.repeat_interleave(2, 1).mT / math.sqrt(6)).exp()[0].double()
            if q.data_ptr() == flat_q.data_ptr():
                assert (got / want - 1).abs().median() < 0.1


def test_a_masked_calibration_ignores_masked_rows():
    """Padding may hold NaN and leaves no trace in the moments."""
    query, key = anisotropic(n=50)
    mask = torch.ones(1, 50, dtype=torch.bool)
    mask[:, 30:] = False
    padded_q, padded_k = query.clone(), key.clone()
    padded_q[:, :, 30:] = torch.nan
    padded_k[:, :, 30:] = torch.nan
    one, two = PositiveFeatures(6, 8, optimal=True), PositiveFeatures(6, 8, optimal=True)
    one.calibrate_(padded_q, padded_k, mask)
    two.calibrate_(query[:, :, :30], key[:, :, :30])
    torch.testing.assert_close(one.query(query), two.query(query))
    torch.testing.assert_close(one.key(key), two.key(key))


def test_calibration_twice_is_calibration_once():
    """The last data decide; nothing is stacked on the earlier transform."""
    query, key = anisotropic()
    one, two = PositiveFeatures(6, 8), PositiveFeatures(6, 8)
    one.calibrate_(3 * key, query)
    one.calibrate_(query, key)
    two.calibrate_(query, key)
    torch.testing.assert_close(one.key(key), two.key(key))


def test_large_offsets_cancel():
    """Keys around 100: centred they are as good as keys around 0; uncentred features would be useless."""
    query, key = anisotropic()
    far = key + 100.0
    phi, near = PositiveFeatures(6, 64), PositiveFeatures(6, 64)
    phi.calibrate_(query, far)
    near.calibrate_(query, key)
    value = torch.randn(1, 1, 400, 3, generator=torch.Generator().manual_seed(1))
    got = reassoc.linear_attention(query, far, value, phi)
    want = reassoc.linear_attention(query, key, value, near)
    assert (got - want).abs().max() < 1e-2


def test_names_make_the_maps_they_name():
    assert {"trig", "favor+", "favor++", "generalized-relu"} <= set(feature_maps.names())
    for name in feature_maps.names():
        phi = feature_maps.make(name, 6)
        x = torch.randn(1, 1, 4, 6, generator=torch.Generator().manual_seed(0))
        if name == "landmark":  # nothing to compute with before it is fitted
            phi.calibrate_(x, x)
        assert phi.key(x).shape[-1] == phi.feature_dim
        assert phi.query(x).shape[-1] == phi.feature_dim
        if phi.nonnegative:
            assert (phi.key(x) >= 0).all()
    with pytest.raises(ValueError, match="elu"):
        feature_maps.make("elu+2", 6)
