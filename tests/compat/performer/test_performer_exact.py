"""``legacy="exact"`` against performer-pytorch itself: outputs, gradients, draws."""

import pytest
import torch
from performer_cases import OPTIONS, SIZES, distance, original, padded, quietly

import reassoc.compat.performer_pytorch as ours
import reassoc.kernels

package, theirs = original()
TOLERANCE = 1e-5  # of the largest entry: float32, sums of some hundred terms in another order

HEADS = [
    {}, {"causal": True}, {"generalized_attention": True}, {"generalized_attention": True, "causal": True},
    {"generalized_attention": True, "kernel_fn": torch.nn.Softplus()}, {"no_projection": True},
    {"no_projection": True, "causal": True}, {"ortho_scaling": 1}, {"nb_features": 5},
]  # fmt: skip


def pair(name, *args, **options):
    """The same module from both, with the same numbers."""
    made = []
    for module, extra in ((theirs if hasattr(theirs, name) else package, {}), (ours, {"legacy": "exact"})):
        torch.manual_seed(0)
        made.append(quietly(getattr(module, name), *args, **options, **extra))
    for key, tensor in made[0].state_dict().items():
        assert torch.equal(made[1].state_dict()[key], tensor), key  # the same draws in the same order
    return made


def agree(modules, inputs, tolerance=TOLERANCE, **options):
    """Outputs and gradients, of inputs and of parameters, agree."""
    results = []
    for module in modules:
        mine = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
        kept = {k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in options.items()}
        out = module(*mine, **kept)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
        (out * weight).sum().backward()
        leaves = [*mine, *kept.values(), *module.parameters()]
        results.append([out, *(t.grad for t in leaves if t.grad is not None and t.grad.abs().max() > 1e-9)])
    assert len(results[0]) == len(results[1]) > 1
    for expected, got in zip(*results, strict=True):
        # A single number's gradient is a sum over all tokens, and much of it cancels.
        assert distance(got, expected) < tolerance * (10 if expected.numel() == 1 else 1)
    return results[1][0]


@pytest.mark.parametrize("options", HEADS, ids=str)
def test_attention_of_heads(options):
    modules = pair("FastAttention", 16, **options)
    q, k, v = (torch.randn(2, 3, 50, 16) for _ in range(3))
    agree(modules, (q, k, v))
    agree([m.double() for m in modules], (q.double(), k.double(), v.double()), 1e-12)


@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 12.0])  # at 12 most exponentials are nothing beside the epsilon
def test_attention_of_long_sequences_without_gradients(options, scale):
    expected, got = pair("FastAttention", 16, **options)
    q, k, v = (torch.randn(2, 3, 1300, 16) * s for s in (scale, scale, 1))
    with torch.no_grad():
        # At scale 12 the exponents are hundreds, of which float32 keeps 3e-5.
        assert distance(got(q, k, v), expected(q, k, v)) < TOLERANCE * (1 if scale == 1 else 10)
        got, expected, (q, k, v) = got.double(), expected.double(), (q.double(), k.double(), v.double())
        assert distance(got(q, k, v), expected(q, k, v)) < 1e-11


@pytest.mark.parametrize("options", HEADS, ids=str)
def test_gradients_of_long_sequences(options):
    modules = pair("FastAttention", 16, **options)
    q, k, v = torch.randn(2, 3, 700, 16), torch.randn(2, 3, 700, 16), torch.randn(2, 3, 700, 10)
    q = q if options.get("causal") else q[:, :, :600]
    agree(modules, (q, k, v))
    # Longer keys: most features are little but epsilon, and gradients cancel; float32 would show rounding.
    agree([m.double() for m in modules], (q.double(), k.double() * 2, v.double()), 1e-9)


@pytest.mark.parametrize("kernels", ["native library", "torch"])
def test_long_sequences_whatever_computes_them(kernels, monkeypatch):
    if kernels == "torch":
        monkeypatch.setattr(reassoc.kernels, "library", lambda: None)
    agree(pair("FastAttention", 16), [torch.randn(2, 3, n, 16) for n in (600, 700, 700)])


