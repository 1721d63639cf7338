"""Every row of the tables of docs/howto/migrate.md against the original, and every figure that it states.

flash-linear-attention's reference forms always run; the others where they are installed.
"""

import ast
import importlib
import importlib.metadata
import itertools
import math
import re
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid, normalize

import reassoc
import reassoc.nn
from reassoc import rules
from reassoc.feature_maps import GeneralizedFeatures, PositiveFeatures, TrigonometricFeatures
from test_peers import fla

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "migrate.md"
ROWS = {}  # table (a heading) -> rows that tests of this file claim
B, H, N, D, M = 2, 3, 64, 16, 24


def row(cell, table):
    """Marks the test of a row by its first cell."""
    ROWS.setdefault(table, []).append(cell)
    return lambda test: test


performer_row = partial(row, table="performer-pytorch 1.1.4")
fast_row = partial(row, table="pytorch-fast-transformers 0.4.0")
geometric_row = partial(row, table="PyTorch Geometric 2.8")
fla_row = partial(row, table="flash-linear-attention (fla-core 0.6.0)")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(norm=1.0, length=N, size=D):
    return [normal(B, H, length, size, seed=i) * (norm if i < 2 else 1.0) for i in range(3)]


def same(found, expected, relative=1e-5):
    assert found.shape == expected.shape
    gap = (found - expected).abs().max() / expected.abs().max()
    assert gap <= relative, float(gap)


