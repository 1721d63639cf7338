"""Random feature maps over a matrix ``omega (D, m)``, and when it is drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import log, sqrt

import torch
from torch import Tensor

from ....feature_maps import PositiveFeatures, orthogonalize
from ..._mode import check_mode
from .base import FeatureMap


def orthogonal_random_matrix_(w: Tensor, legacy: str | None = None) -> None:
    """Fill ``w (D, m)`` with columns that are orthogonal in blocks of D, from torch's generator.

    Args:
        w: changed in place.
        legacy: ``"exact"`` repeats the original's draw: directions with the signs that LAPACK gives (they
            are biased), and norms of the rows of the matrix that the columns were made from. ``None``:
            Haar distributed directions with norms of their own (see ``reassoc.feature_maps.orthogonalize``).
    """
    rows, columns = w.shape
    with torch.no_grad():
        if legacy is None:
            w.copy_(orthogonalize(torch.randn(columns, rows, device=w.device)).mT)
            return
        for start in range(0, columns, rows):
            block = torch.randn(rows, rows, device=w.device)
            directions, _ = torch.linalg.qr(block)
            count = min(rows, columns - start)
            norms = block.square().sum(1).sqrt()
            w[:, start : start + count] = directions[:, :count] * norms[:count]


class RandomFourierFeatures(FeatureMap):
    """``sqrt(2/n_dims) [cos(w.x), sin(w.x)]``: signed, estimates the kernel ``exp(-t |x - y|^2 / 2)``.

    ``omega`` is drawn by :meth:`new_feature_map`, which attention calls for each batch. With
    ``legacy="exact"`` at its calls 1, 1 + redraw, 1 + 2 redraw, ..., in evaluation too unless
    ``deterministic_eval``. Otherwise a draw, or what was loaded, serves ``redraw`` calls in training and any
    number in evaluation; before the first use there is one if nothing was loaded.

    Args:
        query_dimensions: D. n_dims: number of features, 2 m; default D.
        softmax_temp: t, default ``1 / sqrt(D)``. orthogonal: see :func:`orthogonal_random_matrix_`.
        redraw: calls from draw to draw. deterministic_eval: whether evaluation keeps the draw; it always
            does with ``legacy=None``.
        legacy: see :mod:`reassoc.compat`; attention with ``legacy="exact"`` makes its map so as well.

    Raises:
        ValueError: fewer than two features, or an unknown ``legacy``.
    """

    omega: Tensor

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = False,
        redraw: int = 1,
        deterministic_eval: bool = False,
        legacy: str | None = None,
    ) -> None:
        super().__init__(query_dimensions)
        # A map alone does not say which mode it is in by default: the attention around it decides.
        self.legacy = None if legacy is None else check_mode("fast_transformers", legacy)
        self.n_dims = n_dims or query_dimensions
        if self.n_dims < 2:
            raise ValueError(
                f"n_dims must give at least one column of omega, two features here; got {self.n_dims}"
            )
        self.query_dimensions = query_dimensions
        self.orthogonal = orthogonal
        self.softmax_temp = 1 / sqrt(query_dimensions) if softmax_temp is None else softmax_temp
        self.redraw, self.deterministic_eval = redraw, deterministic_eval
        self.register_buffer("omega", torch.zeros(query_dimensions, self.n_dims // 2))
        self._calls = 0  # that the present draw has served
        self._ready = self._asked = False

    def new_feature_map(self, device: torch.device | str) -> None:
        """Draw ``omega`` if it is time to."""
        if self.legacy is None:
            self._draw_first(device)
            if self.training:
                if self._calls >= self.redraw:
                    self.redraw_(device)
                self._calls += 1
        elif self.training or not self.deterministic_eval:
            if not self._asked or self._calls >= self.redraw:
                self._asked = True
                self.redraw_(device)
            self._calls += 1

    def redraw_(self, device: torch.device | str | None = None) -> None:
        """Draw ``omega`` anew from torch's generator, in evaluation as well; it keeps its dtype."""
        omega = torch.zeros(self.omega.shape, device=self.omega.device if device is None else device)
        if self.orthogonal:
            orthogonal_random_matrix_(omega, self.legacy)
        else:
            omega.normal_()
        self.omega = omega.to(self.omega.dtype)
        self._calls, self._ready = 0, True

    def _draw_first(self, device: torch.device | str | None = None) -> None:
        """Zeros mean that nothing was drawn and nothing loaded."""
        if not self._ready:
            self._ready = True
            if not bool(self.omega.any()):
                self.redraw_(device)

    def project(self, x: Tensor) -> Tensor:
        """``(..., D) -> (..., m)``: products with the columns of omega, x scaled by sqrt(softmax_temp)."""
        if self.legacy is None:
            self._draw_first()
        return self._scaled(x) @ self.omega.to(x.dtype)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.softmax_temp == 1.0 else x * sqrt(self.softmax_temp)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D) -> (..., 2 m)``."""
        u = self.project(x)
        return torch.cat([u.cos(), u.sin()], dim=-1) * sqrt(2 / self.n_dims)


class SmoothedRandomFourierFeatures(RandomFourierFeatures):
    """The Gaussian kernel plus ``smoothing ** 2``, so that denominators are seldom negative.

    Args:
        n_dims: number of features, the constant one included: 2 m + 1. smoothing: the constant feature.
        query_dimensions, softmax_temp, orthogonal, redraw, deterministic_eval, legacy: as for
            :class:`RandomFourierFeatures`.
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = False,
        smoothing: float = 1.0,
        redraw: int = 1,
        deterministic_eval: bool = False,
        legacy: str | None = None,
    ) -> None:
        n_dims = (query_dimensions if n_dims is None else n_dims) - 1
        super().__init__(
            query_dimensions, n_dims, softmax_temp, orthogonal, redraw, deterministic_eval, legacy
        )
        self.smoothing = smoothing

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D) -> (..., 2 m + 1)``."""
        features = super().forward(x)
        return torch.cat([features, features.new_full((*x.shape[:-1], 1), self.smoothing)], dim=-1)


class Favor(RandomFourierFeatures):
    """``n_dims^-1/2 exp(+-w.x - |x|^2 / 2)``: positive features that estimate ``exp(t x.y)``.

    Args:
        stabilize: with ``legacy="exact"``, also subtract the largest squared norm over axis 1, which is
            the sequence of ``(N, L, H, D)``; a factor that only an epsilon sees. Otherwise nothing to do:
            attention takes logarithms.
        query_dimensions, n_dims, softmax_temp, orthogonal, redraw, deterministic_eval, legacy: as for
            :class:`RandomFourierFeatures`.
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = True,
        stabilize: bool = False,
        redraw: int = 1,
        deterministic_eval: bool = False,
        legacy: str | None = None,
    ) -> None:
        super().__init__(
            query_dimensions, n_dims, softmax_temp, orthogonal, redraw, deterministic_eval, legacy
        )
        self.stabilize = stabilize

    def positive(self) -> PositiveFeatures:
        """The same features as a map of this library, over the present ``omega``."""
        self._draw_first()
        # Kept outside the module tree, so that the state dict stays the original's. Building one reads
        # every number of the matrix; a new matrix only takes the place of the old.
        kept: PositiveFeatures | None = self.__dict__.get("_positive")
        if kept is None:
            kept = PositiveFeatures(
                self.query_dimensions, projections=self.omega.mT, hyperbolic=True, scale=self.softmax_temp
            )
            self.__dict__["_positive"] = kept
        kept.projections = self.omega.mT
        return kept

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D) -> (..., 2 m)``."""
        if self.legacy is None:
            return self.positive().key(x)
        u = self.project(x)
        norm = self._scaled(x).square().sum(-1, keepdim=True)
        offset = norm / 2 + log(self.n_dims) / 2
        if self.stabilize:
            if norm.ndim != 4 or norm.shape[1] < norm.shape[2]:
                warnings.warn(
                    f"Favor(stabilize=True) takes axis 1 of (N, L, H, D) for the sequence, got "
                    f"{tuple(x.shape)}: are heads and sequence exchanged?",
                    stacklevel=2,
                )
            offset = offset + norm.amax(1, keepdim=True)
        return torch.cat([(u - offset).exp(), (-u - offset).exp()], dim=-1)


class GeneralizedRandomFeatures(RandomFourierFeatures):
    """``kernel_fn(w.x)`` for any function: estimates a kernel of its own.

    Args:
        n_dims: number of features m; default D. softmax_temp: t, as a factor of ``|x|^2``.
        kernel_fn: what is applied to the products.
        query_dimensions, orthogonal, redraw, deterministic_eval, legacy: as for
            :class:`RandomFourierFeatures`.
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float = 1.0,
        orthogonal: bool = True,
        kernel_fn: Callable[[Tensor], Tensor] = torch.relu,
        redraw: int = 1,
        deterministic_eval: bool = False,
        legacy: str | None = None,
    ) -> None:
        n_dims = 2 * (query_dimensions if n_dims is None else n_dims)
        super().__init__(
            query_dimensions, n_dims, softmax_temp, orthogonal, redraw, deterministic_eval, legacy
        )
        self.kernel_fn = kernel_fn

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D) -> (..., m)``."""
        return self.kernel_fn(self.project(x))