@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("tokens", [20, 600])
@pytest.mark.parametrize("ones", ["q", "kv", "heads of q", "heads of kv"])
def test_a_batch_or_heads_of_one_serve_all(options, tokens, ones):
    expected, got = pair("FastAttention", 16, **options)
    q, k, v = (torch.randn(3, 2, tokens, 16) for _ in range(3))
    part = (slice(None), slice(1)) if "heads" in ones else (slice(1),)
    q = q[part] if ones.endswith("q") else q
    k, v = (k[part], v[part]) if ones.endswith("kv") else (k, v)
    whole = [t.expand(3, 2, tokens, 16) for t in (q, k, v)]  # not every path of the original spreads them
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert distance(got(q, k, v), expected(*whole)) < TOLERANCE


@pytest.mark.parametrize("tokens", [20, 600])
@pytest.mark.parametrize("batches", [(1, 3), (3, 1)], ids=str)
def test_cross_attention_of_a_batch_of_one(batches, tokens):
    expected, got = pair("CrossAttention", 16, heads=2, dim_head=8)
    x, context = torch.randn(batches[0], 600, 16), torch.randn(batches[1], tokens, 16)
    whole = expected(x.expand(3, -1, -1), context=context.expand(3, -1, -1))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert distance(got(x, context=context), whole) < TOLERANCE


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_the_same_seed_drops_the_same_with_gradients_and_without(legacy):
    layer = ours.SelfAttention(16, heads=2, dim_head=8, dropout=0.5, legacy=legacy).train()
    x = torch.randn(2, 1500, 16)
    dropped = []
    for grad in (False, True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(grad):
            dropped.append(layer(x) == 0)
    assert torch.equal(*dropped) and 0.4 < dropped[0].double().mean() < 0.6


def test_hooks_see_whole_calls():
    layer, x, seen = (
        ours.SelfAttention(16, heads=2, dim_head=8, legacy="exact").eval(),
        torch.randn(1, 2100, 16),
        [],
    )
    with torch.no_grad():
        expected = layer(x)
        for module in (layer.to_k, layer.fast_attention):
            module.register_forward_hook(lambda _, __, out: seen.append(out.shape))
        assert distance(layer(x), expected) < 1e-6
    assert seen == [(1, 2100, 16), (1, 2, 2100, 8)]


@pytest.mark.parametrize("how", ["a hook on every module", "a forward of its own"])
def test_whoever_wants_to_see_whole_calls_does(how):
    layer, x, seen = ours.SelfAttention(16, heads=2, dim_head=8).eval(), torch.randn(1, 2100, 16), []
    inner = layer.fast_attention
    if how == "a forward of its own":
        whole = inner.forward
        inner.forward = lambda *call: seen.append(inner) or whole(*call)
        handle = None
    else:
        handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        with torch.no_grad():
            layer(x)
    finally:
        if handle is not None:
            handle.remove()
    assert inner in seen


@pytest.mark.parametrize("options", [{"generalized_attention": True}, {"no_projection": True}], ids=str)
def test_no_keys_are_undefined_where_the_original_says_so(options):
    expected, got = pair("FastAttention", 8, **options)
    q, none = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 0, 8)
    assert expected(q, none, none).isnan().all() and got(q, none, none).isnan().all()


@pytest.mark.parametrize("tokens", [20, 600])
def test_what_the_arithmetic_has_no_answer_for_is_refused(tokens):
    layer, x = ours.CrossAttention(16, heads=2, dim_head=8, legacy="exact"), torch.randn(1, tokens, 16)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="there are no keys"):
            layer(x, context=x[:, :0])
    whole = torch.ones(1, 1, tokens, 8, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"q must be floating point, got torch\.int64"):
        ours.FastAttention(8, legacy="exact")(whole, whole, whole)
    with pytest.raises(ValueError, match="output_attentions is not here"):
        ours.Performer(16, 1, 2, 8)(x, output_attentions=True)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("tokens", [20, 600])
def test_a_trace_computes_the_same(tokens):
    attention = ours.FastAttention(16, legacy="exact")
    q, other = torch.randn(1, 2, tokens, 16), torch.randn(1, 2, tokens, 16)
    traced = torch.jit.trace(attention, (q, q, q))
    assert distance(traced(other, other, other), attention(other, other, other)) < 1e-6


