"""PyTorch Geometric's Performer: a masked node is no key; `legacy="exact"` is the original, all numbers."""

import sys

import pytest
import torch
from torch import nn

from reassoc.compat import torch_geometric as ours

B, N, CHANNELS, HEADS, SIZE = 3, 20, 12, 2, 6


@pytest.fixture()
def original():
    return pytest.importorskip("torch_geometric.nn.attention").PerformerAttention


def nodes(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(legacy=None, seed=0, **options):
    torch.manual_seed(seed)
    return ours.PerformerAttention(CHANNELS, HEADS, SIZE, legacy=legacy, **options)


def padded(count=15):
    """Nodes, and a mask under which the second graph has 5 real ones and the third none less than all."""
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, N - count :] = False
    return nodes(B, N, CHANNELS), mask


def same(found, expected, relative=1e-5):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= relative * expected.abs().max()


def by_formula(module, x, mask=None):
    """Weights of every pair, from the definition: ReLU features, real keys only."""

    def split(linear):
        return linear(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2).double()

    matrix = module.fast_attn.projection_matrix.double()
    weights = (split(module.q) @ matrix.T).relu() @ (split(module.k) @ matrix.T).relu().mT
    if mask is not None:
        weights = weights * mask[:, None, None]
    out = (weights / weights.sum(-1, keepdim=True)).nan_to_num(0.0) @ split(module.v)
    return module.attn_out(out.transpose(1, 2).flatten(2).float())


# ---------------------------------------------------------------------------------------------------------
# Without the original
# ---------------------------------------------------------------------------------------------------------


def test_the_original_is_not_needed():
    code = "import reassoc.compat.torch_geometric, sys; print('torch_geometric' in sys.modules)"
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("masked", [False, True])
def test_the_clean_operator_is_the_definition(masked):
    module, (x, mask) = attention(), padded()
    mask = mask if masked else None
    # float32 against float64 of the same features: rounding of the projections, well below 1e-5.
    same(module(x, mask), by_formula(module, x, mask))


def test_a_padded_graph_gives_what_it_gives_alone():
    module, (x, mask) = attention(), padded()
    alone = module(x[1:2, :5])
    for filler in (0.0, 100.0):
        x[1, 5:] = filler
        same(module(x, mask)[1:2, :5], alone)
    exact = attention("exact")
    x[1, 5:] = 0.0  # what to_dense_batch writes
    far = (exact(x, mask)[1:2, :5] - exact(x[1:2, :5])).abs().max() / alone.abs().max()
    assert far > 1e-4  # the original's fault, repeated: padding keys stay in the denominator


def test_masked_nodes_may_hold_nan():
    module, (x, mask) = attention(), padded()
    x[1, 5:] = float("nan")
    same(module(x, mask)[1:2, :5], module(x[1:2, :5]))


def test_a_graph_without_nodes_gives_the_bias():
    module, (x, mask) = attention(), padded()
    mask[2] = False
    assert torch.equal(module(x, mask)[2], module.attn_out.bias.expand(N, -1))


def test_masked_nodes_get_no_gradient():
    module, (x, mask) = attention(), padded()
    module(x.requires_grad_(), mask)[mask].sum().backward()
    assert torch.equal(x.grad[~mask], torch.zeros_like(x.grad[~mask]))


def test_two_calls_agree_and_a_redraw_does_not():
    module, (x, mask) = attention(), padded()
    before = module(x, mask)
    assert torch.equal(module(x, mask), before)
    kept = module.fast_attn.projection_matrix
    module.redraw_projection_matrix()
    assert module.fast_attn.projection_matrix is kept
    assert not torch.allclose(module(x, mask), before)


@pytest.mark.parametrize("legacy", [None, "exact"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_projections_are_unit_rows_orthogonal_in_blocks(legacy, size):
    torch.manual_seed(1)
    matrix = ours.PerformerProjection(size, legacy=legacy).projection_matrix
    assert matrix.shape == (max(1, int(size * torch.tensor(float(size)).log())), size)
    for block in matrix.split(size):
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)))


def test_new_directions_have_no_preferred_sign():
    torch.manual_seed(2)
    # LAPACK makes the first entry of the first row negative for every matrix; 64 fair coins never do.
    signs = {legacy: [ours.PerformerProjection(4, legacy=legacy).projection_matrix[0, 0].sign().item()
                      for _ in range(64)] for legacy in (None, "exact")}  # fmt: skip
    assert len(set(signs["exact"])) == 1
    assert 10 < signs[None].count(1.0) < 54


