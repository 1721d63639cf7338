"""The Performer attention of PyTorch Geometric 2.x, on this library's operator, with right masking.

In the original a mask sets the values of padding nodes to zero and leaves their keys in the denominator, so
a graph's result depends on how large the other graphs of its batch are. Here a masked node is no key.
PyTorch Geometric itself is not needed; :func:`revive` is for models that already hold its modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch import Tensor, nn

from .. import linear_attention
from ..feature_maps import orthogonalize
from ._mode import check_mode
from ._operator import attend, hide_values
from .performer_pytorch.kernels import orthogonal_rows

KERNEL_EPS = 1e-3  # added to every feature by the original
RELU = nn.ReLU()


class PerformerProjection(nn.Module):
    """``kernel(W x)`` attention over the buffer ``projection_matrix``.

    Args:
        num_cols: size d of queries and keys; there are ``int(d ln d)`` projections, at least 1.
        kernel: function of the projected numbers, one by one.
        legacy: see :class:`PerformerAttention`.

    Attributes:
        projection_matrix: ``(m, d)``, rows of norm 1, orthogonal in blocks of d.
    """

    projection_matrix: Tensor

    def __init__(
        self, num_cols: int, kernel: Callable[[Tensor], Tensor] = RELU, *, legacy: str | None = None
    ) -> None:
        super().__init__()
        self.legacy = check_mode("torch_geometric", legacy)
        if num_cols < 1:
            raise ValueError(f"num_cols must be at least 1, got {num_cols}")
        self.num_rows = max(1, int(num_cols * math.log(num_cols)))
        self.num_cols = num_cols
        self.kernel = kernel
        self.register_buffer("projection_matrix", _draw(self.num_rows, num_cols, legacy))

    def forward(
        self,
        q: Tensor,  # (B, H, N, d)
        k: Tensor,  # (B, H, M, d)
        v: Tensor,  # (B, H, M, e)
        mask: Tensor | None = None,  # bool (B, M), True = a node
    ) -> Tensor:  # (B, H, N, e)
        """The attention of each query; ``mask`` as ``legacy`` says."""
        return _attend(self.projection_matrix, self.kernel, q, k, v, mask, self.legacy)


class PerformerAttention(nn.Module):
    """Drop-in for ``torch_geometric.nn.attention.PerformerAttention``; state dicts load both ways.

    Args:
        channels: size of a node, a multiple of ``heads``. heads: number of heads.
        head_channels: size of each; ``None``: ``channels // heads``.
        kernel: makes features of projections; they should not be negative.
        qkv_bias, attn_out_bias: biases of the linear layers. dropout: of the output.
        legacy: ``None``: features without the original's 0.001, masked nodes are no keys, a node whose
            features are all zero attends to nothing and gives zero (before ``attn_out``), and new
            projections have uniform directions. ``"exact"``: the original's arithmetic, its mask included.

    Raises:
        ValueError: sizes that do not fit, or an unknown ``legacy``.

    Source: torch_geometric 2.8.1, ``nn/attention/performer.py``; Choromanski et al. 2021, section 2.2.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        head_channels: int | None = 64,
        kernel: Callable[[Tensor], Tensor] = RELU,
        qkv_bias: bool = False,
        attn_out_bias: bool = True,
        dropout: float = 0.0,
        *,
        legacy: str | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or channels % heads:
            raise ValueError(f"channels must be a multiple of heads={heads}, got {channels}")
        head_channels = channels // heads if head_channels is None else head_channels
        self.heads, self.head_channels, self.kernel = heads, head_channels, kernel
        self.legacy = legacy
        self.fast_attn = PerformerProjection(head_channels, kernel, legacy=legacy)
        inner = head_channels * heads
        self.q = nn.Linear(channels, inner, bias=qkv_bias)
        self.k = nn.Linear(channels, inner, bias=qkv_bias)
        self.v = nn.Linear(channels, inner, bias=qkv_bias)
        self.attn_out = nn.Linear(inner, channels, bias=attn_out_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,  # (B, N, channels)
        mask: Tensor | None = None,  # bool (B, N), True = a node
    ) -> Tensor:  # (B, N, channels)
        """Attention of each node to the nodes of its graph; rows of padding hold nothing of use."""
        shape = (self.heads, self.head_channels)
        q, k, v = (linear(x).unflatten(-1, shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
        out = _attend(self.fast_attn.projection_matrix, self.fast_attn.kernel, q, k, v, mask, self.legacy)
        projected: Tensor = self.dropout(self.attn_out(out.transpose(1, 2).flatten(2)))
        return projected

    @torch.no_grad()
    def redraw_projection_matrix(self) -> None:
        """Draw ``projection_matrix`` anew from torch's generator, in place."""
        matrix = self.fast_attn.projection_matrix
        matrix.copy_(_draw(self.fast_attn.num_rows, self.fast_attn.num_cols, self.legacy))

    def _reset_parameters(self) -> None:
        # torch_geometric's GPSConv.reset_parameters calls it by this name.
        for linear in (self.q, self.k, self.v, self.attn_out):
            linear.reset_parameters()
        self.redraw_projection_matrix()

    def extra_repr(self) -> str:
        """Sizes."""
        return f"heads={self.heads}, head_channels={self.head_channels}"


def revive(model: nn.Module, legacy: str | None = None) -> int:
    """Let every ``PerformerAttention`` of torch_geometric inside ``model`` compute as the one here, in place.

    Weights, names and the objects themselves stay, and they remain instances of the original's class:
    GPSConv passes nodes on without attention where its layer is of another class.

    Args:
        model: any module, for example one with ``GPSConv(attn_type="performer")`` layers.
        legacy: see :class:`PerformerAttention`.

    Returns:
        How many modules were changed. Called again, the mode can be changed.

    Raises:
        ImportError: torch_geometric is not there.
    """
    check_mode("torch_geometric", legacy)
    original: type[nn.Module] = import_module("torch_geometric.nn.attention").PerformerAttention
    found = [module for module in model.modules() if isinstance(module, original)]
    for module in found:
        module.__class__ = _both(original)  # type: ignore[arg-type]
        module.legacy = legacy  # type: ignore[assignment]
    return len(found)


@cache
def _both(original: type[nn.Module]) -> type[nn.Module]:
    return type("PerformerAttention", (PerformerAttention, original), {"__doc__": PerformerAttention.__doc__})


def _draw(rows: int, columns: int, legacy: str | None) -> Tensor:
    """``(rows, columns)``, rows of norm 1: uniform directions, or with the signs that LAPACK gives."""
    if legacy is None:
        return orthogonalize(torch.randn(rows, columns), "sqrt_dim") / math.sqrt(columns)
    return orthogonal_rows(rows, columns)


def _attend(
    matrix: Tensor,
    kernel: Callable[[Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    legacy: str | None,
) -> Tensor:
    q, k = (t @ matrix.mT.to(t.dtype) for t in (q, k))
    if legacy == "exact":
        return attend(kernel(q) + KERNEL_EPS, kernel(k) + KERNEL_EPS, hide_values(v, mask))
    phi = "relu" if type(kernel) is nn.ReLU else "identity"
    if phi == "identity":
        q, k = kernel(q), kernel(k)
    return linear_attention(q, k, v, phi, key_mask=mask, undefined="zero")