def imported(name):
    """A module of an original; their imports warn (distutils, torch.cuda.amp)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def test_every_row_has_a_test():
    text = PAGE.read_text(encoding="utf-8")
    tables = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading = section.split("\n", 1)[0]
        cells = [line.split(" | ")[0].removeprefix("| ") for line in section.split("\n") if line[:1] == "|"]
        if heading in ROWS:
            tables[heading] = cells[2:]  # without the head and its rule
    assert tables == ROWS


# ---------------------------------------------------------------------------------------------------------
# performer-pytorch
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture()
def performer(monkeypatch):
    """The original with its epsilons set to zero: what is left is the operator that it names."""
    module = imported("performer_pytorch.performer_pytorch")
    monkeypatch.setattr(module, "softmax_kernel", partial(module.softmax_kernel, eps=0.0))
    monkeypatch.setattr(module, "generalized_kernel", partial(module.generalized_kernel, kernel_epsilon=0.0))
    plain = partial(module.causal_linear_attention_noncuda, eps=0.0)
    monkeypatch.setattr(module, "causal_linear_attention_noncuda", plain)
    return module


def features(attention, **options):
    return PositiveFeatures(attention.dim_heads, projections=attention.projection_matrix, **options)


@performer_row("`from performer_pytorch import ...`")
def test_performer_names():
    original = imported("performer_pytorch")
    ours = importlib.import_module("reassoc.compat.performer_pytorch")
    names = {n for n, v in vars(original).items() if isinstance(v, type)}
    assert len(names) == 8 and names <= set(vars(ours))


@performer_row("`FastAttention(d, m)(q, k, v)`")
@performer_row("buffer `projection_matrix`, `(m, d)`")
def test_performer_attention(performer):
    theirs = performer.FastAttention(D, M)
    assert theirs.projection_matrix.shape == (M, D) == PositiveFeatures(D, M).projections.shape
    same(reassoc.linear_attention(*qkv(), features(theirs)), theirs(*qkv()))


@performer_row("`nb_features=None`: `int(d * log(d))`")
def test_performer_number_of_features(performer):
    for size in (2, 16, 64):
        assert performer.FastAttention(size).nb_features == int(size * math.log(size))
        assert PositiveFeatures(size).num_features == math.ceil(size * math.log(size))


@performer_row("`ortho_scaling=1`")
def test_performer_scaling(performer):
    for scaling, norms in ((0, "chi"), (1, "sqrt_dim")):
        rows = performer.FastAttention(D, 400, ortho_scaling=scaling).projection_matrix.norm(dim=1)
        mine = PositiveFeatures(D, 400, norms=norms).projections.norm(dim=1)
        # Norms of Gaussian vectors of size d are sqrt(d) give or take 0.71; constant ones do not vary.
        same(rows.mean(), mine.mean(), 0.05)
        assert (rows.std() > 0.5) == (mine.std() > 0.5) == (scaling == 0)


@performer_row("`generalized_attention=True`")
def test_performer_generalized(performer):
    theirs = performer.FastAttention(D, M, generalized_attention=True)
    phi = GeneralizedFeatures(D, projections=theirs.projection_matrix)
    same(reassoc.linear_attention(*qkv(), phi), theirs(*qkv()))


@performer_row("`no_projection=True, causal=True`")
@performer_row("`causal=True`")
def test_performer_causal(performer):
    theirs = performer.FastAttention(D, M, causal=True)
    same(reassoc.linear_attention(*qkv(), features(theirs), causal=True), theirs(*qkv()))
    theirs = performer.FastAttention(D, M, causal=True, no_projection=True)
    same(reassoc.linear_attention(*qkv(), "exp", causal=True), theirs(*qkv()))


@performer_row("`mask` `(B, N)`, True = real")
def test_performer_mask(performer):
    theirs = performer.SelfAttention(H * D, heads=H, dim_head=D, nb_features=M)
    x, mask = normal(B, N, H * D), torch.arange(N) < torch.tensor([[N], [5]])
    q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (theirs.to_q, theirs.to_k, theirs.to_v))
    mine = reassoc.linear_attention(q, k, v, features(theirs.fast_attention), key_mask=mask)
    mine = theirs.to_out(mine.transpose(1, 2).flatten(2))
    same(mine[1, :5], theirs(x[1:, :5])[0])  # as if padding were not there
    same(mine[0], theirs(x, mask=mask)[0])


@performer_row("`context`, `context_mask`")
def test_performer_context(performer):
    theirs = performer.CrossAttention(H * D, heads=H, dim_head=D, nb_features=M)
    x, context = normal(B, N, H * D), normal(B, 9, H * D, seed=1)
    q, k, v = (
        f(t).unflatten(-1, (H, D)).transpose(1, 2)
        for f, t in ((theirs.to_q, x), (theirs.to_k, context), (theirs.to_v, context))
    )
    mask = torch.arange(9) < torch.tensor([[9], [9]])
    mine = reassoc.linear_attention(q, k, v, features(theirs.fast_attention), key_mask=mask)
    same(theirs.to_out(mine.transpose(1, 2).flatten(2)), theirs(x, context=context, context_mask=mask))


@performer_row("`redraw_projection_matrix(device)`")
@performer_row("`feature_redraw_interval=1000`")
def test_performer_redraw(performer):
    theirs = performer.Performer(dim=8, depth=1, heads=2, dim_head=4, feature_redraw_interval=3)
    ours = nn.ModuleList([PositiveFeatures(4)])
    schedule = reassoc.nn.RedrawSchedule(ours, every=3)
    fast = performer.find_modules(theirs, performer.FastAttention)[0]
    changed = []
    for matrix, step in ((fast.projection_matrix, lambda: theirs(normal(1, 3, 8))),
                         (ours[0].projections, schedule.step)):  # fmt: skip
        draws = []
        for _ in range(8):
            before = matrix.clone()
            step()
            draws.append(not torch.equal(before, matrix))
        changed.append(draws)
    # The original's counter starts again at 0 after a call that redraws: 3 calls and one more.
    assert [i for i, new in enumerate(changed[0]) if new] == [3, 7]
    assert [i for i, new in enumerate(changed[1]) if new] == [3, 6]
    before = fast.projection_matrix.clone()
    fast.redraw_projection_matrix("cpu")
    assert not torch.equal(fast.projection_matrix, before)
    assert not torch.equal(ours[0].projections.clone(), ours[0].redraw_().projections)


@performer_row("`proj_updater.instance.*` in a checkpoint")
def test_performer_duplicates(performer):
    state = performer.Performer(dim=8, depth=2, heads=2, dim_head=4).state_dict()
    copies = [name for name in state if name.startswith("proj_updater.instance.")]
    assert len(copies) * 2 + 1 == len(state)
    for name in copies:
        assert torch.equal(state[name], state[name.replace("proj_updater.instance.", "net.")])


# ---------------------------------------------------------------------------------------------------------
# pytorch-fast-transformers
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture()
def fast():
    modules = ("attention", "masking", "feature_maps", "causal_product", "recurrent.attention", "builders")
    imported("fast_transformers")
    found = {}
    for name in modules:
        found |= vars(imported(f"fast_transformers.{name}"))
    return SimpleNamespace(**found)


pytestmark = pytest.mark.filterwarnings("ignore:torch.qr is deprecated", "ignore:.*torch.qr.*")


def fast_attention(fast, kind, feature_map=None, lengths=None, eps=0.0, inputs=None):
    """An original's attention in its layout, and its map after the draw."""
    q, k, v = (t.transpose(1, 2) for t in (inputs or qkv()))
    module = getattr(fast, kind)(q.shape[-1], feature_map, eps=eps)
    lengths = fast.LengthMask(torch.full((B,), N) if lengths is None else lengths, max_len=N)
    mask = fast.TriangularCausalMask(N) if "Causal" in kind else fast.FullMask(N)
    out = module(q, k, v, mask, lengths, lengths)
    return out.transpose(1, 2), module.feature_map


