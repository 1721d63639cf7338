"""``legacy=None``: what was wrong in the original is right, and what differs is what is said to."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import reassoc
from reassoc.compat.fast_transformers import feature_maps as maps
from reassoc.compat.fast_transformers.attention import (
    CausalLinearAttention,
    FullAttention,
    LinearAttention,
)
from reassoc.compat.fast_transformers.attention_registry import AttentionRegistry, Int
from reassoc.compat.fast_transformers.builders import TransformerEncoderBuilder
from reassoc.compat.fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

N, L, H, E, D = 2, 20, 3, 8, 5
RANDOM = {
    "favor": maps.Favor.factory(n_dims=16),
    "fourier": maps.RandomFourierFeatures.factory(n_dims=64, softmax_temp=0.1),
    "smoothed": maps.SmoothedRandomFourierFeatures.factory(n_dims=9),
    "relu": maps.GeneralizedRandomFeatures.factory(n_dims=24),
    "exp": maps.GeneralizedRandomFeatures.factory(kernel_fn=torch.exp),
}
MAPS = {"elu": None, **RANDOM}
KINDS = (LinearAttention, CausalLinearAttention)
each_map = pytest.mark.parametrize("name", MAPS)
each_random = pytest.mark.parametrize("name", RANDOM)
each_kind = pytest.mark.parametrize("kind", KINDS)


def tokens(dtype=torch.float32, seed=0, length=L):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(N, length, H, d, generator=g).to(dtype) for d in (E, E, D)]


def attend(attention, q, k, v, lengths=None):
    causal = isinstance(attention, CausalLinearAttention)
    mask = TriangularCausalMask(q.shape[1]) if causal else FullMask(q.shape[1], k.shape[1])
    lengths = torch.full((k.shape[0],), k.shape[1]) if lengths is None else torch.tensor(lengths)
    return attention(q, k, v, mask, None, LengthMask(lengths, k.shape[1]))


def drawn(kind, name, **options):
    torch.manual_seed(7)
    return kind(E, MAPS[name], **options).eval()


@each_map
@each_kind
def test_is_the_quadratic_formula(name, kind):
    """Against weights written out in float64, from the features that the map itself gives."""
    attention = drawn(kind, name).double()
    q, k, v = tokens(torch.float64)
    attention.feature_map.new_feature_map("cpu")
    weights = torch.einsum(
        "nlhc,nshc->nhls", attention.feature_map.forward_queries(q), attention.feature_map.forward_keys(k)
    )
    if kind is CausalLinearAttention:
        weights = weights.tril()
    want = torch.einsum("nhls,nshd->nlhd", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(attend(attention, q, k, v), want, rtol=1e-8, atol=1e-8)


@each_map
@each_kind
def test_evaluation_is_repeatable_and_never_draws(name, kind):
    """The original draws at every call, in evaluation too."""
    attention = drawn(kind, name)
    q, k, v = tokens()
    first = attend(attention, q, k, v)
    assert torch.equal(attend(attention, q, k, v), first)
    exact = drawn(kind, name, legacy="exact")
    differs = not torch.equal(attend(exact, q, k, v), attend(exact, q, k, v))
    assert differs == (name != "elu")


@each_random
def test_training_draws_every_redraw_calls_and_on_request(name):
    """A draw serves ``redraw`` calls; what was loaded is one; evaluation between them counts for nothing."""
    phi = MAPS[name](E)
    phi.redraw = 3
    loaded = torch.randn(phi.omega.shape)
    phi.load_state_dict({"omega": loaded})
    seen = []
    for _ in range(7):
        phi.train().new_feature_map("cpu")
        seen.append(phi.omega.clone())
        phi.eval().new_feature_map("cpu")
        assert torch.equal(phi.omega, seen[-1])
    assert torch.equal(seen[0], loaded)
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [False, False, True, False, False, True]
    phi.redraw_()
    assert not torch.equal(phi.omega, seen[-1])


@each_random
def test_a_matrix_that_was_loaded_or_set_is_used(name):
    """Not drawn over at the first call; a map made before sees the new one."""
    attention = drawn(LinearAttention, name)
    q, k, v = tokens()
    first = attend(attention, q, k, v)
    other = drawn(LinearAttention, name)
    other.load_state_dict(attention.state_dict(), strict=True)
    assert torch.equal(attend(other, q, k, v), first)
    with torch.no_grad():
        other.feature_map.omega.add_(0.5)
    changed = attend(other, q, k, v)
    assert not torch.allclose(changed, first)
    other.load_state_dict(attention.state_dict(), assign=True)
    assert torch.equal(attend(other, q, k, v), first)
    assert list(attention.state_dict()) == ["feature_map.omega"]


@each_map
@each_kind
def test_copies_and_pickles(name, kind):
    """Every module with a named function in it may be copied and pickled, before and after use."""
    attention = drawn(kind, name)
    q, k, v = tokens()
    want = attend(attention, q, k, v)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert torch.equal(attend(other, q, k, v), want)
        if name != "elu":
            attention.feature_map.omega.data.mul_(1.5)
            assert torch.equal(attend(other, q, k, v), want)
            attention.feature_map.omega.data.div_(1.5)


@each_map
@each_kind
@pytest.mark.parametrize("legacy", [None, "exact"])
def test_padding_changes_nothing(name, kind, legacy):
    """Five real rows among fifteen padded ones give the unpadded result; NaN may lie in the padding."""
    attention = drawn(kind, name, legacy=legacy)
    if name != "elu":
        attention.feature_map.deterministic_eval = True
        attention.feature_map.redraw_()
    q, k, v = tokens()
    k[0, 5:], v[0, 5:] = torch.nan, torch.nan
    got = attend(attention, q, k, v, [5, L])[0, :5]
    want = attend(attention, q[:1, :5], k[:1, :5], v[:1, :5])[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_length_mask_of_another_size_is_refused():
    """LengthMask forgets the padding of a batch where no sequence is full; so the size is asked for."""
    q, k, v = tokens()
    lengths = LengthMask(torch.tensor([5, 5]))
    with pytest.raises(ValueError, match=r"key_lengths must have shape \(2, 20\), got \(2, 5\)"):
        LinearAttention(E)(q, k, v, FullMask(L), None, lengths)


@each_map
def test_no_future_leaks(name):
    """Later keys may be anything."""
    attention = drawn(CausalLinearAttention, name)
    q, k, v = tokens()
    before = attend(attention, q, k, v)
    for factor in (0.01, 30.0):
        far, later = k.clone(), v.clone()
        far[:, 12:] *= factor
        later[:, 12:] += 100
        got = attend(attention, q, far, later)
        torch.testing.assert_close(got[:, :12], before[:, :12], rtol=1e-5, atol=1e-5)


@each_map
@each_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_constant_values_come_back(name, kind, dtype):
    """v = 1 gives 1 in every dtype; signed features may cancel, so only where their sum does not vanish."""
    attention = drawn(kind, name)
    q, k, v = tokens(dtype)
    got = attend(attention.to(dtype), q, k, torch.ones_like(v))
    assert got.dtype == dtype
    wanted = torch.ones_like(got)
    if name == "relu":  # a feature vector of zeros writes nothing, or reads nothing
        wanted = torch.where(got == 0, got, wanted)
        assert (got == 0).float().mean() < 0.05
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 2e-2)
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_features_of_zeros_give_zeros(kind, dtype):
    """ReLU of products that are all negative: neither an epsilon nor a NaN, in the gradient either."""
    attention = kind(E, maps.GeneralizedRandomFeatures.factory(n_dims=4)).to(dtype).eval()
    attention.feature_map.omega = torch.ones(E, 4, dtype=dtype)
    q, k, v = (t.abs().requires_grad_() for t in tokens(dtype))
    out = attend(attention, -q, k, v)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in (q, k, v))


def test_one_feature_suffices():
    """Weights are then those of one number."""
    q, k, v = tokens()
    one = maps.GeneralizedRandomFeatures.factory(n_dims=1, kernel_fn=torch.exp)
    got = attend(LinearAttention(E, one).eval(), q, k, v)
    assert torch.allclose(got, got[:, :1].expand_as(got), atol=1e-6)
    assert attend(LinearAttention(1), q[..., :1], k[..., :1], v).shape == (N, L, H, D)
    with pytest.raises(ValueError, match="n_dims must give at least one column"):
        maps.Favor(E, n_dims=1)


def test_sums_of_many_keys_in_half_precision():
    """4,096 keys of size 32: 1/q.z would be below, and q.z above, what float16 holds."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4096, 2, 32, generator=g) * 3 for _ in range(3))
    for kind in KINDS:
        got = attend(kind(32).eval(), q.half(), k.half(), v.half())
        want = attend(kind(32).eval(), q.half().double(), k.half().double(), v.half().double())
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < 1e-3  # half a unit of float16 is 4.9e-4 of a number


