"""Attention layers against formulas written out by hand, and what they owe every user of torch."""

import copy
import itertools
import math

import pytest
import torch
from nn_cases import (
    BUDGET,
    DIM,
    EXTRAS,
    HEADS,
    MAPS,
    RULE_CASES,
    SIGNED,
    SIGNED_FACTOR,
    WIDTH,
    E,
    assert_near,
    attention_position,
    config,
    language_model,
    lively,
    pick,
    possible,
    tokens,
)
from torch.nn import functional

import oracle
import reassoc
from reassoc.feature_maps import FeatureMap
from reassoc.nn import (
    AttentionConfig,
    LanguageModel,
    LanguageModelConfig,
    LinearAttention,
    Rotary,
    ShortConvolution,
    SoftmaxAttention,
    attention,
)
from reassoc.nn.rotary import rotate

DOUBLE = torch.float64
FORMULAS = {"elu+1": oracle.elu1, "relu": oracle.relu, "exp": oracle.exp,
            "dpfp-2": lambda x: oracle.dpfp(x, 2)}  # fmt: skip


def noise(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def layer(name="elu+1", *, causal=True, number=0, width=WIDTH, **options):
    torch.manual_seed(0)
    return lively(attention(width, config(name, **options), causal=causal, layer=number)).double()


def heads_of(x, weight, count):
    """Projection by hand: (B, N, width) -> (B, count, N, size), head h from rows h * size and on."""
    size = weight.shape[0] // count
    return torch.stack([x @ weight[h * size : (h + 1) * size].T for h in range(count)], 1)


def by_hand(module, x):
    """Queries, keys, values of a layer without convolution, norms and positions."""
    groups, dim = module.config.groups, module.dim
    rows = module.key_value.weight
    query = heads_of(x, module.query.weight, module.config.heads)
    key = heads_of(x, rows[: groups * dim], groups)
    return query, key, heads_of(x, rows[groups * dim :], groups)


def gates_by_hand(module, x):
    """log_decay and beta of a layer, from the formulas of its papers."""
    gates, groups = module.gates, module.config.groups
    beta = log_decay = None
    if gates.beta is not None:
        beta = (1 / (1 + torch.exp(-(x @ gates.beta.weight.T + gates.beta.bias)))).transpose(1, 2)
    if module.config.rule in ("decay", "gated-delta"):
        if module.config.decay == "fixed":
            return torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(groups)], dtype=DOUBLE), beta
        if module.config.decay == "token":
            logit = x @ gates.decay.weight.T + gates.decay.bias
            log_decay = -(1 + logit.exp()).log().transpose(1, 2)
        else:
            low, high = gates.decay
            logit = x @ low.weight.T @ high.weight.T + high.bias
            log_decay = -(1 + logit.exp()).log().view(*x.shape[:2], groups, -1).transpose(1, 2)
    return log_decay, beta


def joined(heads, module):
    """(B, H, N, e) -> (B, N, width)."""
    return torch.cat(list(heads.unbind(1)), -1) @ module.output.weight.T


# ---------------------------------------------------------------------------------------------------------
# Formulas
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "decay"), RULE_CASES)
@pytest.mark.parametrize("name", FORMULAS)
def test_layer_is_projections_around_the_oracle(name, rule, decay):
    module = layer(name, rule=rule, decay=decay, key_heads=2)
    x = noise(2, 11, WIDTH)
    query, key, value = by_hand(module, x)
    log_decay, beta = gates_by_hand(module, x)
    normalize = "sum" if "delta" in rule else "attention"
    want = oracle.attend(
        FORMULAS[name](query), FORMULAS[name](key), value, log_decay=log_decay, beta=beta,
        normalize=normalize, causal=True, undefined="zero",
    ).output  # fmt: skip
    # The constants are kept in float32; of an error in a logarithm of the decay, 11 tokens make 11.
    allowed = 11 * 2**-24 if decay == "fixed" else BUDGET[DOUBLE]
    assert_near(module(x), joined(want, module), allowed)


