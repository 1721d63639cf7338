"""How far the clean operator is from the original's arithmetic, layer by layer, on given input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .fast_transformers.attention import AttentionLayer
from .performer_pytorch import Attention
from .torch_geometric import PerformerAttention

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Run(Protocol):
    """Runs a model on the input, with its masks or without."""

    def __call__(self, module: nn.Module, masked: bool = True, /) -> Tensor:
        """``(B, N, e)``."""


@dataclass(frozen=True)
class Layer:
    """Relative differences of an attention layer's output.

    Attributes:
        name: of the module. alone: both modes on the input that the original's layer got.
        so_far: in the two models as wholes, earlier differences included; ``None`` for layers alone.
    """

    name: str
    alone: float
    so_far: float | None


@dataclass(frozen=True)
class Gap:
    """Differences on one input.

    Attributes:
        layers: in order. end: of the last output, hidden states or logits.
        unmasked: the same when neither mode is given a mask, so that only epsilons tell them apart; ``None``
            where there was none.
        changed: share of positions at which another number is largest.
        undefined: rows that the original left NaN or infinite; they are left out of all figures.
        redraw: of the original from itself with another draw, where it draws in evaluation.
    """

    layers: tuple[Layer, ...]
    end: float
    unmasked: float | None = None
    changed: float | None = None
    undefined: int = 0
    redraw: float | None = None


def compare(exact: nn.Module, clean: nn.Module, run: Run, mask: Tensor | None) -> Gap:
    """Run both.

    Args:
        exact, clean: the same modules in the two modes.
        run: one of them on the input, with its masks or without, ``(B, N, e)``.
        mask: bool ``(B, N)``: rows that count, ``None``: all.
    """
    with torch.no_grad():
        was, calls, outputs = _recorded(exact, run)
        now, _, others = _recorded(clean, run)
        layers = []
        for name, call in calls.items():
            alone = clean.get_submodule(name)(*call[0], **call[1])
            layers.append(
                Layer(name, relative(alone, outputs[name], mask), relative(others[name], outputs[name], mask))
            )
        unmasked = None if mask is None else relative(run(clean, False), run(exact, False), mask)
    rows = torch.ones(was.shape[:2], dtype=torch.bool) if mask is None else mask
    finite = was.isfinite().all(-1)
    counted = rows & finite
    moved = (was.argmax(-1) != now.argmax(-1))[counted]
    changed = float(moved.double().mean()) if len(moved) else None
    undefined = int((rows & ~finite).sum())
    return Gap(tuple(layers), relative(now, was, rows), unmasked, changed, undefined)


def compare_layers(
    exact: nn.ModuleList,
    clean: nn.ModuleList,
    names: list[str],
    x: Tensor,  # (B, N, channels)
    mask: Tensor | None,  # bool (B, N)
) -> Gap:
    """Attention layers one at a time, each on the same input; the end is the worst of them."""
    found = []
    with torch.no_grad():
        for one, other in zip(exact, clean, strict=True):
            gaps = [relative(other(x, given), one(x, given), mask) for given in (mask, None)]
            found.append((gaps[0], gaps[1], int((~one(x, mask).isfinite().all(-1)).sum())))
    layers = tuple(Layer(name, gap[0], None) for name, gap in zip(names, found, strict=True))
    end, unmasked, undefined = (max(column) for column in zip(*found, strict=True))
    return Gap(layers, end, None if mask is None else unmasked, None, undefined)


def relative(found: Tensor, expected: Tensor, rows: Tensor | None) -> float:
    """``|found - expected| / |expected|`` over rows ``(B, N)`` in which the expected is finite.

    Infinite where no such row is left, or ``found`` is not finite in one; zero for two tensors of zeros.
    """
    counted = expected.isfinite().all(-1)
    if rows is not None:
        counted = counted & rows
    if not bool(counted.any()):
        return float("inf")
    one, two = found[counted].double(), expected[counted].double()
    difference, size = float((one - two).norm()), float(two.norm())
    if difference == 0:
        return 0.0
    return difference / size if size and difference == difference else float("inf")


def _recorded(model: nn.Module, run: Run) -> tuple[Tensor, dict[str, Call], dict[str, Tensor]]:
    """The output, and each attention's call and output by name."""
    calls: dict[str, Call] = {}
    outputs: dict[str, Tensor] = {}
    handles = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            calls[name], outputs[name] = (args, kwargs), output

        return hook

    for name, module in model.named_modules():
        if isinstance(module, Attention | AttentionLayer | PerformerAttention):
            handles.append(module.register_forward_hook(note(name), with_kwargs=True))
    try:
        return run(model), calls, outputs
    finally:
        for handle in handles:
            handle.remove()