def test_favor_of_long_vectors():
    """Features of exp(-1000) are zero in float32, and their quotients are not."""
    attention = drawn(LinearAttention, "favor")
    q, k, v = (t * 30 for t in tokens())
    got = attend(attention, q, k, v)
    want = attend(copy.deepcopy(attention).double(), q.double(), k.double(), v.double())
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-3 * float(v.abs().max()))
    lost = copy.deepcopy(attention)
    lost.feature_map.legacy = "exact"
    assert attend(lost, q, k, v).abs().max() == 0  # what the original makes of it: nothing


def test_favor_estimates_softmax_and_fourier_the_gaussian_kernel():
    """Means over many draws, within four standard errors of what they estimate."""
    x, y = torch.tensor([0.6, -0.4, 0.3, 0.2]), torch.tensor([0.1, 0.5, -0.2, 0.4])
    scale = 0.7
    kernels = {
        maps.Favor: torch.exp(scale * x @ y),
        maps.RandomFourierFeatures: torch.exp(-scale * (x - y).square().sum() / 2),
    }
    for kind, want in kernels.items():
        phi = kind(4, n_dims=8, softmax_temp=scale, orthogonal=True)
        torch.manual_seed(0)
        seen = []
        for _ in range(2000):
            phi.redraw_()
            seen.append((phi(x) * phi(y)).sum())
        seen = torch.stack(seen)
        assert abs(seen.mean() - want) < 4 * seen.std() / len(seen) ** 0.5