@pytest.mark.parametrize("name", MAPS)
def test_layer_is_projections_around_the_reference(name):
    for (rule, decay), extra in itertools.product(RULE_CASES, ({}, {"normalize": "none"}, {"key_heads": 1})):
        module = layer(name, rule=rule, decay=decay, number=3, **extra)
        x = noise(1, 9, WIDTH)
        want = reassoc.linear_attention(
            *by_hand(module, x), module.feature_map, rule=module.gates(x), causal=True, backend="reference",
            normalize=module.config.normalization, undefined="zero",
        )  # fmt: skip
        allowed = BUDGET[DOUBLE] * (SIGNED_FACTOR if name in SIGNED else 1)
        assert_near(module(x), joined(want, module), allowed, f"{name} {rule} {decay} {extra}")


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None)])
def test_softmax_twin_is_softmax(causal, window):
    module = layer(mixer="softmax", causal=causal, key_heads=2, window=window)
    x = noise(2, 7, WIDTH)
    query, key, value = by_hand(module, x)
    scores = query @ key.repeat_interleave(2, 1).mT * DIM**-0.5
    far = torch.arange(7)[:, None] - torch.arange(7)
    if causal:
        scores = scores.masked_fill((far < 0) | (far >= (window or 7)), -math.inf)
    want = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    assert_near(module(x), joined(want, module), BUDGET[DOUBLE])


@pytest.mark.parametrize("mixer", ["linear", "softmax"])
def test_cross_attention_is_projections_of_two_sources(mixer):
    module = layer(mixer=mixer, causal=False)
    x, context = noise(2, 4, WIDTH), noise(2, 9, WIDTH, seed=3)
    query, (_, key, value) = by_hand(module, x)[0], by_hand(module, context)
    if mixer == "linear":
        want = oracle.attend(oracle.elu1(query), oracle.elu1(key), value).output
    else:
        want = oracle.softmax_attention(query, key, value, DIM**-0.5)
    assert_near(module(x, context=context), joined(want, module), BUDGET[DOUBLE])
    assert_near(module.look_up(x, module.remember(context)), joined(want, module), BUDGET[DOUBLE])
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 5:] = False
    short = module(x[:1], context=context[:1, :5])
    hidden = context.clone()
    hidden[0, 5:] = math.nan  # a hidden key may hold anything
    assert_near(module(x, context=hidden, key_mask=mask)[:1], short, BUDGET[DOUBLE])
    assert_near(module.look_up(x, module.remember(hidden, mask))[:1], short, BUDGET[DOUBLE])


def test_norms_and_gate_around_attention():
    module = layer(query_key_norm=True, output_norm=True, output_gate=True)
    with torch.no_grad():
        for norm in (module.query_norm, module.key_norm, module.output_norm):
            norm.weight.copy_(noise(*norm.weight.shape, seed=9))

    def normed(x, norm):
        size = (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
        return x / size * norm.weight

    x = noise(2, 5, WIDTH)
    query, key, value = by_hand(module, x)
    query, key = normed(query, module.query_norm), normed(key, module.key_norm)
    found = normed(
        oracle.attend(oracle.elu1(query), oracle.elu1(key), value, causal=True).output, module.output_norm
    )
    gate = x @ module.gate.weight.T
    want = torch.cat(list(found.unbind(1)), -1) * gate / (1 + (-gate).exp())
    assert_near(module(x), want @ module.output.weight.T, BUDGET[DOUBLE])


@pytest.mark.parametrize("kernel", [1, 2, 5])
def test_convolution_is_that_of_torch(kernel):
    torch.manual_seed(0)
    module = ShortConvolution(7, kernel).double()
    x = noise(2, 9, 7)
    got, recent = module(x)
    padded = functional.pad(x.transpose(1, 2), (kernel - 1, 0))
    want = functional.conv1d(padded, module.weight.T[:, None], groups=7).transpose(1, 2)
    assert_near(got, want, 1e-14)
    assert recent.shape == (2, kernel - 1, 7)
    assert torch.equal(recent, x[:, 9 - (kernel - 1) :])
    # Near the identity at the start, so that a fresh layer is what it would be without: noise of 0.1.
    torch.manual_seed(0)
    wide = ShortConvolution(1000, kernel)
    identity = torch.zeros(kernel, 1000)
    identity[-1] = 1.0
    assert (wide.weight - identity).square().mean().sqrt().item() == pytest.approx(0.1, rel=0.1)


def test_convolution_stands_before_heads_norms_and_positions():
    module = layer(convolution=3)
    x = noise(2, 6, WIDTH)
    weights = torch.cat([module.query.weight, module.key_value.weight])
    padded = functional.pad((x @ weights.T).transpose(1, 2), (2, 0))
    seen = functional.conv1d(padded, module.convolution.weight.T[:, None], groups=len(weights)).transpose(
        1, 2
    )
    query, key, value = seen.split([HEADS * DIM, HEADS * DIM, HEADS * E], -1)
    query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (query, key, value))
    want = oracle.attend(oracle.elu1(query), oracle.elu1(key), value, causal=True).output
    assert_near(module(x), joined(want, module), BUDGET[DOUBLE])


