"""Against pytorch-fast-transformers 0.4.0 itself, where benchmarks/build_fast_transformers.sh built it."""

import inspect

import fast_cases
import pytest
import torch
from fast_cases import ORIGINAL, OURS, module

pytest.importorskip("fast_transformers", reason="built by benchmarks/build_fast_transformers.sh")
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.qr is deprecated"),  # the original's draw
    pytest.mark.filterwarnings("ignore:Favor.stabilize=True. takes axis 1"),
    pytest.mark.filterwarnings("ignore:Favor.stabilize is set to True"),  # the original's own words for it
]
BOTH = (ORIGINAL, OURS)
DRAWN = {name: phi for name, phi in fast_cases.MAPS.items() if phi is not None}


def close(got, want):
    """Within the suite's budget of the largest entry."""
    assert got.shape == want.shape
    error = (got - want).abs().max() / want.abs().max()
    assert error <= fast_cases.RELATIVE, f"{error:.2e} of the largest entry"


@pytest.mark.parametrize("name", fast_cases.CASES)
def test_models(name):
    """Outputs, states and gradients; weights load strictly both ways."""
    case = fast_cases.CASES[name]
    theirs, ours = (fast_cases.build(package, case) for package in BOTH)
    given = fast_cases.inputs(case)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert [n for n, _ in theirs.named_parameters()] == [n for n, _ in ours.named_parameters()]
    want = fast_cases.run(ORIGINAL, theirs, case, given)
    fast_cases.assert_repeats(fast_cases.run(OURS, ours, case, given), want)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_draws_come_at_the_same_calls_and_are_the_same(name, training, fixed):
    """From one seed: ``redraw=2`` draws at calls 1, 3, ...; in evaluation too, unless deterministic_eval."""
    kind, options = DRAWN[name]
    options = options | {"redraw": 2, "deterministic_eval": fixed}
    drawn = []
    for package in BOTH:
        exact = {"legacy": "exact"} if package == OURS else {}
        phi = getattr(module(package, "feature_maps"), kind).factory(**options, **exact)(8).train(training)
        torch.manual_seed(5)
        omegas = []
        for _ in range(5):
            phi.new_feature_map("cpu")
            omegas.append(phi.omega.clone())
        drawn.append(omegas)
    for theirs, ours in zip(*drawn, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("legacy", [None, "exact"])
def test_maps_alone(name, legacy):
    """Features of the same matrix; the clean map leaves out the stabilizer, and nothing else."""
    kind, options = DRAWN[name]
    theirs = getattr(module(ORIGINAL, "feature_maps"), kind)(8, **options)
    theirs.train().new_feature_map("cpu")
    ours = getattr(module(OURS, "feature_maps"), kind)(8, **options, legacy=legacy)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    if legacy is None and getattr(theirs, "stabilize", False):
        theirs.stabilize = False
    x = torch.randn(2, 30, 3, 8)
    close(ours(x), theirs(x))


def test_elu_map_alone():
    """Digit for digit."""
    x = torch.randn(2, 30, 3, 8) * 5
    maps = (module(package, "feature_maps").elu_feature_map(8) for package in BOTH)
    theirs, ours = (phi(x) for phi in maps)
    assert torch.equal(theirs, ours)


def test_causal_dot_product():
    """Values and gradients."""
    found = []
    for package in BOTH:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, 50, d, requires_grad=True) for d in (8, 8, 5))
        out = module(package, "causal_product").causal_dot_product(q, k, v)
        out.square().sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    for theirs, ours in zip(*found, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_causal_attention_with_more_keys_than_queries(legacy):
    """Keys that no query sees are left out."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 7, 3, 8), torch.randn(2, 11, 3, 8), torch.randn(2, 11, 3, 5)
    found = []
    for package in BOTH:
        masking = module(package, "masking")
        more = {"legacy": legacy} if package == OURS else {}
        attention = module(package, "attention").CausalLinearAttention(8, **more)
        lengths = masking.LengthMask(torch.tensor([11, 4]))
        found.append(attention(q, k, v, masking.TriangularCausalMask(7), None, lengths))
    close(found[1], found[0])


def test_queries_beyond_the_keys_see_all_of_them():
    """The original pads the keys but not the values, and reads past their end: compared with padded ones."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 11, 3, 8), torch.randn(2, 7, 3, 8), torch.randn(2, 7, 3, 5)
    masking, ours = module(ORIGINAL, "masking"), module(OURS, "masking")
    padded = torch.cat([v, v.new_zeros(2, 4, 3, 5)], 1)
    theirs = module(ORIGINAL, "attention").CausalLinearAttention(8)
    want = theirs(
        q, k, padded, masking.TriangularCausalMask(11), None, masking.LengthMask(torch.tensor([7, 3]), 7)
    )
    for legacy in (None, "exact"):
        attention = module(OURS, "attention").CausalLinearAttention(8, legacy=legacy)
        lengths = ours.LengthMask(torch.tensor([7, 3]), 7)
        close(attention(q, k, v, ours.TriangularCausalMask(11), None, lengths), want)


def test_masks():
    """Every form of every kind of mask."""
    made = []
    for package in BOTH:
        m = module(package, "masking")
        custom = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)) > 0.5
        made.append(
            [
                m.FullMask(3), m.FullMask(3, 4), m.FullMask(N=3, M=2), m.FullMask(custom),
                m.FullMask(mask=torch.ones(2, 2, dtype=torch.bool).tril()),
                m.LengthMask(torch.tensor([3, 1, 2])), m.LengthMask(torch.tensor([3, 1]), max_len=5),
                m.LengthMask(torch.tensor([2, 2])), m.TriangularCausalMask(4),
            ]
        )  # fmt: skip
    forms = ("bool_matrix", "float_matrix", "additive_matrix", "additive_matrix_finite")
    for theirs, ours in zip(*made, strict=True):
        for form in forms:
            assert torch.equal(getattr(ours, form), getattr(theirs, form)), form
        assert ours.shape == theirs.shape
        assert ours.all_ones == bool(theirs.all_ones)
        assert ours.lower_triangular == bool(theirs.lower_triangular)
        try:
            want = theirs.lengths
        except ValueError:
            with pytest.raises(ValueError, match="has no lengths"):
                _ = ours.lengths
        else:
            assert torch.equal(ours.lengths, want)


