"""Squared landmark features: a map fitted to data in closed form, without training by gradients.

With x the scaled query and y the scaled key, the kernel is ``(u(x) . v(y))^2``: never negative, though
its features ``u_i u_j`` are signed. u and v are n exponential features each, fitted to the square root
of softmax attention on sampled rows:

1. landmarks ``a = y' / 2`` of sampled keys for u, ``b = x' / 2`` of sampled queries for v;
2. target ``T_xy = exp(x . y / 2 - z_x)`` with ``z_x = logsumexp_y(x . y) / 2``: rows are unit vectors,
   so a squared error is a Hellinger distance between attention distributions;
3. bases ``A_xi = exp(x . a_i - z_x - alpha_i)`` and ``B_yj = exp(b_j . y - beta_j)``, alpha and beta
   making columns unit vectors;
4. the best rank-n map between them (reduced-rank regression with ridge rho): with the whiteners
   ``H_A = (A^T A + rho)^-1/2`` and ``H_B`` alike, ``U S V^T = svd(H_A A^T T B H_B)`` cut to n, and
   ``u = exp(x . a - alpha) H_A U S^1/2``, ``v = exp(b . y - beta) H_B V S^1/2``.

The estimate of ``exp(x . y)`` is biased and, given its landmarks, deterministic. It gains where data
has structure that random projections ignore; on inputs unlike its calibration it has no guarantee.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._features import Features
from .base import FeatureMap
from .calibration import RowSample, exact_dtype, rows_per_head
from .random import default_projections, digest

ROWS = 2048  # sampled queries, and keys, per key head: the fit is of order ROWS^2 * landmarks


class Side(NamedTuple):
    """What one side is made of: landmarks ``(L, d)``, offset ``(L,)``, weight ``(L, n)``."""

    landmarks: Tensor
    offset: Tensor
    weight: Tensor


class LandmarkFeatures(FeatureMap):
    """``phi(q) . phi(k) = (u(q) . v(k))^2``, fitted by :meth:`calibrate_` to softmax attention on data.

    Args:
        dim: d.
        num_features: largest number of features; the map uses the n (n + 1) / 2 at or below it.
            Default ``ceil(d ln d)``.
        landmarks: number L of sampled keys, and of sampled queries, that the fit is built on.
        ridge: rho of the fit, relative to unit columns.
        scale: of the dot product in the kernel; default ``dim ** -0.5``, softmax attention's.
        seed: of the choice of rows and landmarks.
        heads: a fit for each of G key heads, queries of its group pooled.

    Before calibration there is nothing to compute with: a call raises ``ValueError``.

    Source: this library; ``docs/results/fidelity.md`` has its evidence and its limits.
    """

    name = "landmark"

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        landmarks: int = 256,
        ridge: float = 1e-3,
        scale: float | None = None,
        seed: int = 0,
        heads: int | None = None,
    ) -> None:
        num_features = default_projections(dim) if num_features is None else num_features
        if not isinstance(num_features, int) or num_features < 1:
            raise ValueError(f"num_features must be a positive integer, got {num_features!r}")
        if landmarks < 1 or not ridge > 0:
            raise ValueError(f"landmarks must be positive and ridge above 0, got {landmarks!r} and {ridge!r}")
        self.rank = (math.isqrt(8 * num_features + 1) - 1) // 2
        super().__init__(dim, self.rank * (self.rank + 1) // 2, heads)
        self.landmarks, self.ridge, self.seed = landmarks, ridge, seed
        self.scale = dim**-0.5 if scale is None else float(scale)
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale must be positive and finite, got {scale!r}")
        lead = () if heads is None else (heads,)
        row = () if heads is None else (heads, 1)
        for side in ("query", "key"):
            self.register_buffer(f"{side}_landmarks", torch.zeros(*lead, landmarks, dim))
            self.register_buffer(f"{side}_offset", torch.zeros(*row, landmarks))
            self.register_buffer(f"{side}_weight", torch.zeros(*lead, landmarks, self.rank))
        # Never on the meta device, where a loader may build the map: it is read at once.
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool, device="cpu"))
        self.register_load_state_dict_post_hook(_remember)  # type: ignore[no-untyped-call]
        self._remember()

    fitted: Tensor

    @property
    def symmetric(self) -> bool:
        """Never: queries are described by keys, and keys by queries."""
        return False

    @property
    def calibrated(self) -> bool:
        """Whether the map has been fitted."""
        return self._current()._calibrated

    @property
    def fingerprint(self) -> str:
        """The fit included."""
        return self._current()._fingerprint

    def _current(self) -> LandmarkFeatures:
        # Some loaders put other tensors in the place of buffers, past load_state_dict and its hooks.
        if self._source is not self.fitted:
            self._remember()
        return self

    def _remember(self) -> None:
        self._source = self.fitted
        self._calibrated = bool(self.fitted)
        numbers = [self.get_buffer(f"{side}_{part}") for side in ("query", "key") for part in Side._fields]
        fit = digest(*numbers) if self._calibrated else "not calibrated"
        self._fingerprint = (
            f"landmark(dim={self.dim}, feature_dim={self.feature_dim}, heads={self.heads}, "
            f"scale={self.scale:.17g}, fit={fit})"
        )

    def calibrator(self) -> LandmarkCalibrator:
        """A streaming calibrator: ``update(query, key)`` over many batches, then ``finish()``."""
        return LandmarkCalibrator(self)

    def calibrate_(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> LandmarkFeatures:
        """Fit the map, in place.

        Args:
            query: ``(B, H, N, d)``. key: ``(B, G, M, d)``; per key head where the map has ``heads``.
            mask: bool ``(B, N)``, True = real; needs N == M.

        Returns:
            The map itself.
        """
        self.calibrator().update(query, key, mask).finish()
        return self

    def _features(self, x: Tensor, side: str) -> Features:
        if not self.calibrated:
            raise ValueError(
                "LandmarkFeatures is fitted to data: call calibrate_(query, key) before using it"
            )
        landmarks, offset, weight = (self.get_buffer(f"{side}_{part}").to(x.dtype) for part in Side._fields)
        log = (x * math.sqrt(self.scale)) @ landmarks.mT - offset
        # The vector is brought to unit length; neither its largest exponent nor its length, which the
        # logarithm gives back, need carry a gradient.
        top = log.detach().amax(-1, keepdim=True)
        mixed = (log - top).exp() @ weight
        length = mixed.detach().norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny ** 0.5)
        mixed = mixed / length
        first, second = torch.triu_indices(self.rank, self.rank, device=x.device)
        twice = mixed.new_full(first.shape, math.sqrt(2.0)).masked_fill(first == second, 1.0)
        return Features(mixed[..., first] * mixed[..., second] * twice, 2 * (top + length.log()))

    def query_features(self, x: Tensor) -> Features:
        """Bounded signed features ``(..., r)`` and one logarithm ``(..., 1)`` for each query."""
        return self._features(x, "query")

    def key_features(self, x: Tensor) -> Features:
        """Bounded signed features ``(..., r)`` and one logarithm ``(..., 1)`` for each key."""
        return self._features(x, "key")

    def query(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., r)``."""
        return self.query_features(x).value()

    def key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., r)``."""
        return self.key_features(x).value()

    def _set(self, sides: list[tuple[Side, Side]]) -> None:
        with torch.no_grad():
            for index, side in enumerate(("query", "key")):
                for part in Side._fields:
                    fitted = torch.stack([getattr(pair[index], part) for pair in sides])
                    name = f"{side}_{part}"
                    self.get_buffer(name).copy_(fitted.reshape(self.get_buffer(name).shape))
            self.fitted.fill_(True)
        self._remember()


def _remember(module: LandmarkFeatures, _: object) -> None:
    module._remember()


class LandmarkCalibrator:
    """Keeps an even sample of rows over batches, then fits the map: made by ``map.calibrator()``."""

    def __init__(self, phi: LandmarkFeatures) -> None:
        self._map = phi
        generator = torch.Generator().manual_seed(phi.seed)
        self._samples = {side: RowSample(ROWS, generator) for side in ("query", "key")}

    def update(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> LandmarkCalibrator:
        """Add a batch: query ``(B, H, N, d)``, key ``(B, G, M, d)``, mask bool ``(B, N)`` for both.

        Raises:
            ValueError: shapes that do not fit the map, or NaN or infinity in a row that counts.
        """
        batch = rows_per_head(query, key, mask, self._map.dim, self._map.heads)
        for side, (rows, kept) in batch.items():
            self._samples[side].update(rows, kept, exact_dtype(query))
        return self

    def finish(self) -> None:
        """Fit the map to everything seen.

        Raises:
            ValueError: no row was seen.
        """
        root = math.sqrt(self._map.scale)
        size = (self._map.rank, self._map.landmarks)
        pairs = zip(*(sample.rows() for sample in self._samples.values()), strict=True)
        self._map._set([fit(q * root, k * root, *size, self._map.ridge) for q, k in pairs])


def fit(
    query: Tensor,  # (N, d) scaled, float64, in random order
    key: Tensor,  # (M, d)
    rank: int,
    landmarks: int,
    ridge: float,
) -> tuple[Side, Side]:
    """The two sides of the map, as the head of this file has it."""
    key_marks, query_marks = key[:landmarks] / 2, query[:landmarks] / 2
    scores = query @ key.T / 2
    z = (2 * scores).logsumexp(1, keepdim=True) / 2
    left, right = query @ key_marks.T - z, key @ query_marks.T
    alpha, beta = (2 * left).logsumexp(0) / 2, (2 * right).logsumexp(0) / 2
    left, right = (left - alpha).exp(), (right - beta).exp()
    white_left, white_right = _whitener(left, ridge), _whitener(right, ridge)
    u, s, vh = torch.linalg.svd(white_left @ (left.T @ (scores - z).exp() @ right) @ white_right)
    kept = min(rank, len(s))
    root = s[:kept].sqrt()

    def side(marks: Tensor, offset: Tensor, weight: Tensor) -> Side:
        # Fewer rows than landmarks: the missing ones are infinitely unlikely.
        missing = landmarks - len(marks)
        pad = torch.nn.functional.pad
        return Side(
            pad(marks, (0, 0, 0, missing)),
            pad(offset, (0, missing), value=torch.inf),
            pad(weight, (0, rank - kept, 0, missing)),
        )

    return (
        side(key_marks, alpha, white_left @ (u[:, :kept] * root)),
        side(query_marks, beta, white_right @ (vh[:kept].T * root)),
    )


def _whitener(basis: Tensor, ridge: float) -> Tensor:
    values, vectors = torch.linalg.eigh(basis.T @ basis)
    whitener: Tensor = (vectors * (values.clamp(min=0.0) + ridge).rsqrt()) @ vectors.T
    return whitener
