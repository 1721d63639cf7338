"""Maps that users write, numbers that should not spread, and costs that should not grow."""

import math
import time

import pytest
import torch
from torch import Tensor

import reassoc
from reassoc import AttentionState, feature_maps, rules
from reassoc._features import Features
from reassoc.feature_maps import ExponentialMap, FeatureMap, PositiveFeatures


def tensors(*shape: int, seed: int = 0, heads: int = 2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, heads, *shape, generator=generator, dtype=dtype) for _ in range(3))


class LogReLU(ExponentialMap):
    """ReLU told by its logarithm: features, and whole vectors, may be exactly zero."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def log_query(self, x: Tensor) -> Tensor:
        return x.relu().log()

    def log_key(self, x: Tensor) -> Tensor:
        return x.relu().log()


class QueryLog(FeatureMap):
    """A logarithm on the query side only; as features it is x exp(3 x_0)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def query_features(self, x: Tensor) -> Features:
        return Features(x, 3 * x[..., :1])

    def query(self, x: Tensor) -> Tensor:
        return x * (3 * x[..., :1]).exp()

    def key(self, x: Tensor) -> Tensor:
        return x


class Plain(FeatureMap):
    """The same features without logarithms."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    query = QueryLog.query
    key = QueryLog.key


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 3}], ids=str)
@pytest.mark.parametrize("normalize", ["attention", "sum", "sum+attention", "none"])
def test_features_that_are_exactly_zero_may_come_as_logarithms(options, normalize):
    q, k, v = tensors(70, 3)
    q[:, :, ::9] = -1.0  # rows without any feature
    results = []
    for phi in (LogReLU(3), feature_maps.ReLU(3)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = reassoc.linear_attention(*leaves, phi, normalize=normalize, undefined="zero", **options)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for mine, plain in zip(*results, strict=True):
        assert mine.isfinite().all()
        assert torch.allclose(mine, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("normalize, eps", [("attention", 0.0), ("attention", 0.5), ("none", 0.0)])
def test_a_logarithm_on_the_query_side_only_is_the_same_in_every_way_in(normalize, eps):
    q, k, v = tensors(6, 4)
    options = {"normalize": normalize, "eps": eps}
    want = reassoc.linear_attention(q, k, v, Plain(4), causal=True, **options)
    phi = QueryLog(4)
    got, state = reassoc.linear_attention(q, k, v, phi, causal=True, return_state=True, **options)
    assert torch.allclose(got, want)
    assert torch.allclose(
        reassoc.linear_attention(q, k, v, phi, causal=True, backend="reference", **options), want
    )
    stepped = AttentionState.zeros(phi, 1, 2, 4, normalize=normalize, dtype=torch.float64)
    rows = [reassoc.step(*(t[:, :, i : i + 1] for t in (q, k, v)), phi, stepped, **options) for i in range(6)]
    assert torch.allclose(torch.cat(rows, 2), want)
    summed = AttentionState.zeros(phi, 1, 2, 4, normalize=normalize, dtype=torch.float64)
    summed = summed.apply(reassoc.summarize(k, v, phi, normalize=normalize))
    last = reassoc.read(q[:, :, -1:], phi, summed, eps=eps)
    assert torch.allclose(last, want[:, :, -1:])
    assert torch.allclose(reassoc.read(q[:, :, -1:], phi, state, eps=eps), want[:, :, -1:])


def test_a_map_of_ones_own_needs_two_methods_and_no_name():
    class Mine(FeatureMap):
        def __init__(self) -> None:
            super().__init__(3, 3)

        def query(self, x: Tensor) -> Tensor:
            return x.square()

        key = query

    _, state = reassoc.linear_attention(*tensors(5, 3), Mine(), return_state=True)
    assert "Mine" in state.origin.feature_map


def test_what_a_map_of_ones_own_gets_wrong_is_said():
    class Half(FeatureMap):
        def __init__(self, size: int, feature_dim: int, dtype: torch.dtype = torch.float64) -> None:
            super().__init__(3, feature_dim)
            self.size, self.dtype = size, dtype

        def query(self, x: Tensor) -> Tensor:
            return x[..., : self.size].to(self.dtype)

        def key(self, x: Tensor) -> Tensor:
            return self.query(x)

    class Nothing(FeatureMap):
        def __init__(self) -> None:
            super().__init__(3, 3)

    with pytest.raises(ValueError, match="feature_dim=3, got \\[2\\]"):
        reassoc.linear_attention(*tensors(5, 3), Half(2, 3))
    with pytest.raises(TypeError, match="keep the dtype"):
        reassoc.linear_attention(*tensors(5, 3), Half(3, 3, torch.float32))
    with pytest.raises(NotImplementedError, match="must define key"):
        reassoc.linear_attention(*tensors(5, 3), Nothing())


@pytest.mark.parametrize("name", ["exp", "elu+1"])
def test_infinity_in_one_packed_sequence_stays_there(name):
    q, k, v = tensors(12, 3)
    v[:, :, 0] = math.inf
    k[:, :, 1] = math.nan
    bounds = torch.tensor([0, 3, 8, 12])
    out = reassoc.linear_attention(q, k, v, name, causal=True, cu_seqlens=bounds)
    assert out[:, :, 3:].isfinite().all()


@pytest.mark.parametrize("name", ["exp", "elu+1", "softmax"])
def test_a_later_nan_key_changes_no_earlier_row(name):
    q, k, v = tensors(50, 3)
    want = reassoc.linear_attention(q, k, v, name, causal=True)
    k[:, :, 30] = math.nan
    got = reassoc.linear_attention(q, k, v, name, causal=True)
    assert torch.allclose(got[:, :, :30], want[:, :, :30])


def test_a_masked_key_has_no_undefined_sum():
    class Signed(FeatureMap):  # phi(0) = (1, -1): its sum is zero, and it is not
        def __init__(self) -> None:
            super().__init__(1, 2)

        def query(self, x: Tensor) -> Tensor:
            return torch.cat([x + 1, x - 1], dim=-1)

        key = query

    q, k, v = (t.abs() + 0.5 for t in tensors(4, 1))
    mask = torch.tensor([[True, False, True, True]])
    want = reassoc.linear_attention(q, k[:, :, mask[0]], v[:, :, mask[0]], Signed(), normalize="sum")
    for policy in ("nan", "zero", "raise"):
        options = {"normalize": "sum", "key_mask": mask, "undefined": policy}
        got = reassoc.linear_attention(q, k, v, Signed(), **options)
        assert torch.allclose(got, want)


def test_inference_mode_first_and_training_later():
    """Objects kept between calls must not remember the mode that they were made in."""
    q, k, v = tensors(5, 7, dtype=torch.float32)
    with torch.inference_mode():
        reassoc.linear_attention(q, k, v, "taylor")
    q = q.clone().requires_grad_()
    reassoc.linear_attention(q, k, v, "taylor").sum().backward()
    assert q.grad is not None
    phi = feature_maps.ELU1(7)
    state = AttentionState.zeros(phi, 1, 2, 7)
    token = tuple(t[:, :, :1] for t in tensors(5, 7, dtype=torch.float32))
    with torch.inference_mode():
        for _ in range(2):
            reassoc.step(*token, phi, state)
    with torch.no_grad():
        reassoc.step(*token, phi, state)
    assert state.length.tolist() == [3]


def test_given_projections_stay_given_through_a_checkpoint():
    a = PositiveFeatures(4, 6, projections=torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    b = PositiveFeatures(4, 6)
    fresh = b.fingerprint
    b.load_state_dict(a.state_dict())
    assert b.fingerprint == a.fingerprint != fresh
    with pytest.raises(ValueError, match="given"):
        b.redraw_()


def test_maps_made_on_the_meta_device_are_real():
    """Model loaders build under it; projections and calibration are drawn on the CPU all the same."""
    with torch.device("meta"):
        phi = PositiveFeatures(4, 6, seed=3)
    assert torch.equal(phi.projections, PositiveFeatures(4, 6, seed=3).projections)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {},
        {"causal": True, "window": 40},
        {"causal": True, "normalize": "sum", "delta": True},
    ],
    ids=str,
)
def test_the_backward_pass_is_linear_in_length(options):
    """Four times the tokens: four times the work, not sixteen. Best of three against a noisy machine."""
    options = dict(options)
    delta = options.pop("delta", False)

    def seconds(length: int) -> float:
        q, k, v = (t.requires_grad_() for t in tensors(length, 4, heads=1, dtype=torch.float32))
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            rule = rules.Delta(k[..., 0].sigmoid()) if delta else rules.Sum()
            reassoc.linear_attention(q, k, v, "elu+1", rule=rule, **options).sum().backward()
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(80_000) / seconds(20_000) < 9


def test_a_windowed_step_does_not_build_states():
    """One query against W keys is a few products of size W, not W states of size r x c."""
    phi = feature_maps.ELU1(32)
    state = AttentionState.zeros(phi, 1, 4, 32, window=1024)
    token = tuple(t[:, :, :1] for t in tensors(1, 32, heads=4, dtype=torch.float32))
    with torch.no_grad():
        reassoc.step(*token, phi, state, window=1024)
        start = time.perf_counter()
        for _ in range(10):
            reassoc.step(*token, phi, state, window=1024)
    assert (time.perf_counter() - start) / 10 < 0.1  # states of single positions took a second


@pytest.mark.parametrize("delta", [False, True])
def test_compiled_for_any_length_at_once(delta):
    phi = PositiveFeatures(4, 8)

    def call(q, k, v, eps):
        rule = rules.Delta(k[..., 0].sigmoid()) if delta else rules.Sum()
        return reassoc.linear_attention(q, k, v, phi, rule=rule, normalize="attention", causal=True, eps=eps)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, eps in ((10, 0.1), (33, 0.2), (70, 0.3)):
        q, k, v = tensors(length, 4)
        assert torch.allclose(compiled(q, k, v, eps), call(q, k, v, eps))


@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_steps_lose_no_small_terms_to_rounding(name):
    """One large key, then 20,000 small ones, each below half a digit of the sum: they must still count."""
    phi = feature_maps.make(name, 2) if name == "elu+1" else PositiveFeatures(2, 3, scale=1.0)
    state = AttentionState.zeros(phi, 1, 1, 1)
    one = torch.ones(1, 1, 1, 1)
    large, small = (torch.full((1, 1, 1, 2), x) for x in ((3e5, -4.0) if name == "elu+1" else (0.0, 3.5)))
    with torch.no_grad():
        reassoc.step(large, large, one, phi, state)
        for _ in range(20_000):
            reassoc.step(small, small, one, phi, state)
    keys = torch.cat([large, small.expand(1, 1, 20_000, 2)], 2)
    exact = phi.double().key(keys.double()).sum(2)
    scale = 1.0 if state.log_scale is None else state.log_scale.double().exp()
    assert ((state.z.double() * scale - exact) / exact).abs().max() < 1e-6