def test_orthogonal_matrices_have_unbiased_signs():
    """LAPACK's own signs make a diagonal entry negative far more often than not."""
    torch.manual_seed(0)
    counts = {}
    for legacy in (None, "exact"):
        signs = []
        for _ in range(400):
            w = torch.empty(6, 8)
            maps.orthogonal_random_matrix_(w, legacy)
            assert torch.allclose(w[:, :6].T @ w[:, :6], torch.diag(w[:, :6].square().sum(0)), atol=1e-4)
            signs.append(w[0, 0] > 0)
        counts[legacy] = int(torch.stack(signs).sum())
    assert abs(counts[None] - 200) < 4 * 10  # standard deviation 10
    assert counts["exact"] < 100


def test_an_epsilon_may_still_be_asked_for():
    """It is then the operator's own."""
    q, k, v = tokens()
    got = attend(LinearAttention(E, eps=0.5), q, k, v)
    want = reassoc.linear_attention(*(t.transpose(1, 2) for t in (q, k, v)), "elu+1", eps=0.5)
    assert torch.equal(got, want.transpose(1, 2))
    assert LinearAttention(E).eps == 0
    assert LinearAttention(E, legacy="exact").eps == 1e-6


class Positive(maps.FeatureMap):
    """A user's map: random, asymmetric, and drawn by new_feature_map alone."""

    def __init__(self, query_dims):
        super().__init__(query_dims)
        self.register_buffer("weight", torch.zeros(query_dims, 7))

    def new_feature_map(self, device):
        self.weight = torch.rand(self.query_dims, 7, device=device)

    def forward_queries(self, x):
        return (x @ self.weight).exp()

    def forward_keys(self, x):
        return (x @ self.weight).sigmoid()


class Doubled(maps.Favor):
    """A user's change of a map of ours: it must be this one that is used."""

    def forward(self, x):
        return super().forward(x * 2) + 1