@fast_row("`from fast_transformers...`")
def test_fast_names(fast):
    modules = (
        "attention", "masking", "feature_maps", "builders", "events", "attention_registry", "causal_product",
        "recurrent.attention", "recurrent.transformers", "transformers",
    )  # fmt: skip
    for name in modules:
        original = imported(f"fast_transformers.{name}")
        ours = importlib.import_module(f"reassoc.compat.fast_transformers.{name}")
        assert ours.__name__.endswith(name) and vars(original)
    for name in ("LinearAttention", "CausalLinearAttention", "FullAttention", "AttentionLayer"):
        assert hasattr(importlib.import_module("reassoc.compat.fast_transformers.attention"), name)


@fast_row("queries `(N, L, H, E)`")
@fast_row("`LinearAttention(E)` with `FullMask(L)`")
@fast_row("`CausalLinearAttention(E)` with `TriangularCausalMask(L)`")
@pytest.mark.parametrize("causal", [False, True])
def test_fast_attention(fast, causal):
    theirs, _ = fast_attention(fast, "CausalLinearAttention" if causal else "LinearAttention")
    same(reassoc.linear_attention(*qkv(), "elu+1", causal=causal), theirs)


@fast_row("`key_lengths=LengthMask(lengths)`")
@pytest.mark.parametrize("causal", [False, True])
def test_fast_lengths(fast, causal):
    lengths = torch.tensor([N, 7])
    kind = "CausalLinearAttention" if causal else "LinearAttention"
    theirs, _ = fast_attention(fast, kind, lengths=lengths)
    mask = torch.arange(N) < lengths[:, None]
    same(reassoc.linear_attention(*qkv(), "elu+1", key_mask=mask, causal=causal), theirs)


@fast_row("`eps=1e-6` (its default)")
def test_fast_epsilon(fast):
    assert fast.LinearAttention(D).eps == 1e-6
    q, k, v = qkv()
    q, k = q - 9, k - 9  # features near e-9 and 64 keys: the epsilon is a good part of the denominator
    theirs, _ = fast_attention(fast, "LinearAttention", eps=1e-6, inputs=(q, k, v))
    # elu(x) + 1 near e-9 has lost 13 of float32's 24 bits.
    same(reassoc.linear_attention(q, k, v, "elu+1", eps=1e-6), theirs, 3e-3)
    assert (reassoc.linear_attention(q, k, v, "elu+1") - theirs).abs().max() > 0.01 * theirs.abs().max()


@fast_row("`elu_feature_map`")
def test_fast_elu(fast):
    x = normal(4, D)
    same(reassoc.feature_maps.make("elu+1", D)(x), fast.elu_feature_map(D)(x))