@pytest.mark.parametrize("older", [False, True])
def test_a_compiler_takes_it_whole(older):
    torch._dynamo.reset()
    attention = ours.FastAttention(8, legacy="exact")
    attention.older = older
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = [torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3)]
    results = []
    for module in (attention, compiled):
        out = module(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for expected, got in zip(*results, strict=True):
        assert distance(got, expected) < 1e-6


@pytest.mark.parametrize("name", ["softmax_kernel", "generalized_kernel"])
def test_features(name):
    data, matrix = torch.randn(2, 3, 7, 8), torch.randn(11, 8)
    calls = [{"is_query": True}, {"is_query": False, "eps": 0.01}]
    if name == "generalized_kernel":
        calls = [{}, {"kernel_fn": torch.sigmoid, "kernel_epsilon": 0.0}, {"projection_matrix": None}]
    for call in calls:
        for normalize in (True, False):
            call = {"projection_matrix": matrix, "normalize_data": normalize, **call}
            got, expected = (getattr(m, name)(data, **call) for m in (ours, theirs))
            assert distance(got, expected) < 1e-6


def test_attention_of_features():
    q, k, v = torch.rand(2, 3, 9, 8), torch.rand(2, 3, 9, 8), torch.randn(2, 3, 9, 5)
    for name, options in (("linear_attention", {}), ("causal_linear_attention_noncuda", {"eps": 0.3})):
        got, expected = (getattr(m, name)(q, k, v, **options) for m in (ours, theirs))
        assert distance(got, expected) < 1e-6
    expected = ours.causal_linear_attention_noncuda(q, k, v, chunk_size=4)
    assert torch.equal(ours.causal_linear_attention(q, k, v), expected)


@pytest.mark.parametrize("rows", [3, 8, 20])
@pytest.mark.parametrize("scaling", [0, 1])
def test_the_same_draws(rows, scaling):
    made = []
    for module in (ours, theirs):
        torch.manual_seed(1)
        made.append(module.gaussian_orthogonal_random_matrix(rows, 8, scaling))
    assert distance(*made) < 1e-6


@pytest.mark.parametrize("name", ["SelfAttention", "CrossAttention", "Attention"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_attention_layers(name, causal, rotary):
    modules = pair(name, 32, heads=4, dim_head=8, causal=causal, qkv_bias=True)
    x, context = torch.randn(2, 30, 32), torch.randn(2, 30, 32)
    options = {"pos_emb": theirs.FixedPositionalEmbedding(8, 30)(x)} if rotary else {}
    if name == "SelfAttention":
        options["mask"] = padded(2, 30, 9)
    else:
        options |= {"context": context, "context_mask": padded(2, 30, 5)}
    agree(modules, (x,), **options)


def test_other_layers():
    x, mask = torch.randn(2, 12, 32), padded(2, 12, 3)
    agree(pair_of("FeedForward", 32, 2, 0.0, torch.nn.ReLU, True), (x,))
    for name, args in (("PreScaleNorm", (32,)), ("PreLayerNorm", (32,)), ("ReZero", ())):
        agree([getattr(m, name)(*args, inner(m)) for m in (theirs, ours)], (x,))
    agree([m.Chunk(5, inner(m), along_dim=1) for m in (theirs, ours)], (x,))
    agree([m.PreShiftTokens((-1, 0, 2), inner(m)) for m in (theirs, ours)], (x,), mask=mask)


def inner(module):
    torch.manual_seed(3)
    return module.FeedForward(32)


def pair_of(name, *args):
    made = []
    for module in (theirs, ours):
        torch.manual_seed(0)
        made.append(getattr(module, name)(*args))
    return made


def test_positions():
    x, q, k = torch.randn(2, 30, 8), torch.randn(2, 3, 30, 8), torch.randn(2, 3, 30, 8)
    sinusoids = [m.FixedPositionalEmbedding(8, 64)(x) for m in (ours, theirs)]
    assert torch.equal(*sinusoids)
    assert torch.equal(ours.rotate_every_two(q), theirs.rotate_every_two(q))
    for got, expected in zip(
        *(m.apply_rotary_pos_emb(q, k, sinusoids[0]) for m in (ours, theirs)), strict=True
    ):
        assert distance(got, expected) < 1e-6


@pytest.mark.parametrize("name", OPTIONS)
def test_language_models(name):
    options = OPTIONS[name]
    modules = pair("PerformerLM", **SIZES, **options)
    tokens = torch.randint(20, (2, 48))
    inputs = {"mask": padded(2, 48, 7)}
    if "cross_attend" in options:
        length = 48 if options.get("causal") else 30
        inputs |= {"context": torch.randn(2, length, 32), "context_mask": padded(2, length, 5)}
    out = agree(modules, (tokens,), **inputs)
    for module in modules:
        module.eval()
    with torch.no_grad():
        assert distance(modules[1](tokens, **inputs), out) < TOLERANCE
        encoded = [module(tokens, return_encodings=True, **inputs) for module in modules]
        assert distance(encoded[1], encoded[0]) < TOLERANCE


@pytest.mark.parametrize("name", ["plain", "generalized", "cross", "no projection", "shifted"])
def test_long_sequences_without_gradients(name):
    expected, got = (m.eval() for m in pair("PerformerLM", **SIZES | {"max_seq_len": 2600}, **OPTIONS[name]))
    tokens, inputs = torch.randint(20, (2, 2600)), {"mask": padded(2, 2600, 900)}
    if name == "cross":
        inputs |= {"context": torch.randn(2, 1500, 32), "context_mask": padded(2, 1500, 400)}
    with torch.no_grad():
        assert distance(got(tokens, **inputs), expected(tokens, **inputs)) < TOLERANCE


def test_dropout_of_reversible_layers_is_repeated_in_the_backward_pass():
    options = SIZES | {"reversible": True, "ff_dropout": 0.3, "attn_dropout": 0.2}
    modules = pair("PerformerLM", **options)
    tokens, results = torch.randint(20, (2, 20)), []
    for module in modules:
        torch.manual_seed(5)
        out = module(tokens)
        out.square().sum().backward()
        results.append([out, *(p.grad for p in module.parameters())])
    for expected, got in zip(*results, strict=True):
        assert distance(got, expected) < TOLERANCE


def test_the_callers_tensors_are_left_alone():
    # The original empties masked values in place, in whatever its linear layer returned.
    layer = ours.SelfAttention(8, heads=2, dim_head=4, legacy="exact")
    layer.to_v = torch.nn.Identity()
    x = torch.randn(1, 6, 8)
    before = x.clone()
    layer(x, mask=padded(1, 6, 2))
    assert torch.equal(x, before)


def encoder_decoders():
    options = {
        f"{side}_{key}": value for side in ("enc", "dec") for key, value in SIZES.items() if key != "dim"
    }
    return pair("PerformerEncDec", dim=32, **options, tie_token_embeds=True)


def test_encoder_decoder():
    modules = encoder_decoders()
    source, target = torch.randint(20, (2, 40)), torch.randint(20, (2, 30))
    agree(modules, (source, target), enc_mask=padded(2, 40, 6))


@pytest.mark.parametrize("options", [
    {}, {"filter_logits_fn": "top_p", "filter_thres": 0.3}, {"repetition_penalty": 1.5}, {"temperature": 0.5},
], ids=str)  # fmt: skip
def test_generation(options):
    import performer_pytorch.autoregressive_wrapper as wrapper

    modules = [m.eval() for m in encoder_decoders()]
    source, start = torch.randint(20, (2, 40)), torch.randint(20, (2, 3))
    made = []
    for module, names in zip(modules, (wrapper, ours), strict=True):
        chosen = dict(options)
        if "filter_logits_fn" in chosen:
            chosen["filter_logits_fn"] = getattr(names, chosen["filter_logits_fn"])
        torch.manual_seed(2)
        made.append(module.generate(source, start, 8, enc_mask=padded(2, 40, 6), **chosen))
    assert made[0].shape == (2, 8)
    assert torch.equal(*made)


def test_autoregressive_loss():
    models = pair("PerformerLM", **SIZES, causal=True)
    modules = [m.AutoregressiveWrapper(net) for m, net in zip((package, ours), models, strict=True)]
    agree(modules, (torch.randint(20, (2, 40)),), mask=padded(2, 40, 6))
