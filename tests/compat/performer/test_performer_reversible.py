"""Reversible networks, and generation where no original is needed."""

import pytest
import torch
from performer_cases import SIZES, distance, padded

import reassoc.compat.performer_pytorch as ours


def layers(depth=3, dropout=0.0):
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        torch.nn.ModuleList([ours.FeedForward(8, dropout=dropout), ours.FeedForward(8, dropout=dropout)])
        for _ in range(depth)
    )


def plain(blocks, x):
    """The same equations, with everything kept."""
    first, second = x, x
    for f, g in blocks:
        first = first + f(second)
        second = second + g(first)
    return first + second


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_the_equations(training):
    blocks = layers()
    network = ours.ReversibleSequence(blocks).double().train(training)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    wanted = [x, *network.parameters()]
    weight = torch.randn(2, 5, 8, dtype=torch.float64)
    results = []
    for function in (network, lambda x: plain(blocks, x)):
        out = function(x)
        results.append([out, *torch.autograd.grad((out * weight).sum(), wanted)])
    for got, expected in zip(*results, strict=True):
        assert distance(got, expected) < 1e-12


def test_the_backward_pass_repeats_the_random_numbers_and_disturbs_none():
    network = ours.ReversibleSequence(layers(dropout=0.5)).double().train()
    x = torch.randn(1, 4, 8, dtype=torch.float64, requires_grad=True)

    def run(x):
        torch.manual_seed(1)
        return network(x)

    assert torch.autograd.gradcheck(run, x)
    out = run(x)
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_kept_between_the_layers():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        ours.ReversibleSequence(layers(12))(torch.randn(1, 5, 8, requires_grad=True))
    assert len(kept) == 2


def test_a_context_that_the_encoder_made_gets_its_gradient_once():
    torch.manual_seed(0)
    options = {**SIZES, "cross_attend": True}
    model = ours.PerformerLM(**options, reversible=True).double()
    source = torch.randn(1, 6, 32, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(20, (1, 9))

    def run(source):
        return model(tokens, context=source.tanh(), context_mask=padded(1, 6, 2)).sum()

    step = torch.randn_like(source) * 1e-5
    gradient = torch.autograd.grad(run(source), source)[0]
    with torch.no_grad():
        slope = (run(source + step) - run(source - step)) / 2
    assert abs((gradient * step).sum() - slope) < 1e-6 * abs(slope)


def test_routes_of_another_depth_are_refused():
    for kind in (ours.ReversibleSequence, ours.SequentialSequence):
        with pytest.raises(ValueError, match="must name 3 layers, got 2"):
            kind(layers(3), args_route={"mask": ((True, False),) * 2})


def test_generation_stops_and_leaves_the_mode_alone():
    torch.manual_seed(0)
    model = ours.AutoregressiveWrapper(ours.PerformerLM(**SIZES, causal=True)).train()
    start = torch.randint(20, (3,))
    out = model.generate(start, 70, filter_thres=0.99)  # top_k of less than one logit still leaves one
    assert out.shape == (70,) and model.net.training
    assert torch.equal(model.generate(start, 70, filter_thres=0.99), out)
    assert len(model.generate(start, 70, eos_token=int(out[4]), filter_thres=0.99)) <= 5


def test_repetition_is_made_less_likely_in_its_own_sequence():
    logits = torch.tensor([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]])
    out = ours.repetition_penalty_fn(logits, torch.tensor([[0, 1], [2, 2]]), theta=2.0)
    assert torch.equal(out, torch.tensor([[1.0, -4.0, 1.0], [2.0, -2.0, 0.5]]))


def test_generation_puts_the_encoder_in_evaluation():
    options = {f"{s}_{key}": value for s in ("enc", "dec") for key, value in SIZES.items() if key != "dim"}
    model = ours.PerformerEncDec(dim=32, **options).train()
    model.generate(torch.randint(20, (1, 6)), torch.randint(20, (1, 1)), 2)
    assert model.enc.training and model.enc.performer.proj_updater.calls_since_last_redraw == 0