@fast_row("`Favor.factory(n_dims=2 * m)`")
@fast_row("buffer `omega`, `(E, m)`")
@fast_row("`softmax_temp=t`")
@pytest.mark.parametrize("temperature", [None, 0.3])
def test_fast_favor(fast, temperature):
    options = {"n_dims": 2 * M, "softmax_temp": temperature}
    theirs, made = fast_attention(fast, "LinearAttention", fast.Favor.factory(**options))
    assert made.omega.shape == (D, M)
    phi = PositiveFeatures(D, projections=made.omega.T, hyperbolic=True, scale=temperature)
    assert phi.feature_dim == 2 * M
    same(reassoc.linear_attention(*qkv(), phi), theirs)
    assert PositiveFeatures(D, M, hyperbolic=True).projections.shape == made.omega.T.shape


@fast_row("`RandomFourierFeatures.factory(n_dims=2 * m)`")
def test_fast_fourier(fast):
    made = fast.RandomFourierFeatures(D, n_dims=2 * M)
    made.new_feature_map("cpu")
    phi = TrigonometricFeatures(D, projections=made.omega.T, kernel="gaussian")
    q, k, _ = qkv()
    same(phi.query(q) @ phi.key(k).mT, made(q) @ made(k).mT)


@fast_row("`GeneralizedRandomFeatures.factory(n_dims=m)`")
def test_fast_generalized(fast):
    theirs, made = fast_attention(fast, "LinearAttention", fast.GeneralizedRandomFeatures.factory(n_dims=M))
    phi = GeneralizedFeatures(D, projections=made.omega.T, scale=1.0)
    assert GeneralizedFeatures(D, M).num_features == phi.num_features == M
    same(reassoc.linear_attention(*qkv(), phi), theirs)


@fast_row("`causal_dot_product(Q, K, V)`")
def test_fast_causal_product(fast):
    q, k, v = (t.contiguous() for t in qkv())
    mine = reassoc.linear_attention(q, k, v, "identity", normalize="none", causal=True)
    same(mine, fast.causal_dot_product(q, k, v))


@fast_row("recurrent attention and its state `[S, Z]`")
def test_fast_recurrent(fast):
    theirs = fast.RecurrentLinearAttention(D, eps=0.0)
    q, k, v = qkv()
    phi = reassoc.feature_maps.make("elu+1", D)
    memory, state = None, reassoc.AttentionState.zeros(phi, B, H, D)
    for i in range(5):
        out, memory = theirs(q[:, :, i], k[:, :, i], v[:, :, i], memory)
        mine = reassoc.step(*(t[:, :, i : i + 1] for t in (q, k, v)), phi, state)
        same(mine[:, :, 0], out)
    assert state.log_scale is None
    same(state.S, memory[0])
    same(state.z, memory[1])


@fast_row("`TransformerEncoderBuilder.from_kwargs(...)`")
def test_fast_builder(fast):
    options = {
        "n_layers": 2, "n_heads": 2, "query_dimensions": 8, "value_dimensions": 8,
        "feed_forward_dimensions": 32, "attention_type": "linear",
    }  # fmt: skip
    ours = importlib.import_module("reassoc.compat.fast_transformers.builders").TransformerEncoderBuilder
    theirs = fast.TransformerEncoderBuilder.from_kwargs(**options).get().eval()
    mine = ours.from_kwargs(**options, legacy="exact").get().eval()
    mine.load_state_dict(theirs.state_dict())
    same(mine(normal(2, 9, 16)), theirs(normal(2, 9, 16)))