def test_any_kernel_is_taken():
    # An exponential of projections is never zero, so nothing is undefined and the definition is plain.
    module, (x, mask) = attention(kernel=torch.exp), padded()
    q, k, v = (f(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for f in (module.q, module.k, module.v))
    matrix = module.fast_attn.projection_matrix
    weights = ((q @ matrix.T).exp() @ (k @ matrix.T).exp().mT) * mask[:, None, None]
    out = weights / weights.sum(-1, keepdim=True) @ v
    same(module(x, mask), module.attn_out(out.transpose(1, 2).flatten(2)))


def test_half_precision_and_double():
    x, mask = padded()
    module = attention()
    expected = module(x, mask)
    same(module.double()(x.double(), mask).float(), expected)
    # bfloat16 keeps 8 bits: 2^-8 each in projections, features, sums and the output.
    same(module.bfloat16()(x.bfloat16(), mask).float(), expected, 4 * 2**-8)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"channels": 7}, "channels"), ({"heads": 0}, "heads"), ({"legacy": "old"}, "legacy"),
     ({"head_channels": 0}, "num_cols")],
)  # fmt: skip
def test_mistakes_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        ours.PerformerAttention(**{"channels": CHANNELS, "heads": HEADS, **options})


def test_a_mask_is_of_booleans():
    x, mask = padded()
    with pytest.raises(TypeError, match="key_mask"):
        attention()(x, mask.float())


# ---------------------------------------------------------------------------------------------------------
# Against the original
# ---------------------------------------------------------------------------------------------------------


def pair(original, legacy="exact", **options):
    torch.manual_seed(3)
    theirs = original(CHANNELS, HEADS, **options)
    mine = ours.PerformerAttention(CHANNELS, HEADS, legacy=legacy, **options)
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    return theirs, mine


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"head_channels": SIZE}, {"head_channels": None}, {"kernel": nn.Sigmoid()}, {"kernel": nn.ELU()},
     {"qkv_bias": True, "attn_out_bias": False}],
    ids=str,
)  # fmt: skip
def test_exact_is_the_original_in_values_and_gradients(original, options, masked):
    theirs, mine = pair(original, **options)
    x, mask = padded()
    mask = mask if masked else None
    gradient = nodes(B, N, CHANNELS, seed=4)
    if isinstance(options.get("kernel"), nn.ELU):
        # Its features have both signs, so denominators cancel: in float32 neither has digits to compare.
        theirs, mine, x, gradient = theirs.double(), mine.double(), x.double(), gradient.double()
    found = []
    for module in (theirs, mine):
        leaf = x.clone().requires_grad_()
        output = module(leaf, mask)
        (output * gradient).sum().backward()
        found.append([output, leaf.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        same(b, a)


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_same_names_shapes_and_signature(original, legacy):
    import inspect

    theirs, mine = pair(original, legacy)
    assert [n for n, _ in mine.named_modules()] == [
        n for n, _ in theirs.named_modules() if n != "kernel"
    ] or ({n for n, _ in mine.named_modules()} == {n for n, _ in theirs.named_modules()})
    for function in ("__init__", "forward"):
        expected = list(inspect.signature(getattr(original, function)).parameters)
        assert (
            list(inspect.signature(getattr(ours.PerformerAttention, function)).parameters)[: len(expected)]
            == expected
        )


def graphs(seed=5):
    """Two graphs of 4 and 30 nodes: nodes, edges, graph of each."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(n, (2, 3 * n), generator=generator) for n in (4, 30))
    return nodes(34, CHANNELS, seed=seed), torch.cat([first, second + 4], 1), torch.tensor([0] * 4 + [1] * 30)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch_geometric's own, on import
def test_gps_layers_are_revived_in_place(original):
    from torch_geometric.nn import GPSConv

    torch.manual_seed(6)
    model = nn.Sequential(GPSConv(CHANNELS, None, heads=HEADS, norm=None, attn_type="performer")).eval()
    x, edges, batch = graphs()
    theirs, names = model[0](x, edges, batch), list(model.state_dict())
    assert ours.revive(model, legacy="exact") == 1
    same(model[0](x, edges, batch), theirs)
    assert ours.revive(model) == 1 and list(model.state_dict()) == names
    together = model[0](x, edges, batch)
    alone = model[0](x[:4], edges[:, :12], batch[:4])
    same(together[:4], alone)
    assert (theirs[:4] - together[:4]).abs().max() > 1e-3  # attention is there, and was wrong
    model[0].reset_parameters()
    assert isinstance(model[0].attn, original)


def test_nothing_to_revive(original):
    assert ours.revive(nn.Linear(2, 2)) == 0