# ---------------------------------------------------------------------------------------------------------
# Gates
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["token", "feature"])
def test_forgetting_rates_at_the_start(decay):
    torch.manual_seed(0)
    module = LinearAttention(WIDTH, config(rule="decay", decay=decay))
    rates = -module.gates(torch.zeros(1, 1, WIDTH)).log_decay.flatten()
    # Between memories of 10 and 1,000 tokens, evenly in the logarithm.
    assert rates.max().item() == pytest.approx(0.1, rel=1e-4)
    assert rates.min().item() == pytest.approx(0.001, rel=1e-4)
    steps = rates.log().diff()
    assert torch.allclose(steps, steps.mean().expand_as(steps), rtol=1e-2)
    # A token of usual size does not change them much.
    seen = -module.gates(torch.randn(1, 500, WIDTH)).log_decay
    ratio = seen / rates.view(1, HEADS, 1, -1).squeeze(-1 if decay == "token" else 0)
    assert ratio.log().abs().mean() < 0.3


def test_retention_constants():
    """Sun et al. 2023: gamma_h = 1 - 2^(-5 - h)."""
    module = layer(rule="decay", decay="fixed")
    found = module.gates(noise(1, 2, WIDTH)).log_decay.exp()
    want = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(HEADS)], dtype=DOUBLE)
    assert (found - want).abs().max() < 1e-7
    assert not list(module.gates.parameters())


@pytest.mark.parametrize(("rule", "decay"), RULE_CASES)
def test_gates_have_the_shapes_of_their_rule(rule, decay):
    module = layer(rule=rule, decay=decay, key_heads=2)
    made = module.gates(noise(3, 5, WIDTH))
    if made.beta is not None:
        assert made.beta.shape == (3, 2, 5)
        assert ((made.beta > 0) & (made.beta < 1)).all()
    if made.log_decay is not None:
        shape = {"token": (3, 2, 5), "feature": (3, 2, 5, DIM), "fixed": (2,)}[decay]
        assert made.log_decay.shape == shape
        assert (made.log_decay < 0).all()


# ---------------------------------------------------------------------------------------------------------
# Positions
# ---------------------------------------------------------------------------------------------------------


def test_rotation_is_multiplication_by_a_complex_number():
    rotary = Rotary(6, base=100.0)
    x, places = noise(2, 3, 5, 6), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 1000000, 11]])
    numbers = torch.complex(x[..., :3], x[..., 3:])
    angles = places[:, None, :, None] * 100.0 ** (-torch.arange(3, dtype=DOUBLE) * 2 / 6)
    want = numbers * torch.polar(torch.ones_like(angles), angles)
    got = rotate(x, rotary(places))
    # A position of a million has angles of a million: eps times that is lost.
    assert (torch.complex(got[..., :3], got[..., 3:]) - want).abs().max() < 1e6 * 1e-15
    assert torch.equal(rotate(x, rotary(torch.zeros(5))), x)
    assert rotate(x.float(), rotary(places)).dtype == torch.float32


