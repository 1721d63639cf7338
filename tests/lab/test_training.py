"""The training step that the experiments share."""

import itertools
import math

import pytest
import torch

from reassoc.lab._training import LAST, optimizer, schedule, update


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_only_matrices_decay():
    layer = model()
    adam = optimizer(layer, 0.1, 0.5)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    adam.step()
    # AdamW: p - lr * decay * p, and no gradient to add to it.
    torch.testing.assert_close(layer.weight, before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(layer.bias, before["bias"])


def test_the_schedule_rises_then_falls_to_a_tenth():
    rates = [schedule(step, 100, 10) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (n + 1) for n in range(10)])
    assert rates[10] == 1 and rates[55] == pytest.approx((1 + LAST) / 2)
    assert all(b < a for a, b in itertools.pairwise(rates[10:])) and LAST < rates[-1] < LAST + 0.01
    assert schedule(0, 1, 0) == 1


def test_a_step_is_clipped_and_tells_the_norm():
    layer, same = model(), model()
    x = torch.ones(1, 3)
    plain, clipped = (torch.optim.SGD(part.parameters(), lr=1.0) for part in (layer, same))
    norm = update(layer, plain, 100 * layer(x).sum(), lr=0.5, clip=math.inf)
    assert norm == pytest.approx(100 * 8**0.5)  # weights and biases: 8 partial derivatives of 100
    assert update(same, clipped, 100 * same(x).sum(), lr=0.5, clip=1.0) == pytest.approx(norm)
    start = model()
    torch.testing.assert_close(start.bias - layer.bias, torch.full((2,), 50.0))
    # Clipped to norm 1: each of the 8 is 8^-1/2; clip_grad_norm_ adds 1e-6 to the norm that it divides by.
    torch.testing.assert_close(start.bias - same.bias, torch.full((2,), 0.5 * 8**-0.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_changes_nothing(bad):
    layer = model()
    adam = optimizer(layer, 0.1, 0.5)
    before = [p.detach().clone() for p in layer.parameters()]
    assert not math.isfinite(update(layer, adam, bad * layer(torch.ones(1, 3)).sum(), lr=0.1, clip=1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