@each_kind
@pytest.mark.parametrize("legacy", [None, "exact"])
@pytest.mark.parametrize("factory", [Positive, Doubled, Doubled.factory(n_dims=6)])
def test_maps_of_users_own(kind, legacy, factory):
    """Their features, by their methods; drawn once if nothing is there, in training whenever asked."""
    attention = kind(E, factory, legacy=legacy).eval()
    q, k, v = tokens()
    first = attend(attention, q, k, v)
    if legacy is None:
        assert torch.equal(attend(attention, q, k, v), first)
    phi = attention.feature_map
    attention.eps = 0.0
    phi.deterministic_eval = True
    again = attend(attention, q, k, v)
    weights = torch.einsum("nlhc,nshc->nhls", phi.forward_queries(q), phi.forward_keys(k))
    weights = weights.tril() if kind is CausalLinearAttention else weights
    want = torch.einsum("nhls,nshd->nlhd", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(again, want, rtol=1e-4, atol=1e-5)
    held = next(phi.buffers()).clone()
    attention.train()
    for _ in range(2):
        attend(attention, q, k, v)
    assert not torch.equal(next(phi.buffers()), held)


def test_a_user_s_map_keeps_what_was_loaded():
    """Drawing over a checkpoint's numbers at the first call in evaluation would lose them."""
    attention = LinearAttention(E, Positive).eval()
    weight = torch.rand(E, 7)
    attention.load_state_dict({"feature_map.weight": weight})
    attend(attention, *tokens())
    assert torch.equal(attention.feature_map.weight, weight)


class Mean(nn.Module):
    """A user's attention: the mean of all values."""

    def __init__(self, divisor):
        super().__init__()
        self.divisor = divisor

    def forward(self, queries, keys, values, attn_mask, query_lengths, key_lengths):
        return values.mean(1, keepdim=True).expand(-1, queries.shape[1], -1, -1) / self.divisor


AttentionRegistry.register("test-mean", Mean, [("divisor", Int)])


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_attention_of_users_own(legacy):
    """Registered under a name, it is built with its parameters in either mode."""
    options = {"n_layers": 1, "n_heads": 2, "value_dimensions": 4, "query_dimensions": 4, "dropout": 0.0}
    model = TransformerEncoderBuilder.from_kwargs(
        attention_type="test-mean", divisor="2", legacy=legacy, **options
    ).get()
    assert isinstance(model.layers[0].attention.inner_attention, Mean)
    assert model.layers[0].attention.inner_attention.divisor == 2
    assert model(torch.randn(2, 5, 8)).shape == (2, 5, 8)


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_full_attention_rows_that_see_nothing(legacy):
    """Zero, or the original's NaN; whether anybody listens makes no difference."""
    q, k, v = tokens()
    heard = []
    for listen in (False, True):
        attention = FullAttention(legacy=legacy, event_dispatcher=f"rows {legacy} {listen}").eval()
        if listen:
            attention.event_dispatcher.listen(lambda event: True, heard.append)
        out = attention(q, k, v, FullMask(L), None, LengthMask(torch.tensor([0, 7]), L))
        rows = out[0]
        assert rows.isnan().all() if legacy else torch.equal(rows, torch.zeros_like(rows))
        weights = torch.einsum("nlhe,nshe->nhls", q[1:], k[1:, :7]).div(E**0.5).softmax(-1)
        want = torch.einsum("nhls,nshd->nlhd", weights, v[1:, :7])
        torch.testing.assert_close(out[1:], want, rtol=1e-5, atol=1e-5)
    assert len(heard) == 1


def test_nothing_is_as_large_as_length_squared():
    """Sixteen thousand tokens, with masks: a matrix of every pair would hold 268,435,456 numbers."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)
            )
            return out

    length = 16384
    options = {"n_layers": 1, "n_heads": 1, "value_dimensions": 4, "query_dimensions": 4}
    for kind, legacy in (("linear", None), ("causal-linear", None), ("linear", "exact")):
        model = TransformerEncoderBuilder.from_kwargs(
            attention_type=kind, feed_forward_dimensions=4, legacy=legacy, **options
        ).get()
        mask = TriangularCausalMask(length) if "causal" in kind else None
        with Watch():
            model(torch.randn(1, length, 4), attn_mask=mask).sum().backward()
    assert max(sizes) <= 16 * length