@fast_row("MoLFormer's `RotateEncoderBuilder`")
def test_molformer(fast):
    """Its layers as its repository has them: the original's, with a rotation of queries and keys."""

    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2) / 8))

        def forward(self, x):
            angles = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq).repeat(1, 2)[:, None]
            first, second = x.chunk(2, -1)
            return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    class Layer(fast.AttentionLayer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.rotaryemb = Rotation()

        def forward(self, queries, keys, values, attn_mask, query_lengths, key_lengths):
            heads = self.n_heads
            q, k = self.query_projection(queries), self.key_projection(keys)
            q, k = (self.rotaryemb(t.unflatten(-1, (heads, -1))) for t in (q, k))
            v = self.value_projection(values).unflatten(-1, (heads, -1))
            given = (q, k, v, attn_mask, query_lengths, key_lengths)
            return self.out_projection(self.inner_attention(*given).flatten(2))

    class Builder(fast.TransformerEncoderBuilder):
        def _get_attention_layer_class(self):
            return Layer

    from reassoc.compat.fast_transformers import feature_maps
    from reassoc.compat.fast_transformers.rotary import RotaryEncoderBuilder

    sizes = {
        "n_layers": 2, "n_heads": 2, "query_dimensions": 8, "value_dimensions": 8, "activation": "gelu",
        "feed_forward_dimensions": 16, "attention_type": "linear",
    }  # fmt: skip
    phi = {"n_dims": 32, "deterministic_eval": True}
    theirs = Builder.from_kwargs(**sizes, feature_map=partial(fast.GeneralizedRandomFeatures, **phi)).get()
    x = normal(B, N, 16)
    theirs(x)  # the map is drawn in training
    mask = {"length_mask": fast.LengthMask(torch.tensor([N, 7]), max_len=N)}
    expected = theirs.eval()(x, **mask)
    for legacy in ("exact", None):
        phi_of_ours = partial(feature_maps.GeneralizedRandomFeatures, **phi)
        ours = RotaryEncoderBuilder.from_kwargs(**sizes, feature_map=phi_of_ours, legacy=legacy).get()
        ours.load_state_dict(theirs.state_dict())
        same(ours.eval()(x, **mask)[0], expected[0])
        same(ours(x, **mask)[1, :7], expected[1, :7])
        theirs.load_state_dict(ours.state_dict())


# ---------------------------------------------------------------------------------------------------------
# PyTorch Geometric: see also test_torch_geometric.py
# ---------------------------------------------------------------------------------------------------------


@geometric_row("`torch_geometric.nn.attention.PerformerAttention`")
@geometric_row('`GPSConv(..., attn_type="performer")`')
@geometric_row("buffer `projection_matrix`, `(m, d)`, rows of norm 1")
@geometric_row("`mask` of `to_dense_batch`")
def test_geometric():
    original = imported("torch_geometric.nn.attention.performer")
    theirs = original.PerformerProjection(D)
    torch.testing.assert_close(theirs.projection_matrix.norm(dim=1), torch.ones(theirs.num_rows))
    phi = GeneralizedFeatures(D, projections=theirs.projection_matrix, scale=1.0)
    # Its 0.001 in every feature is what separates the two.
    same(reassoc.linear_attention(*qkv(), phi), theirs(*qkv()), 0.02)
    ours = importlib.import_module("reassoc.compat.torch_geometric")
    attention = original.PerformerAttention(H * D, H, D)
    x, mask = normal(B, N, H * D), torch.arange(N) < torch.tensor([[N], [5]])
    before, model = attention(x, mask), nn.Sequential(attention)
    assert ours.revive(model) == 1
    same(attention(x, mask)[0], before[0], 0.02)
    same(attention(x, mask)[1, :5], attention(x[1:, :5])[0])
    assert not torch.allclose(attention(x, mask)[1, :5], before[1, :5], rtol=0.02)


# ---------------------------------------------------------------------------------------------------------
# flash-linear-attention: its reference forms, and the signatures of its operations (which need a GPU)
# ---------------------------------------------------------------------------------------------------------


def arguments(family, name):
    """Name -> default of an operation, read from its source: importing it needs Triton."""
    wanted = f"fla/ops/{family}/chunk.py"
    [file] = [f for f in importlib.metadata.files("fla-core") if f.as_posix() == wanted]
    tree = ast.parse(Path(file.locate()).read_text(encoding="utf-8"))
    [found] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    names = [a.arg for a in found.args.args]
    defaults = [ast.literal_eval(d) for d in found.args.defaults]
    return dict(zip(names, [...] * (len(names) - len(defaults)) + defaults, strict=True))


OPERATIONS = {
    # family: gates (name of ours -> name there, shape), its reference, rule
    "simple_gla": ({"g": (B, H, N)}, "naive_recurrent_simple_gla", lambda g: rules.Decay(g)),
    "gla": ({"g": (B, H, N, D)}, "naive_recurrent_gla", lambda g: rules.Decay(g)),
    "delta_rule": ({"beta": (B, H, N)}, "delta_rule_recurrence", lambda beta: rules.Delta(beta)),
    "gated_delta_rule": (
        {"g": (B, H, N), "beta": (B, H, N)}, "naive_recurrent_gated_delta_rule",
        lambda g, beta: rules.GatedDelta(beta, g),
    ),
    "kda": (
        {"g": (B, H, N, D), "beta": (B, H, N)}, "naive_recurrent_kda",
        lambda g, beta: rules.GatedDelta(beta, g),
    ),
}  # fmt: skip


def fla_inputs(gates, heads=H, value_heads=H):
    q, k, v = (
        normal(B, heads, N, D),
        normalize(normal(B, heads, N, D, seed=1), dim=-1),
        normal(B, value_heads, N, D),
    )
    made = {}
    for name, shape in gates.items():
        x = normal(shape[0], value_heads, *shape[2:], seed=3)
        made[name] = x.sigmoid() if name == "beta" else logsigmoid(x + 2)
    return q, k, v, made


def theirs_of(family, q, k, v, gates):
    naive = getattr(fla(family), OPERATIONS[family][1])
    if family == "delta_rule":  # the one reference that has heads before tokens
        return naive(q, k, v, **gates, output_final_state=True)
    if family == "gla":
        gates = {"gk": gates["g"]}
    gates = {name: t.transpose(1, 2) for name, t in gates.items()}
    out, state = naive(*(t.transpose(1, 2) for t in (q, k, v)), **gates, output_final_state=True)
    return out.transpose(1, 2), state


def ours_of(q, k, v, rule):
    q = q * D**-0.5
    return reassoc.linear_attention(
        q, k, v, "identity", rule=rule, normalize="none", causal=True, return_state=True
    )


@fla_row("`chunk_linear_attn(q, k, v)`, `normalize=True`")
@fla_row("`chunk_linear_attn(..., normalize=False)`")
def test_fla_linear():
    given = arguments("linear_attn", "chunk_linear_attn")
    assert given["normalize"] is True and given["scale"] is None
    q, k, v = (t.abs() for t in qkv())  # features: a denominator of both signs has no digits to compare
    naive = partial(fla("linear_attn").naive_recurrent_linear_attn, *(t.transpose(1, 2) for t in (q, k, v)))
    mine = reassoc.linear_attention(q, k, v, "identity", causal=True)
    same(mine, naive(normalize=True)[0].transpose(1, 2))
    mine = reassoc.linear_attention(q * D**-0.5 * 1e-6, k * 1e-6, v, "identity", causal=True, eps=1e-10)
    small = fla("linear_attn").naive_recurrent_linear_attn(
        *(t.transpose(1, 2) for t in (q * 1e-6, k * 1e-6, v)), normalize=True
    )
    same(mine, small[0].transpose(1, 2))
    mine, state = ours_of(q, k, v, None)
    out, memory = naive(output_final_state=True)
    same(mine, out.transpose(1, 2))
    same(state.S, memory)


@fla_row("`chunk_simple_gla(..., g=g)`")
@fla_row("`chunk_simple_gla(..., g_gamma=g)`")
@fla_row("`chunk_gla(..., g=g)`")
@fla_row("`chunk_delta_rule(..., beta=b)`")
@fla_row("`chunk_gated_delta_rule(..., g=g, beta=b)`")
@fla_row("`chunk_kda(..., g=g, beta=b)`")
@pytest.mark.parametrize("family", OPERATIONS)
def test_fla_operations(family):
    gates, _, rule = OPERATIONS[family]
    named = arguments(family, f"chunk_{family}")
    assert {"q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens", *gates} <= set(named)
    assert named["scale"] is None
    q, k, v, made = fla_inputs(gates)
    mine, state = ours_of(q, k, v, rule(**made))
    out, memory = theirs_of(family, q, k, v, made)
    same(mine, out)
    same(state.S, memory)
    if family == "simple_gla":
        assert "g_gamma" in named
        constant = torch.tensor([-0.1, -0.01, -1.0])
        same(
            ours_of(q, k, v, rules.Decay(constant))[0],
            theirs_of(family, q, k, v, {"g": constant[None, :, None].expand(B, H, N)})[0],
        )


@fla_row("`scale=None`: `K ** -0.5`")
@fla_row("`use_qk_l2norm_in_kernel=True`")
def test_fla_scale_and_norms():
    assert arguments("delta_rule", "chunk_delta_rule")["use_qk_l2norm_in_kernel"] is False
    assert arguments("gated_delta_rule", "chunk_gated_delta_rule")["use_qk_l2norm_in_kernel"] is False
    q, k, v, made = fla_inputs({"g": (B, H, N)})
    naive = fla("simple_gla").naive_recurrent_simple_gla
    given = [t.transpose(1, 2) for t in (q, k, v, made["g"])]
    same(naive(*given, scale=D**-0.5)[0], naive(*given)[0])
    # Its norm adds 1e-6 to the squared sum, torch's divides by at least 1e-12: the same but for tiny vectors.
    x = normal(10, D)
    same(x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), normalize(x, dim=-1))


