"""Error budgets: the one place where the suite says how close is close enough (design, section 5).

A budget is relative to `sum_j |w_ij| |v_j| / |den_i|`, the size of the output itself for positive weights.
Signed maps also carry the relative error of a cancelling denominator (see `oracle.Result.scale`). Delta rules
take back what they wrote, so their weights are differences: their unit is what the weights change by when
every product that they are made of changes by one unit of itself (see `oracle._delta`).
"""

from __future__ import annotations

import torch
from torch import Tensor

BUDGET = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
GRADIENT_FACTOR = 3.0
STREAMED_FLOAT32 = 1e-4  # 1,000,000 tokens
ACCUMULATED_IN = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def budget(dtype: torch.dtype, largest_log: float = 0.0, gradient: bool = False) -> float:
    """The relative budget; exponential maps add 4 eps max|log phi|."""
    total = BUDGET[dtype] + 4 * torch.finfo(ACCUMULATED_IN[dtype]).eps * largest_log
    return total * (GRADIENT_FACTOR if gradient else 1.0)


def assert_outputs_close(
    got: Tensor, result, dtype: torch.dtype, largest_log: float = 0.0, what: str = "output"
):
    """Compare an output with an `oracle.Result` in units of its scale; undefined rows are NaN in both."""
    want = result.output.detach()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got = got.detach().double()
    undefined = want.isnan()
    assert torch.equal(got.isnan(), undefined), (
        f"{what}: {int(got.isnan().sum())} NaN, expected {int(undefined.sum())}; "
        f"first difference at {(got.isnan() != undefined).nonzero()[:1].tolist()}"
    )
    if not got.numel():
        return
    tiny = torch.finfo(ACCUMULATED_IN[dtype]).tiny
    if dtype in (torch.float16, torch.bfloat16):
        tiny = max(tiny, torch.finfo(dtype).smallest_normal)
    allowed = budget(dtype, largest_log) * result.scale.detach() + tiny
    error = (got - want).abs()
    error = torch.where(undefined, torch.zeros_like(error), error / allowed)
    worst = error.max()
    where = error.flatten().argmax().item()
    assert worst <= 1, f"{what}: {worst:.3g} budgets off at flat index {where}"


def assert_gradients_close(
    got: Tensor | None,
    want: Tensor,
    dtype: torch.dtype,
    largest_log: float = 0.0,
    spread: float = 1.0,
    what: str = "",
    floor: float = 0.0,
):
    """Compare gradients, relative to the largest entry of the same head (first two dimensions).

    `floor` is the size of the terms that such a gradient is a difference of: it matters where they cancel.
    """
    assert got is not None, f"gradient of {what} is missing"
    assert got.shape == want.shape, (
        f"gradient of {what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    got = got.detach().double()
    want = want.detach().double()
    assert not want.isnan().any(), "the oracle's gradient is NaN: the test is wrong"
    assert not got.isnan().any(), f"gradient of {what} has {int(got.isnan().sum())} NaN of {got.numel()}"
    if not got.numel():
        return
    error = (got - want).abs()
    size = want.abs()
    if got.dim() > 2:
        error, size = error.flatten(2).amax(-1), size.flatten(2).amax(-1)
        size = size.clamp_min(1e-3 * size.max())  # a head whose gradient cancels is judged beside the others
    else:
        error, size = error.max(), size.max()
    allowed = (
        budget(dtype, largest_log, gradient=True) * (spread * size).clamp_min(floor)
        + 1e3 * torch.finfo(dtype).tiny
    )
    worst = (error / allowed).max()
    assert worst <= 1, f"gradient of {what}: {worst:.3g} budgets off"


def assert_same(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0, what: str = "results"):
    """Two ways through the library agree: NaN in the same places, the rest within the budget."""
    assert got.shape == want.shape, f"{what}: shapes {tuple(got.shape)} and {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN in different places"
    if not got.numel():
        return
    got, want = got.nan_to_num(0.0, 0.0, 0.0), want.nan_to_num(0.0, 0.0, 0.0)
    size = want.abs().max()
    error = (got - want).abs().max()
    assert error <= factor * budget(dtype) * size + torch.finfo(dtype).tiny, (
        f"{what}: {error / size:.3g} apart, allowed {factor * budget(dtype):.3g}"
    )
