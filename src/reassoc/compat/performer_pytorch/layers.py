"""What stands around attention: norms, gates, the feed-forward layer, shifted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

M = TypeVar("M", bound=nn.Module)
_TOKENS = 512  # of a piece: what the feed-forward layer makes of them stays in the cache


def get_module_device(module: nn.Module) -> torch.device:
    """Where the first parameter is."""
    return next(module.parameters()).device


def find_modules(nn_module: nn.Module, type: type[M]) -> list[M]:
    """All modules of that class, each once."""
    return [module for module in nn_module.modules() if isinstance(module, type)]


class Always(nn.Module):
    """Returns the same thing whatever it is given."""

    def __init__(self, val: Any) -> None:
        super().__init__()
        self.val = val

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``val``."""
        return self.val


class ReZero(nn.Module):
    """``g fn(x)`` with a learned number g that starts at 0.001.

    Source: Bachlechner et al. 2020.
    """

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(1e-3))
        self.fn = fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """``(B, N, dim) -> (B, N, dim)``."""
        out: Tensor = self.fn(x, **kwargs) * self.g
        return out


class PreScaleNorm(nn.Module):
    """``fn(g x / |x|)`` with a learned number g; the norm is at least ``eps``.

    Source: Nguyen and Salazar 2019.
    """

    def __init__(self, dim: int, fn: nn.Module, eps: float = 1e-5) -> None:
        super().__init__()
        self.fn = fn
        self.g = nn.Parameter(torch.ones(1))
        self.eps = eps

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """``(B, N, dim) -> (B, N, dim)``."""
        out: Tensor = self.fn(x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.g, **kwargs)
        return out


class PreLayerNorm(nn.Module):
    """``fn`` of the normalized input."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """``(B, N, dim) -> (B, N, dim)``."""
        out: Tensor = self.fn(self.norm(x), **kwargs)
        return out


class Chunk(nn.Module):
    """``fn`` on ``chunks`` parts of the input, one after another."""

    def __init__(self, chunks: int, fn: nn.Module, along_dim: int = -1) -> None:
        super().__init__()
        self.dim = along_dim
        self.chunks = chunks
        self.fn = fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Any shape that ``fn`` takes."""
        if self.chunks == 1:
            whole: Tensor = self.fn(x, **kwargs)
            return whole
        return torch.cat([self.fn(part, **kwargs) for part in x.chunk(self.chunks, self.dim)], self.dim)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them; with ``glu`` a gated one.

    Args:
        dim: size of a token. mult: the inner size is that many times as large. dropout: between the two.
        activation: a class of modules, default GELU. glu: gate one half of a wider first layer by the other.
    """

    def __init__(
        self,
        dim: int,
        mult: int = 4,
        dropout: float = 0.0,
        activation: Callable[[], nn.Module] | None = None,
        glu: bool = False,
    ) -> None:
        super().__init__()
        self.glu = glu
        self.w1 = nn.Linear(dim, dim * mult * (2 if glu else 1))
        self.act = (activation or nn.GELU)()
        self.dropout = nn.Dropout(dropout)
        self.w2 = nn.Linear(dim * mult, dim)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """``(B, N, dim) -> (B, N, dim)``."""
        if torch.is_grad_enabled() or x.ndim != 3 or x.shape[1] <= _TOKENS:
            return self._piece(x)
        return torch.cat([self._piece(part) for part in x.split(_TOKENS, dim=1)], dim=1)

    def _piece(self, x: Tensor) -> Tensor:
        inner = self.w1(x)
        if self.glu:
            inner, gate = inner.chunk(2, dim=-1)
            inner = self.act(inner) * gate
        else:
            inner = self.act(inner)
        out: Tensor = self.w2(self.dropout(inner))
        return out


def shift(t: Tensor, amount: int, mask: Tensor | None = None) -> Tensor:
    """Tokens ``(B, N, c)`` moved ``amount`` positions on, zeros after them and where ``mask`` hides one."""
    if amount == 0:
        return t
    if mask is not None:
        t = t.masked_fill(~mask[..., None], 0.0)
    return pad(t, (0, 0, amount, -amount))


class PreShiftTokens(nn.Module):
    """``fn`` of tokens of which each part of the channels comes from a position of its own.

    Args:
        shifts: how far each part moves; what is left of the channels stays. fn: the module.
    """

    def __init__(self, shifts: Sequence[int], fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        self.shifts = tuple(shifts)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """``(B, N, dim) -> (B, N, dim)``; a ``mask`` in ``kwargs`` empties hidden tokens before they move."""
        width = x.shape[-1] // len(self.shifts)
        parts = list(x.split(width, dim=-1))
        for i, amount in enumerate(self.shifts):
            parts[i] = shift(parts[i], amount, kwargs.get("mask"))
        out: Tensor = self.fn(torch.cat(parts, dim=-1), **kwargs)
        return out