@fla_row("HV value heads for H heads of q and k")
@pytest.mark.parametrize("family", ["kda"])
def test_fla_grouped_values(family):
    gates, _, rule = OPERATIONS[family]
    q, k, v, made = fla_inputs(gates, heads=H, value_heads=2 * H)
    out, memory = theirs_of(family, q, k, v, made)
    q, k = (t.repeat_interleave(2, 1) for t in (q, k))
    mine, state = ours_of(q, k, v, rule(**made))
    same(mine, out)
    same(state.S, memory)


@fla_row("`cu_seqlens`")
@fla_row("`final_state` `(B, H, K, V)`")
def test_fla_packed():
    gates, _, rule = OPERATIONS["simple_gla"]
    q, k, v, made = fla_inputs(gates)
    q, k, v, g = (t[:1] for t in (q, k, v, made["g"]))
    bounds = torch.tensor([0, 10, N])
    mine, state = reassoc.linear_attention(
        q * D**-0.5, k, v, "identity", rule=rule(g), normalize="none", causal=True, cu_seqlens=bounds,
        return_state=True,
    )  # fmt: skip
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        part = [t[:, :, start:stop] for t in (q, k, v, g)]
        out, memory = theirs_of("simple_gla", *part[:3], {"g": part[3]})
        same(mine[:, :, start:stop], out)
        same(state.S[i : i + 1], memory)


