"""``legacy=None``: exact for the kernel that it names; what was reported of the original does not happen."""

import math

import pytest
import torch
from performer_cases import OPTIONS, SIZES, distance, original, padded, quietly

import reassoc.compat.performer_pytorch as ours

HEADS = [
    {}, {"causal": True}, {"generalized_attention": True}, {"generalized_attention": True, "causal": True},
    {"no_projection": True}, {"no_projection": True, "causal": True}, {"ortho_scaling": 1},
]  # fmt: skip
FEW, MANY = 20, 700  # keys: all at once, and in pieces where no gradient is wanted


def weights(attention, q, k, mask=None):
    """The definition, in float64: an N x M matrix of kernel values, and its rows divided by their sums."""
    q, k = q.double(), k.double()
    if attention.no_projection:
        left, right = q.softmax(-1), k.exp()
        if not attention.causal:
            hidden = torch.zeros(k.shape[-2], dtype=torch.bool) if mask is None else ~mask
            right = k.masked_fill(hidden[:, None], -torch.inf).softmax(-2)
    else:
        matrix = attention.projection_matrix.double()
        left, right = ((x * x.shape[-1] ** -0.25) @ matrix.mT for x in (q, k))
        if attention.generalized_attention:
            left, right = attention.kernel_fn(left), attention.kernel_fn(right)
        else:
            left, right = ((u - (x * x.shape[-1] ** -0.25).square().sum(-1, keepdim=True) / 2).exp()
                           for u, x in ((left, q), (right, k)))  # fmt: skip
    kernel = left @ right.mT
    if attention.causal:
        kernel = kernel.tril()
    if mask is not None:
        kernel = kernel * mask
    return (kernel / kernel.sum(-1, keepdim=True)).nan_to_num(0.0)  # undefined rows are zero


@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_definition(options, tokens, dtype):
    torch.manual_seed(0)
    attention = ours.FastAttention(8, **options).to(dtype)
    q, k, v = (torch.randn(1, 2, tokens, 8, dtype=dtype) for _ in range(3))
    mask = None if options.get("causal") else padded(1, tokens, 4)
    expected = weights(attention, q, k, None if mask is None else mask[0]) @ v.double()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    assert distance(attention(q, k, v, mask).double(), expected) < tolerance
    with torch.no_grad():
        assert distance(attention(q, k, v, mask).double(), expected) < tolerance


@pytest.mark.parametrize("options", HEADS, ids=str)
def test_gradients(options):
    torch.manual_seed(0)
    attention = ours.FastAttention(4, 6, **options).double()
    inputs = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = None if options.get("causal") else padded(1, 5, 1)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask), inputs)


@pytest.mark.parametrize("options", HEADS, ids=str)
def test_a_mask_hides_keys_and_not_only_values(options):
    # Reported of the original: 5 real rows and 15 padded ones gave other numbers than the 5 alone.
    torch.manual_seed(0)
    attention = ours.FastAttention(8, **options)
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    k[:, :, 5:], v[:, :, 5:] = math.nan, math.nan  # whatever padding holds
    mask = padded(1, 20, 15)
    alone = attention(q[:, :, :5], k[:, :, :5], v[:, :, :5])
    assert distance(attention(q, k, v, mask)[:, :, :5], alone) < 1e-6


def test_the_originals_mask_hides_values_only():
    attention = ours.FastAttention(8, legacy="exact")
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    alone = attention(q[:, :, :5], k[:, :, :5], v[:, :, :5])
    assert distance(attention(q, k, v, padded(1, 20, 15))[:, :, :5], alone) > 0.1


@pytest.mark.parametrize("name", [n for n in OPTIONS if "local" not in n and "chunk" not in n])
def test_padding_changes_nothing_in_a_model(name):
    if "axial" in name:
        pytest.importorskip("axial_positional_embedding")
    torch.manual_seed(0)
    options = OPTIONS[name]
    model = ours.PerformerLM(**SIZES, **options).eval()
    tokens, inputs = torch.randint(20, (1, 40)), {}
    if "cross_attend" in options:
        inputs = {"context": torch.randn(1, 9, 32)}
    alone = model(tokens[:, :30], **inputs)
    together = model(tokens, mask=padded(1, 40, 10), **inputs)[:, :30]
    assert distance(together, alone) < 1e-5


def test_without_a_visible_key_the_output_is_zero():
    for options in HEADS:
        if not options.get("causal"):
            attention = ours.FastAttention(8, **options)
            q = torch.randn(1, 2, 6, 8)
            assert not attention(q, q, q, torch.zeros(1, 6, dtype=torch.bool)).any(), options