def shifted(module, by):
    """The layer with all positions shifted."""
    moved = copy.deepcopy(module)
    moved.rotary.register_forward_pre_hook(lambda _, arguments: (arguments[0] + by,))
    return moved


@pytest.mark.parametrize(
    "options",
    [
        {"mixer": "softmax", "position": "rotary"},
        {"feature_map": "identity", "normalize": "none", "position": "rotary"},
        {"feature_map": "elu+1", "position": "rotary-after"},
        {"feature_map": "favor+", "position": "rotary-after", "rule": "decay"},
        {"feature_map": "dpfp-1", "position": "rotary-after", "rule": "delta"},
    ],
    ids=str,
)
def test_only_distances_matter(options):
    options = dict(options)
    module = layer(options.pop("feature_map", "elu+1"), **options)
    x = noise(2, 8, WIDTH)
    assert_near(shifted(module, 1000)(x), module(x), BUDGET[DOUBLE])
    still = copy.deepcopy(module)
    still.rotary.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 0,))
    assert (still(x) - module(x)).abs().max() > 1e-3 * module(x).abs().max()  # and distances do matter


@pytest.mark.parametrize("normalize", ["attention", "sum", "sum+attention", "none"])
@pytest.mark.parametrize("rule", ["sum", "decay", "delta"])
def test_rotary_after_is_the_double_sum(rule, normalize):
    """Numerator from rotated features, denominator from the unrotated (Su et al. 2021, equation 19)."""
    module = layer("elu+1", rule=rule, position="rotary-after", normalize=normalize, key_heads=2)
    module.requires_grad_(False)
    x = noise(1, 7, WIDTH)
    query, key, value = by_hand(module, x)
    log_decay, beta = gates_by_hand(module, x)
    query, key = oracle.elu1(query).value(), oracle.elu1(key).value()
    if "sum" in normalize:
        query, key = query / query.sum(-1, keepdim=True), key / key.sum(-1, keepdim=True)
    half = torch.arange(7, dtype=DOUBLE)[:, None] * 10000.0 ** (-torch.arange(3, dtype=DOUBLE) * 2 / 6)
    turn = torch.polar(torch.ones_like(half), half)

    def turned(t):
        z = torch.complex(t[..., :3], t[..., 3:]) * turn
        return torch.cat([z.real, z.imag], -1)

    above = oracle.attend(
        oracle.plain(turned(query)), oracle.plain(turned(key)), value, log_decay=log_decay, beta=beta,
        normalize="none", causal=True,
    ).output  # fmt: skip
    if "attention" in normalize:
        below = torch.zeros(1, HEADS, 7, 1, dtype=DOUBLE)
        for h, i in itertools.product(range(HEADS), range(7)):
            for j in range(i + 1):
                gates = torch.zeros(0) if log_decay is None else log_decay[0, h // 2, j + 1 : i + 1]
                below[0, h, i] += query[0, h, i] @ key[0, h // 2, j] * gates.sum().exp()
        above = above / below
    assert_near(module(x), joined(above, module), BUDGET[DOUBLE])


def test_rotary_after_puts_back_what_a_calibrated_map_leaves_out():
    """Without a quotient, or with eps in it, a factor common to a query's features does not cancel."""
    for extra in ({"normalize": "none"}, {"eps": 0.1}):
        module = layer("favor+", position="rotary-after", **extra)
        module.feature_map.calibrate_(noise(1, HEADS, 50, DIM) + 0.5, noise(1, HEADS, 60, DIM, seed=4) - 0.5)
        module.rotary.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 0,))
        plain = layer("favor+", **extra)
        plain.load_state_dict(module.state_dict())
        x = noise(2, 6, WIDTH)
        assert_near(module(x), plain(x), BUDGET[DOUBLE], str(extra))