# ---------------------------------------------------------------------------------------------------------
# What was wrong: the figures of the page, from the originals
# ---------------------------------------------------------------------------------------------------------


def test_the_future_leaks_in_performer():
    module = imported("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    theirs = module.FastAttention(16, 32, causal=True)
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    later = k.clone()
    later[:, :, -1] *= 10
    before, after = theirs(q, k, v)[:, :, :-1], theirs(q, later, v)[:, :, :-1]
    assert (after - before).abs().max() / before.abs().max() > 0.5
    phi = features(theirs)
    before, after = (reassoc.linear_attention(q, t, v, phi, causal=True)[:, :, :-1] for t in (k, later))
    same(after, before)


@pytest.mark.parametrize(("norm", "least", "most"), [(1, 0.1, 0.6), (2, 0.9, 1.2), (3, 0.9, 1.2)])
def test_epsilons_drown_the_signal_in_performer(norm, least, most):
    module = imported("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    theirs = module.FastAttention(16, 32)
    q, k, v = (torch.randn(1, 2, 64, 16) * (norm if i < 2 else 1) for i in range(3))
    found, clean = theirs(q, k, v), reassoc.linear_attention(q, k, v, features(theirs))
    assert least < (found - clean).norm() / clean.norm() < most
    mean = v.mean(2, keepdim=True)
    assert ((found - mean).norm() / (mean.expand_as(found)).norm() < 1e-5) == (norm == 3)


def test_masks_hide_values_only_in_performer():
    module = imported("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    theirs = module.SelfAttention(32, heads=2, dim_head=16, nb_features=32).eval()
    x = torch.cat([torch.randn(1, 5, 32), torch.zeros(1, 15, 32)], 1)
    padded, alone = theirs(x, mask=torch.arange(20)[None] < 5)[:, :5], theirs(x[:, :5])
    assert 0.5 < (padded - alone).norm() / alone.norm() < 0.9


def test_fast_redraws_in_evaluation(fast):
    made = fast.LinearAttention(D, fast.Favor.factory(n_dims=64)).eval()
    q, k, v = (t.transpose(1, 2) for t in qkv())
    lengths = fast.LengthMask(torch.full((B,), N))
    one, two = (made(q, k, v, fast.FullMask(N), lengths, lengths) for _ in range(2))
    assert (one - two).norm() / one.norm() > 0.5


@pytest.mark.parametrize("stabilize", [False, True])
def test_fast_denominators_vanish(fast, stabilize):
    torch.manual_seed(0)
    made = fast.LinearAttention(D, fast.Favor.factory(n_dims=64, stabilize=stabilize))
    norm = 2 if stabilize else 3
    q, k = (normal(B, N, H, D, seed=i) * norm for i in range(2))
    lengths, ones = fast.LengthMask(torch.full((B,), N)), torch.ones(B, N, H, D)
    found = made(q, k, ones, fast.FullMask(N), lengths, lengths)
    if stabilize:
        assert found.median() < 1e-20
    else:
        assert found.min() < 1e-3
    phi = PositiveFeatures(D, projections=made.feature_map.omega.T, hyperbolic=True)
    clean = reassoc.linear_attention(q.transpose(1, 2), k.transpose(1, 2), ones.transpose(1, 2), phi)
    same(clean, ones.transpose(1, 2))


def test_the_future_leaks_in_fast_with_stabilize(fast):
    torch.manual_seed(0)
    made = fast.CausalLinearAttention(D, fast.Favor.factory(n_dims=64, stabilize=True, redraw=10**9))
    q, k, v = (t.transpose(1, 2) for t in qkv())
    later = k.clone()
    later[:, -1] *= 3
    lengths = fast.LengthMask(torch.full((B,), N))
    before, after = (
        made(q, t, v, fast.TriangularCausalMask(N), lengths, lengths)[:, :-1] for t in (k, later)
    )
    assert (after - before).abs().max() / before.abs().max() > 0.9


def test_directions_have_a_preferred_sign():
    module = imported("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    signs = [float(module.gaussian_orthogonal_random_matrix(4, 4)[0, 0]) > 0 for _ in range(200)]
    assert sum(signs) == 0
    rows = torch.stack([module.gaussian_orthogonal_random_matrix(16, 16) for _ in range(2000)])
    ours = torch.stack([reassoc.feature_maps.orthogonalize(torch.randn(16, 16)) for _ in range(2000)])
    z = torch.full((16,), 0.5)
    means = [float((w @ s).exp().mean() / math.exp(2)) for w in (rows, ours) for s in (z, -z)]
    # 32,000 rows, each of relative variance e^4 - 1: a standard error of 0.04 for independent ones.
    assert means[0] < 0.8 and means[1] > 1.12
    assert all(abs(mean - 1) < 0.16 for mean in means[2:])


def test_directions_have_a_preferred_sign_in_fast():
    maps = imported("fast_transformers.feature_maps.fourier_features")
    torch.manual_seed(0)
    signs = []
    for _ in range(200):
        omega = torch.zeros(4, 4)
        maps.orthogonal_random_matrix_(omega)
        signs.append(float(omega[0, 0]) > 0)
    assert sum(signs) == 0


def test_rows_of_one_norm_estimate_another_kernel():
    torch.manual_seed(0)
    rows = torch.stack(
        [reassoc.feature_maps.orthogonalize(torch.randn(16, 16), "sqrt_dim") for _ in range(2000)]
    )
    z = normalize(torch.randn(16), dim=0) * 3
    # The mean for rows of norm sqrt(d): 0F1(; d/2; d |z|^2 / 4) = 0.49 e^(9/2) at d = 16.
    assert abs((rows @ z).exp().mean() / math.exp(4.5) - 0.49) < 0.03


def test_elu_has_no_tail_in_fast(fast):
    x = torch.tensor([[-10.0, -20.0, -30.0, -40.0]])
    theirs = fast.elu_feature_map(4)(x)
    assert theirs[0, 1] == 0 and theirs[0, 0] > 0
    same(reassoc.feature_maps.make("elu+1", 4)(x), x.exp())
