"""The map fitted to data: what its formula promises, that it fits, and how it fails."""

import pytest
import torch

import reassoc
from reassoc.feature_maps import LandmarkFeatures, PositiveFeatures, parameterless


def data(seed: int, tokens: int = 300, heads: int = 2, groups: int = 1, dim: int = 8):
    """Correlated queries and keys, as a trained layer has them: (1, H, N, d), (1, G, N, d), (1, G, N, e)."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(3, dim, generator=torch.Generator().manual_seed(99))
    hidden = torch.randn(1, 1, tokens, 3, generator=generator)

    def rows(count: int):
        noise = torch.randn(1, count, tokens, dim, generator=generator)
        return 0.5 * hidden @ basis + 0.2 * noise + 0.5

    value = torch.randn(1, groups, tokens, 4, generator=generator)
    return rows(heads * groups).double(), rows(groups).double(), value.double()


def softmax(q, k, v, scale):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return (scale * q @ k.mT).softmax(-1) @ v


def error(phi, q, k, v):
    true = softmax(q, k, v, phi.scale)
    return ((reassoc.linear_attention(q, k, v, phi) - true).norm() / true.norm()).item()


def test_the_kernel_is_a_square():
    q, k, _ = data(0)
    phi = LandmarkFeatures(8, 28, landmarks=40).double().calibrate_(q, k)
    kernel = phi.query(q) @ phi.key(k).mT
    assert (kernel >= -1e-12 * kernel.abs().amax()).all()
    assert phi.feature_dim == 28 and phi.rank == 7


def test_it_estimates_the_kernel_itself_and_not_a_multiple():
    q, k, _ = data(1)
    phi = LandmarkFeatures(8, 136, landmarks=128).double().calibrate_(q, k)
    true = (phi.scale * q @ k.mT).exp()
    ratio = (phi.query(q) @ phi.key(k).mT).sum(-1) / true.sum(-1)
    assert (ratio - 1).abs().median() < 0.05


def test_it_beats_random_features_on_data_with_structure_judged_on_other_data():
    q, k, _ = data(2)
    fitted = LandmarkFeatures(8, 36).double().calibrate_(q, k)
    random = PositiveFeatures(8, 36).double().calibrate_(q, k)
    held_out = data(3)
    assert error(fitted, *held_out) < 0.5 * error(random, *held_out)


def test_more_features_come_closer_and_are_never_more_than_asked_for():
    q, k, v = data(4)
    errors = []
    for asked in (6, 30, 150):
        phi = LandmarkFeatures(8, asked).double().calibrate_(q, k)
        assert phi.feature_dim <= asked < (phi.rank + 1) * (phi.rank + 2) / 2
        errors.append(error(phi, q, k, v))
    assert errors == sorted(errors, reverse=True)


def test_a_fit_for_each_key_head_pools_the_queries_of_its_group():
    q, k, v = data(5, groups=2)
    each = LandmarkFeatures(8, 28, heads=2, seed=3).double().calibrate_(q, k)
    out = reassoc.linear_attention(q, k, v, each)
    for head in range(2):
        group = slice(2 * head, 2 * head + 2)
        alone = LandmarkFeatures(8, 28, heads=1).double()
        alone._set([(each_side(each, head, "query"), each_side(each, head, "key"))])
        one = reassoc.linear_attention(q[:, group], k[:, head : head + 1], v[:, head : head + 1], alone)
        assert (out[:, group] - one).abs().max() < 1e-10


def each_side(phi, head, side):
    from reassoc.feature_maps.landmark import Side

    parts = (phi.get_buffer(f"{side}_{part}")[head] for part in Side._fields)
    marks, offset, weight = parts
    return Side(marks, offset.reshape(-1), weight)


def test_streaming_equals_one_batch_while_everything_fits():
    q, k, v = data(6)
    whole = LandmarkFeatures(8, 55, landmarks=600).double().calibrate_(q, k)
    parts = LandmarkFeatures(8, 55, landmarks=600).double()
    calibrator = parts.calibrator()
    for start in range(0, 300, 100):
        calibrator.update(q[:, :, start : start + 100], k[:, :, start : start + 100])
    calibrator.finish()
    a, b = (reassoc.linear_attention(q, k, v, phi) for phi in (whole, parts))
    assert (a - b).abs().max() < 1e-6  # the same rows as landmarks, in another order


def test_masked_rows_do_not_enter_the_fit():
    q, k, v = data(7)
    mask = torch.ones(1, 300, dtype=torch.bool)
    mask[:, 200:] = False
    bad_q, bad_k = q.clone(), k.clone()
    bad_q[:, :, 200:] = bad_k[:, :, 200:] = torch.nan
    masked = LandmarkFeatures(8, 28, landmarks=500).double().calibrate_(bad_q, bad_k, mask)
    cut = LandmarkFeatures(8, 28, landmarks=500).double().calibrate_(q[:, :, :200], k[:, :, :200])
    a, b = (reassoc.linear_attention(q, k, v, phi) for phi in (masked, cut))
    assert (a - b).abs().max() < 1e-6
    with pytest.raises(ValueError, match="NaN or infinity"):
        LandmarkFeatures(8, 28).calibrate_(bad_q, bad_k)


def test_a_checkpoint_of_tensors_brings_the_fit_back():
    q, k, v = data(8)
    phi = LandmarkFeatures(8, 28).calibrate_(q, k)
    other = LandmarkFeatures(8, 28, seed=5)
    other.load_state_dict(phi.state_dict())
    assert other.calibrated and other.fingerprint == phi.fingerprint
    q, k, v = q.float(), k.float(), v.float()
    a, b = (reassoc.linear_attention(q, k, v, m) for m in (phi, other))
    assert torch.equal(a, b)


def test_float32_is_as_close_as_float64():
    q, k, v = data(9)
    phi = LandmarkFeatures(8, 55).calibrate_(q, k)
    assert error(phi, q.float(), k.float(), v.float()) == pytest.approx(
        error(phi.double(), q, k, v), abs=1e-3
    )


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_little_data_is_finite(tokens):
    q, k, v = data(10)
    phi = LandmarkFeatures(8, 28).double().calibrate_(q[:, :, :tokens], k[:, :, :tokens])
    out = reassoc.linear_attention(q, k, v, phi, causal=True)
    assert out.isfinite().all()
    constant = LandmarkFeatures(8, 28).double().calibrate_(torch.ones_like(q), torch.zeros_like(k))
    out = reassoc.linear_attention(q, torch.zeros_like(k), v, constant)
    assert (out - v.mean(2, keepdim=True)).abs().max() < 1e-10


def test_it_refuses_what_it_cannot_do():
    q, k, v = data(11)
    phi = LandmarkFeatures(8, 28)
    with pytest.raises(ValueError, match="calibrate_"):
        reassoc.linear_attention(q.float(), k.float(), v.float(), phi)
    with pytest.raises(ValueError, match="at least one real query"):
        phi.calibrator().finish()
    with pytest.raises(ValueError, match="kept by its owner"):
        parameterless("landmark", 8)
    for wrong in ({"num_features": 0}, {"landmarks": 0}, {"ridge": 0.0}, {"scale": -1.0}):
        with pytest.raises(ValueError):
            LandmarkFeatures(8, **{"num_features": 28, **wrong})
    with pytest.raises(TypeError, match="queries and keys differently"):
        phi.calibrate_(q, k)(q)