def test_rotary_after_refuses_a_row_before_it_writes():
    module = layer("relu", position="rotary-after", undefined="raise")
    with torch.no_grad():
        module.query.weight.abs_()
        module.key_value.weight.abs_()
    x = noise(1, 3, WIDTH).abs()
    _, state = module(x, return_state=True)
    with torch.no_grad():
        module.step(x[:, :1], state)  # from here on steps write in place
        before = state.clone()
        with pytest.raises(ValueError, match="undefined result at batch 0"):
            module.step(-x[:, :1], state)
        assert state.memory.length.tolist() == [4]
        assert torch.equal(module.step(x[:, :1], state), module.step(x[:, :1], before))


# ---------------------------------------------------------------------------------------------------------
# What an operator of torch owes
# ---------------------------------------------------------------------------------------------------------


class Cosine(FeatureMap):
    """A map of the user's own, with a parameter."""

    nonnegative = True

    def __init__(self, dim):
        super().__init__(dim, 2 * dim)
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def key(self, x):
        x = x * self.weight
        return torch.cat([1.5 + x.cos(), 1.5 + x.sin()], -1)

    query = key


@pytest.mark.parametrize("position", ["none", "rotary", "rotary-after"])
@pytest.mark.parametrize("rule", ["sum", "gated-delta"])
def test_a_map_of_ones_own(rule, position):
    torch.manual_seed(0)
    chosen = config(rule=rule, decay="feature", position=position)
    module = LinearAttention(WIDTH, chosen, feature_map=Cosine(DIM)).double()
    x = noise(2, 7, WIDTH)
    full = module(x)
    got, state = module(x[:, :3], return_state=True)
    parts = [got, *(module.step(x[:, i : i + 1], state) for i in range(3, 7))]
    assert_near(torch.cat(parts, 1), full, BUDGET[DOUBLE])
    full.sum().backward()
    assert module.feature_map.weight.grad.abs().sum() > 0
    assert isinstance(module.feature_map, Cosine)


def test_a_map_of_another_size_is_refused():
    module = LinearAttention(WIDTH, config(), feature_map=Cosine(DIM + 1))
    with pytest.raises(ValueError, match="dim=7, queries and keys have size 6"):
        module(torch.randn(1, 2, WIDTH))


def test_random_maps_differ_by_layer_and_head_and_agree_between_processes():
    first, again, other = (layer("favor+", number=n).feature_map.projections for n in (0, 0, 1))
    assert torch.equal(first, again)
    draws = torch.cat([first, other])
    assert draws.shape[0] == 2 * HEADS
    assert all((a - b).abs().max() > 0.1 for a, b in itertools.combinations(draws, 2))
    seeded = config("favor+", map_options={"num_features": 6, "seed": 3})
    assert not torch.equal(LinearAttention(WIDTH, seeded).feature_map.projections, first.float())


TRAINED = [
    {},
    {"rule": "decay", "decay": "feature", "output_norm": True},
    {"rule": "delta", "feature_map": "dpfp-1", "convolution": 2, "query_key_norm": True},
    {"rule": "gated-delta", "position": "rotary-after"},
    {"feature_map": "hedgehog", "position": "rotary", "output_gate": True},
    {"mixer": "softmax", "convolution": 2, "key_heads": 2},
]


@pytest.mark.parametrize("options", TRAINED, ids=str)
def test_gradients_are_finite_differences(options):
    options = dict(options)
    name = options.pop("feature_map", "elu+1")
    torch.manual_seed(0)
    sizes = {"heads": 2, "head_dim": 2, "value_dim": 3, "key_heads": 1 if options.pop("key_heads", 0) else 2}
    module = lively(attention(3, config(name, **sizes | options))).double()
    names = [n for n, _ in module.named_parameters()]
    x = noise(1, 4, 3).requires_grad_()

    def call(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *module.parameters()))