def test_events_reach_listeners_alike():
    """Queries, keys, values; and weights of softmax, where somebody listens."""
    found = []
    for package in BOTH:
        events = module(package, "events")
        heard = []
        dispatcher = events.EventDispatcher()
        model = fast_cases.build(package, fast_cases.CASES["full"], event_dispatcher=dispatcher)
        dispatcher.listen(events.QKVEvent, lambda e, to=heard: to.extend([e.queries, e.keys, e.values]))
        dispatcher.listen(events.AttentionEvent, lambda e, to=heard: to.append(e.attention_matrix))
        model(fast_cases.inputs(fast_cases.CASES["full"])["x"])
        found.append(heard)
    assert len(found[0]) == len(found[1]) == 8
    for theirs, ours in zip(*found, strict=True):
        close(ours, theirs)


def test_weights_of_torch_s_encoder():
    """The mapper gives the same names and numbers."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, dim_feedforward=8)
    state = {f"layers.0.{k}": v for k, v in layer.state_dict().items()} | {"a.softmax_temp": torch.ones(1)}
    theirs, ours = (module(p, "weight_mapper").PytorchMapper().map(state) for p in BOTH)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[k], ours[k]) for k in theirs)


def test_names_and_signatures():
    """Whatever a module there defines is here, with its parameters in the same order; more may follow."""
    elsewhere = module(OURS, "attention")._elsewhere.CLASSES
    for name in (
        "attention", "attention_registry", "builders", "builders.base", "builders.transformer_builders",
        "events", "events.filters", "feature_maps", "feature_maps.base", "feature_maps.fourier_features",
        "masking", "recurrent.attention", "recurrent.transformers", "transformers", "utils",
        "weight_mapper", "causal_product",
    ):  # fmt: skip
        theirs, ours = module(ORIGINAL, name), module(OURS, name)
        for public, thing in vars(theirs).items():
            if public.startswith("_") or not getattr(thing, "__module__", "").startswith(theirs.__name__):
                continue
            if public in elsewhere or (name == "causal_product" and public != "causal_dot_product"):
                continue
            assert hasattr(ours, public), f"{name}.{public}"
            if inspect.isclass(thing):
                for method in ("__init__", "forward"):
                    if method in vars(thing):
                        want = list(inspect.signature(getattr(thing, method)).parameters)
                        got = list(inspect.signature(getattr(getattr(ours, public), method)).parameters)
                        assert got[: len(want)] == want, f"{name}.{public}.{method}"