@pytest.mark.parametrize("legacy", [None, "exact"])
@pytest.mark.parametrize("options", HEADS, ids=str)
def test_sizes_of_one(options, legacy):
    # The original's default number of features for heads of size 1 is 0, and its constructor fails.
    attention = ours.FastAttention(1, legacy=legacy, **options)
    assert attention.projection_matrix.shape == (1, 1)
    one, several = torch.ones(1, 1, 1, 1), torch.rand(2, 3, 4, 1) + 0.1
    assert attention(one, one, one).isfinite().all()
    assert attention(several, several, several).isfinite().all()
    attention = ours.FastAttention(6, nb_features=1, legacy=legacy, **options)
    x = torch.randn(1, 2, 5, 6)
    assert attention(x, x, x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_features_that_are_all_zero(dtype):
    attention = ours.FastAttention(8, generalized_attention=True, kernel_fn=torch.zeros_like).to(dtype)
    q = torch.randn(1, 2, 6, 8, dtype=dtype)
    out = attention(q, q, q)
    assert out.dtype == dtype and not out.any()


@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(options, dtype):
    torch.manual_seed(0)
    attention = ours.FastAttention(16, **options).to(dtype)
    q, k, v = (torch.randn(1, 2, 30, 16).to(dtype) for _ in range(3))
    out = attention(q, k, v)
    assert out.dtype == dtype
    # Inputs and matrix are what they are; the output is rounded once.
    assert distance(out.double(), weights(attention, q, k) @ v.double()) < torch.finfo(dtype).eps


@pytest.mark.parametrize("causal", [False, True])
def test_sums_of_4096_keys_in_float16(causal):
    # Sums of that many features kept in float16 stop growing, or overflow.
    torch.manual_seed(0)
    attention = ours.FastAttention(32, causal=causal).half()
    q, k = (torch.randn(1, 1, 4096, 32).half() for _ in range(2))
    v = torch.rand(1, 1, 4096, 32).half() + 10
    expected = weights(attention, q, k) @ v.double()
    assert distance(attention(q, k, v).double(), expected) < torch.finfo(torch.float16).eps


@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_values_of_one_give_one(options, scale):
    torch.manual_seed(0)
    attention = ours.FastAttention(8, **options)
    q, k = torch.randn(1, 2, 40, 8) * scale, torch.randn(1, 2, 40, 8) * scale
    out = attention(q, k, torch.ones(1, 2, 40, 3))
    seen = weights(attention, q, k).sum(-1) > 0.5  # elsewhere a ReLU left nothing, and the output is zero
    assert (seen.double().mean() > 0.9) and distance(out[seen], torch.ones(())) < 1e-5
    assert not out[~seen].any()


@pytest.mark.parametrize("factor", [0.0, 10.0, 1000.0])
def test_the_future_changes_nothing(factor):
    torch.manual_seed(0)
    attention = ours.FastAttention(8, causal=True)
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    before = attention(q, k, v)
    k[:, :, 30:] *= factor
    assert distance(attention(q, k, v)[:, :, :30], before[:, :, :30]) < 1e-6


def test_in_the_original_the_future_changes_the_past():
    package, _ = original()
    torch.manual_seed(0)
    theirs = quietly(package.FastAttention, 8, causal=True)
    exact = ours.FastAttention(8, causal=True, legacy="exact")
    exact.load_state_dict(theirs.state_dict())
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    for attention in (theirs, exact):
        before = attention(q, k, v)
        later = k.clone()
        later[:, :, 30:] *= 10
        assert distance(attention(q, later, v)[:, :, :30], before[:, :, :30]) > 0.1


def test_far_from_the_epsilon_both_modes_are_one_operator():
    # Short vectors: exponentials near one, beside which the epsilons are 1e-4.
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 30, 16) * 0.2 for _ in range(3))
    exact, clean = (ours.FastAttention(16, legacy=legacy) for legacy in ("exact", None))
    clean.load_state_dict(exact.state_dict())
    assert 1e-7 < distance(clean(q, k, v), exact(q, k, v)) < 1e-2


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_autocast(legacy):
    torch.manual_seed(0)
    layer = ours.SelfAttention(32, heads=4, dim_head=8, legacy=legacy).eval()
    x = torch.randn(1, 700, 32)
    expected = layer(x)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        assert out.dtype == torch.bfloat16 and distance(out.float(), expected) < 0.05


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_no_tensor_grows_with_the_square_of_the_length(legacy):
    # A matrix of 20,000 x 20,000 floats is 1.6 GB; its pieces would be seen as well, whatever is freed.
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                largest = max(largest, t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0)
            return out

    length = 20_000
    model = ours.Performer(16, 1, 2, 8, legacy=legacy)
    x = torch.randn(1, length, 16)
    for grad in (False, True):
        with Watch(), torch.set_grad_enabled(grad):
            out = model(x)
            if grad:
                out.sum().backward()
    assert largest <= 4 * length * 4 * 16  # the feed-forward layer's inner size


def test_unknown_arguments_are_refused():
    x, odd = torch.ones(1, 2, 8), torch.ones(1, 1, 2, 3)
    for make, words in [
        (lambda: ours.FastAttention(8, legacy="old"), "legacy must be None"),
        (lambda: ours.FastAttention(8, ortho_scaling=2), "ortho_scaling must be 0"),
        (lambda: ours.FastAttention(0), "dim_heads must be at least 1"),
        (lambda: ours.FastAttention(8, 0), "nb_features must be at least 1"),
        (lambda: ours.SelfAttention(10, heads=4), "multiple of heads=4"),
        (lambda: ours.SelfAttention(8, heads=4, local_heads=5), "local_heads must be from 0 to heads=4"),
        (lambda: ours.Performer(8, 2, 2, 4, local_attn_heads=(1, 1, 1)), "one number for each of 2 layers"),
        (lambda: ours.SelfAttention(8, heads=2)(x, context=x), "takes no context"),
        (lambda: ours.CrossAttention(8, heads=2)(x), "needs a context"),
        (lambda: ours.PerformerLM(**SIZES)(torch.zeros(1, 65, dtype=torch.long)), "max_seq_len=64"),
        (lambda: ours.apply_rotary_pos_emb(odd, odd, torch.ones(1, 2, 4)), "must be even"),
        (lambda: ours.PerformerEncDec(8, enc_dim=8), "enc_dim and dec_dim"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            make()


@pytest.mark.parametrize(("options", "package"), [
    ({"local_attn_heads": 1}, "local-attention"),
    ({"rotary_position_emb": False, "axial_position_emb": True}, "axial-positional-embedding"),
], ids=str)  # fmt: skip
def test_a_missing_package_is_named(options, package, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        ours.PerformerLM(**SIZES, **options)