@pytest.mark.parametrize(("rule", "decay"), RULE_CASES)
@pytest.mark.parametrize("name", MAPS)
def test_every_parameter_gets_a_gradient(name, rule, decay):
    """None is left out: DistributedDataParallel would wait for it."""
    place = MAPS.index(name) + RULE_CASES.index((rule, decay))
    for number, position in enumerate(("none", "rotary", "rotary-after", "learned")):
        if not possible(name, position):
            continue
        more = {"learned_positions": 20} if position == "learned" else {}
        extra = pick(place + number, rule)
        options = {"rule": rule, "decay": decay, "position": attention_position(position)}
        model = language_model(config(name, **options | extra), layers=1, **more)
        model(tokens(2, 8)).log_softmax(-1)[..., 0].sum().backward()
        for what, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), f"{what} {options} {extra}"
            assert parameter.grad.abs().sum() > 0, f"{what} {options} {extra}"


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("position", ["none", "rotary"])
def test_every_parameter_of_the_softmax_twin_gets_a_gradient(extra, position):
    model = language_model(config(mixer="softmax", position=position, **extra))
    model(tokens(2, 8)).log_softmax(-1)[..., 0].sum().backward()
    for what, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, what


COMPILED = [
    {},
    {"rule": "gated-delta", "decay": "feature", "convolution": 3},
    {"feature_map": "favor+", "position": "rotary", "rule": "decay", "query_key_norm": True},
    {"position": "rotary-after", "output_gate": True, "output_norm": True},
    {"mixer": "softmax", "position": "rotary"},
]


@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_compiled_layer_is_the_layer(options):
    torch._dynamo.reset()
    options = dict(options)
    module = layer(options.pop("feature_map", "elu+1"), **options)
    x = noise(2, 9, WIDTH)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    want = module(x)
    want.square().sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    got = compiled(x)
    got.square().sum().backward()
    assert_near(got, want, BUDGET[DOUBLE])
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() <= 3 * BUDGET[DOUBLE] * gradient.abs().max()


@pytest.mark.parametrize("more", [{}, {"learned_positions": 20}])
def test_compiled_language_model_is_the_model(more):
    torch._dynamo.reset()
    model = language_model(config(rule="delta", convolution=2), **more)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_near(compiled(tokens(2, 9)), model(tokens(2, 9)), BUDGET[DOUBLE])


AUTOCAST = [{}, {"rule": "gated-delta", "convolution": 3, "query_key_norm": True}, {"feature_map": "favor+"},
            {"position": "rotary-after", "output_norm": True, "output_gate": True},
            {"mixer": "softmax", "position": "rotary", "convolution": 3}]  # fmt: skip


