"""Codebook features: softmax attention over keys that stand for the keys they are like.

With centers ``c_i`` and the share ``p_i(k)`` that center i has in a key, shares that add up to one,

    phi(q) . phi(k) = sum_i exp(scale q . c_i) p_i(k)

If every key were a center, this would be the softmax kernel itself, at its true scale; the error is that
of putting centers in the place of keys. What matters of it is what a query sees: the squared distance of
a key from its center is measured as ``E (scale q . (k - c))^2`` over the queries, the variance of the error
of a score. :meth:`CodebookFeatures.calibrate_` finds centers by k-means in that metric, and gives shares by
a softmax over ``-sharpness / 2`` times the distances; training may then move everything.

Random features fail where scores vary by more than a few units, because their relative error grows
exponentially with norms. Here it grows with the spread *within* a cluster only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import ExponentialMap
from .calibration import Moments, RowSample, exact_dtype, rows_per_head
from .projections import draw
from .random import default_projections

ROWS = 16384  # sampled keys per key head
ROUNDS = 16  # of k-means; later ones move the error by less than a percent


class CodebookFeatures(ExponentialMap):
    """``phi(q)_i = exp(scale q . c_i)`` and ``phi(k)_i = p_i(k)``, calibrated on data and trainable.

    Before calibration centers are random directions: exact for nothing, and a start for training.

    Args:
        dim: d.
        num_features: number r of centers; default ``ceil(d ln d)``.
        sharpness: how strongly a key belongs to its nearest center alone.
        scale: of the dot product in the kernel; default ``dim ** -0.5``, softmax attention's.
        seed: of the random start, and of the sample that calibration keeps.
        heads: separate centers for each of G key heads.

    Sources: Lingle 2024 (Transformer-VQ) for attention over quantized keys; the metric and the soft shares
    are this library's.
    """

    name = "codebook"
    papers = ("lingle2024",)

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        sharpness: float = 8.0,
        scale: float | None = None,
        seed: int = 0,
        heads: int | None = None,
    ) -> None:
        super().__init__(dim, default_projections(dim) if num_features is None else num_features, heads)
        self.scale = dim**-0.5 if scale is None else float(scale)
        if not self.scale > 0 or not sharpness > 0:
            raise ValueError(f"scale and sharpness must be positive, got {scale!r} and {sharpness!r}")
        self.sharpness, self.seed = float(sharpness), seed
        lead, row = ((), ()) if heads is None else ((heads,), (heads, 1))
        for side in ("query", "key"):
            self.register_parameter(f"{side}_weight", nn.Parameter(torch.zeros(*lead, self.feature_dim, dim)))
            self.register_parameter(f"{side}_bias", nn.Parameter(torch.zeros(*row, self.feature_dim)))
        self.reset_parameters()

    query_weight: nn.Parameter
    query_bias: nn.Parameter
    key_weight: nn.Parameter
    key_bias: nn.Parameter

    def reset_parameters(self) -> None:
        """Centers in random directions, as long as a standard normal vector is."""
        shape = tuple(self.query_weight.shape)
        centers = draw(shape, True, "sqrt_dim", self.seed, 0).view(-1, *shape[-2:])
        eye = torch.eye(self.dim, device="cpu").double() * self.scale
        self._set([(rows.double(), eye) for rows in centers])

    @property
    def symmetric(self) -> bool:
        """Never: a query is compared with centers, a key shared out among them."""
        return False

    def log_query(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., r)``."""
        return x @ self.query_weight.mT.to(x.dtype) + self.query_bias.to(x.dtype)

    def log_key(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., r)``: logarithms of shares, which add up to one."""
        return (x @ self.key_weight.mT.to(x.dtype) + self.key_bias.to(x.dtype)).log_softmax(-1)

    def calibrator(self) -> CodebookCalibrator:
        """A streaming calibrator: ``update(query, key)`` over many batches, then ``finish()``."""
        return CodebookCalibrator(self)

    def calibrate_(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> CodebookFeatures:
        """Set centers and shares from data, in place.

        Args:
            query: ``(B, H, N, d)``. key: ``(B, G, M, d)``; per key head where the map has ``heads``.
            mask: bool ``(B, N)``, True = real; needs N == M.

        Returns:
            The map itself.
        """
        self.calibrator().update(query, key, mask).finish()
        return self

    def _set(self, heads: list[tuple[Tensor, Tensor]]) -> None:
        """From centers ``(r, d)`` and the metric ``(d, d)`` of each head: ``|metric (k - c)|^2``."""
        sides: dict[str, list[Tensor]] = {"query_weight": [], "key_weight": [], "key_bias": []}
        for centers, metric in heads:
            # What all centers have in common cancels in a share; left in, it would cost digits.
            middle = centers.mean(0)
            pulled = self.sharpness * (centers - middle) @ (metric @ metric.mT)
            sides["query_weight"].append(self.scale * centers)
            sides["key_weight"].append(pulled)
            sides["key_bias"].append(-(pulled * (centers + middle)).sum(-1) / 2)
        with torch.no_grad():
            self.query_bias.zero_()
            for name, parts in sides.items():
                mine = self.get_parameter(name)
                mine.copy_(torch.stack(parts).reshape(mine.shape))


class CodebookCalibrator:
    """Keeps an even sample of rows over batches, then finds centers: made by ``map.calibrator()``."""

    def __init__(self, phi: CodebookFeatures) -> None:
        self._map = phi
        self._generator = torch.Generator().manual_seed(phi.seed)
        self._keys = RowSample(ROWS, self._generator)
        self._queries: Moments | None = None

    def update(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> CodebookCalibrator:
        """Add a batch: query ``(B, H, N, d)``, key ``(B, G, M, d)``, mask bool ``(B, N)`` for both.

        Raises:
            ValueError: shapes that do not fit the map, or NaN or infinity in a row that counts.
        """
        phi = self._map
        batch = rows_per_head(query, key, mask, phi.dim, phi.heads)
        self._keys.update(*batch["key"], exact_dtype(key))
        rows, kept = batch["query"]
        moments = Moments.of(rows * phi.scale, kept)
        self._queries = moments if self._queries is None else self._queries.plus(moments)
        return self

    def finish(self) -> None:
        """Set the map from everything seen.

        Raises:
            ValueError: no row was seen.
        """
        phi, heads, keys = self._map, [], self._keys.rows()
        if self._queries is None or bool((self._queries.rows == 0).any()):
            raise ValueError("calibration needs at least one real query and key; call update first")
        for key, products, rows in zip(keys, self._queries.products, self._queries.rows, strict=True):
            metric = score_metric(products / rows)
            centers = k_means(key @ metric, phi.feature_dim, self._generator) @ torch.linalg.inv(metric)
            heads.append((centers, metric))
        phi._set(heads)


def score_metric(second: Tensor) -> Tensor:
    """The symmetric root of ``E q q^T`` ``(d, d)`` over scaled queries, kept invertible."""
    values, vectors = torch.linalg.eigh(second)
    largest = values[-1].clamp(min=torch.finfo(values.dtype).tiny)
    root: Tensor = (vectors * values.clamp(min=largest * 1e-8).sqrt()) @ vectors.mT
    return root


def k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` centers ``(count, d)`` of points ``(n, d)``; with fewer points than that, points repeat."""
    if len(points) <= count:
        return points.repeat(-(-count // len(points)), 1)[:count]
    dtype, points = points.dtype, points.float()
    centers = points[torch.randperm(len(points), generator=generator)[:count]]
    for _ in range(ROUNDS):
        distance, nearest = (centers.square().sum(-1) - 2 * points @ centers.mT).min(-1)
        sizes = torch.bincount(nearest, minlength=count)
        moved = torch.zeros_like(centers).index_add_(0, nearest, points) / sizes.clamp(min=1)[:, None]
        empty = sizes == 0
        if empty.any():  # a center that nothing is near starts again where the error is largest
            far = (distance + points.square().sum(-1)).topk(int(empty.sum())).indices
            moved[empty] = points[far]
        centers = moved
    return centers.to(dtype)