@pytest.mark.parametrize("options", AUTOCAST, ids=str)
def test_autocast_stays_near(options):
    options = dict(options)
    module = layer(options.pop("feature_map", "elu+1"), **options).float()
    x = noise(2, 12, WIDTH).float()
    want = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        got, state = module(x, return_state=True)
        first, early = module(x[:, :6], return_state=True)
        parts = [first, *(module.step(x[:, i : i + 1], early) for i in range(6, 12))]
    # Tokens, weights, queries, keys, values, what attention gives and the result are rounded to 8 bits, half
    # a unit of 2^-8 each; a weight of attention follows its logit, which is of order one.
    assert_near(got, want, 10 * 2**-9)
    assert_near(torch.cat(parts, 1), got.detach(), 10 * 2**-9)
    if not isinstance(module, SoftmaxAttention):
        held, _ = state.memory._pack()
        assert all(t.dtype in (torch.float32, torch.int64) for t in held.values())
    got.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"mixer": "softmax"}, {"position": "rotary-after", "convolution": 2}]
)
def test_half_precision_models_run_and_stream(options, dtype):
    model = language_model(config(**options), dtype)
    with torch.no_grad():
        full = model(tokens(2, 9))
        got, states = model(tokens(2, 9)[:, :5], return_states=True)
        parts = [got, *(model.step(tokens(2, 9)[:, i : i + 1], states) for i in range(5, 9))]
    assert full.dtype == dtype
    # Two layers, each with some ten roundings one after the other.
    assert_near(torch.cat(parts, 1), full, 20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("options", [{"feature_map": "favor+"}, {"feature_map": "landmark"},
                                     {"feature_map": "t2r"},
                                     {"rule": "decay", "decay": "fixed", "position": "rotary-after"},
                                     {"mixer": "softmax", "convolution": 3}], ids=str)  # fmt: skip
def test_copies_and_checkpoints_are_the_model(options):
    options = dict(options)
    chosen = config(options.pop("feature_map", "elu+1"), **options)
    model = language_model(chosen, torch.float32)
    with torch.no_grad():
        want = model(tokens(2, 9))
        assert torch.equal(copy.deepcopy(model)(tokens(2, 9)), want)
        assert torch.equal(model(tokens(2, 9)), want)  # and a second call gives what the first gave
        torch.manual_seed(99)
        other = LanguageModel(LanguageModelConfig.from_dict(model.config.to_dict()))
        other.load_state_dict(model.state_dict(), strict=True)
        assert torch.equal(other(tokens(2, 9)), want)


# ---------------------------------------------------------------------------------------------------------
# Odd sizes, and errors
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("options", [{}, {"position": "rotary"}, {"position": "rotary-after", "key_heads": 1},
                                     {"convolution": 3}, {"rule": "gated-delta"}, {"window": 2},
                                     {"mixer": "softmax", "position": "rotary"}], ids=str)  # fmt: skip
def test_few_tokens(options, length):
    module = layer(**options)
    x = noise(2, length, WIDTH)
    output, state = module(x, return_state=True)
    assert output.shape == (2, length, WIDTH) and output.isfinite().all()
    assert state.memory.length.tolist() == [length] * 2
    more = noise(2, 3, WIDTH, seed=5)
    after = module(more, state=state)
    assert_near(after, module(torch.cat([x, more], 1))[:, length:], BUDGET[DOUBLE])
    assert module(x[:0]).shape == (0, length, WIDTH)


@pytest.mark.parametrize("mixer", ["linear", "softmax"])
def test_an_empty_context_gives_nothing(mixer):
    module = layer(mixer=mixer, causal=False)
    x = noise(2, 3, WIDTH)
    assert module(x, context=x[:, :0]).abs().max() == 0
    assert module.look_up(x, module.remember(x[:, :0])).abs().max() == 0


X = torch.zeros(2, 5, WIDTH, dtype=DOUBLE)


def state_of(x=X, **options):
    return layer(**options)(x, return_state=True)[1]


REFUSED = {
    "rank": (lambda: layer()(X[0]), "x must have shape (B, N, 16), got (5, 16)"),
    "width": (lambda: layer()(X[..., :3]), "x must have shape (B, N, 16), got (2, 5, 3)"),
    "two tokens": (
        lambda: layer(mixer="softmax").step(X[:, :2], state_of(mixer="softmax")),
        "x must have shape (B, 1, 16), got (2, 2, 16)",
    ),
    "mask shape": (
        lambda: layer(mixer="softmax")(X, key_mask=torch.ones(1, 5, dtype=torch.bool)),
        "key_mask must have shape (B, M) = (2, 5), got (1, 5)",
    ),
    "mask before convolution": (
        lambda: layer(convolution=2)(X, key_mask=torch.ones(2, 1, dtype=torch.bool)),
        "key_mask must have shape (B, M) = (2, 5), got (2, 1)",
    ),
    "state not causal": (
        lambda: layer(causal=False)(X, return_state=True),
        "a state belongs to causal attention",
    ),
    "context causal": (lambda: layer()(X, context=X), "a context needs causal=False"),
    "context rotary": (
        lambda: layer(causal=False, position="rotary")(X, context=X),
        "position='none'",
    ),
    "remember rotary": (
        lambda: layer(causal=False, position="rotary", mixer="softmax").remember(X),
        "position='none'",
    ),
    "remember convolution": (lambda: layer(causal=False, convolution=2).remember(X), "convolution=0"),
    "context batch": (
        lambda: layer(causal=False)(X, context=X[:1]),
        "context must have shape (2, M, 16), got (1, 5, 16)",
    ),
    "context mask": (
        lambda: layer(causal=False, mixer="softmax").remember(X, torch.ones(2, 4, dtype=torch.bool)),
        "key_mask must have shape (B, M) = (2, 5), got (2, 4)",
    ),
    "softmax state": (lambda: layer()(X, state=state_of(mixer="softmax")), "state holds KeyValueCache"),
    "linear state": (lambda: layer(mixer="softmax")(X, state=state_of()), "this layer needs KeyValueCache"),
    "unrotated state": (
        lambda: layer(position="rotary-after")(X, state=state_of()),
        "this layer needs RotatedState",
    ),
    "unrotated step": (
        lambda: layer(position="rotary-after").step(X[:, :1], state_of()),
        "this layer needs RotatedState",
    ),
    "batch": (lambda: layer(position="rotary")(X[:1], state=state_of()), "another batch"),
    "batch of a step": (
        lambda: layer(mixer="softmax").step(X[:1, :1], state_of(mixer="softmax")),
        "another batch",
    ),
    "no recent inputs": (lambda: layer(convolution=2)(X, state=state_of()), "recent inputs None"),
    "other kernel": (
        lambda: layer(convolution=2)(X, state=state_of(convolution=4)),
        "recent inputs (2, 3, 68)",
    ),
    "recent inputs": (lambda: layer()(X, state=state_of(convolution=2)), "recent inputs (2, 1, 68)"),
    "other map": (lambda: layer("relu")(X, state=state_of()), "feature_map='elu+1"),
    "other rotated map": (
        lambda: layer("relu", position="rotary-after")(X, state=state_of(position="rotary-after")),
        "feature_map='elu+1",
    ),
    "other rotated normalization": (
        lambda: layer(position="rotary-after", normalize="none").step(
            X[:, :1], state_of(position="rotary-after", normalize="sum")
        ),
        "normalize='sum'",
    ),
    "other rule": (lambda: layer(rule="decay")(X, state=state_of()), "rule='sum'"),
    "other heads": (lambda: layer(key_heads=2)(X, state=state_of()), "key heads"),
    "other softmax heads": (
        lambda: layer(mixer="softmax", key_heads=2)(X, state=state_of(mixer="softmax")),
        "state holds keys (2, 4, 5, 6)",
    ),
    "odd rotary": (lambda: layer(head_dim=5, position="rotary"), "even size, got 5"),
    "odd rotated features": (
        lambda: layer("taylor", head_dim=4, position="rotary-after"),
        "even size, got 15",
    ),
    "delta not causal": (lambda: layer(causal=False, rule="delta"), "rule='delta'"),
    "window not causal": (lambda: layer(causal=False, window=3), "window=3"),
    "softmax window not causal": (lambda: layer(mixer="softmax", causal=False, window=3), "window=3"),
    "rotated not causal": (lambda: layer(causal=False, position="rotary-after"), "position='rotary-after'"),
    "not linear": (lambda: LinearAttention(WIDTH, config(mixer="softmax")), "mixer='linear'"),
    "not softmax": (lambda: SoftmaxAttention(WIDTH, config()), "mixer='softmax'"),
    "width and heads": (lambda: LinearAttention(10, AttentionConfig(heads=4)), "give head_dim"),
    "unknown map": (lambda: LinearAttention(WIDTH, AttentionConfig(feature_map="elu")), "known: identity"),
    "not fitted": (
        lambda: LinearAttention(WIDTH, config("landmark")).double()(X),
        "call calibrate_(query, key)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError) as found:
        call()
    assert message in str(found.value)


def test_types_that_are_refused():
    with pytest.raises(TypeError, match="key_mask must be a bool tensor"):
        layer(mixer="softmax")(X, key_mask=torch.ones(2, 5))
    with pytest.raises(
        TypeError, match="state must be a MixerState of return_state=True, got AttentionState"
    ):
        layer()(X, state=state_of().memory)
    with pytest.raises(TypeError, match="nonsense"):
        LinearAttention(WIDTH, AttentionConfig(map_options={"nonsense": 1}))
    with pytest.raises(TypeError, match="x must be floating point"):
        layer()(X.long())


def test_layers_say_what_they_are():
    shown = repr(layer(rule="decay", convolution=3, position="rotary", key_heads=2))
    for part in ("causal=True, heads=4, key_heads=2", "rule=decay", "kernel=3", "size=6, base=10000"):
        assert part in shown
