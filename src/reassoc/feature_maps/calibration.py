"""Exact identities that shrink the variance of random features, and how they are learned from data.

With x the scaled query and y the scaled key, for any vectors q0, k0 and invertible A:

1. softmax attention does not change when one vector is added to every key: centre keys at k0; the
   factor ``exp(x . k0)`` left behind belongs to the query and cancels under attention normalization;
2. ``exp(x . y) = exp((x - q0) . y) exp(q0 . y)``: centre queries, the second factor is the key's;
3. ``x . y = (A x) . (A^-T y)``: choose A so that ``E|A x|^2 + E|A^-T y|^2`` is smallest. With
   covariances Cq and Ck the best ``M = A^T A`` is ``Cq^-1/2 (Cq^1/2 Ck Cq^1/2)^1/2 Cq^-1/2``.

The variance of a positive estimate grows like ``exp(|x + y|^2)``, so smaller norms are worth a lot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Calibration(NamedTuple):
    """What is learned; shapes without heads, and with.

    Attributes:
        query_center, key_center: q0 and k0 of the scaled inputs, ``(d,)``, ``(G, 1, d)``.
        query_map, key_map: A and A^-T, ``(d, d)``, ``(G, d, d)``.
        mean_square: ``()``, ``(G, 1, 1)``: ``E|x' + y'|^2`` of calibrated queries and keys, which
            the optimal map needs.
    """

    query_center: Tensor
    key_center: Tensor
    query_map: Tensor
    key_map: Tensor
    mean_square: Tensor


def identity_calibration(dim: int, heads: int | None) -> Calibration:
    """The calibration that changes nothing."""
    lead = () if heads is None else (heads,)
    row = () if heads is None else (heads, 1)
    eye = torch.eye(dim, device="cpu").expand(*lead, dim, dim)
    return Calibration(
        eye.new_zeros(*row, dim), eye.new_zeros(*row, dim), eye.clone(), eye.clone(),
        eye.new_zeros(() if heads is None else (heads, 1, 1)),
    )  # fmt: skip


class Moments(NamedTuple):
    """Number of rows ``(h, 1)``, their sum ``(h, d)`` and sum of products ``(h, d, d)``; h = heads or 1."""

    rows: Tensor
    total: Tensor
    products: Tensor

    @staticmethod
    def of(x: Tensor, kept: Tensor) -> Moments:
        """Of rows ``(h, n, d)``, zero where ``kept`` bool ``(h, n)`` is False."""
        return Moments(kept.double().sum(-1, keepdim=True), x.sum(1), x.mT @ x)

    def plus(self, other: Moments) -> Moments:
        """Of both sets of rows."""
        return Moments(*(a + b for a, b in zip(self, other, strict=True)))

    def mean(self) -> Tensor:
        """``(h, d)``."""
        return self.total / self.rows

    def covariance(self) -> Tensor:
        """``(h, d, d)``, drawn towards a multiple of the identity by the share that d rows explain.

        With fewer rows than coordinates the plain covariance is singular, and the balance of
        identity 3 would stretch directions that the data has not shown.
        """
        mean, dim = self.mean(), self.total.shape[-1]
        plain = self.products / self.rows[..., None] - mean[:, :, None] * mean[:, None]
        level = plain.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        share = (dim / (dim + self.rows))[..., None]
        eye = torch.eye(dim, dtype=plain.dtype)
        # A constant input has no covariance but rounding; its size then says what is small.
        size = _trace(self.products)[:, None, None] / (dim * self.rows[..., None])
        floor = torch.where(size > 0, size, 1.0) * 1e-6
        return (1 - share) * plain + (share * level + floor) * eye


class Calibrator:
    """Collects moments over batches, then sets a map's calibration: made by ``map.calibrator()``.

    Example:
        >>> import torch
        >>> from reassoc.feature_maps import PositiveFeatures
        >>> phi = PositiveFeatures(8, 16, heads=2)
        >>> calibrator = phi.calibrator()
        >>> for _ in range(3):
        ...     _ = calibrator.update(torch.randn(1, 4, 32, 8), torch.randn(1, 2, 32, 8))
        >>> calibrator.finish()
        >>> phi.calibrated
        True
    """

    def __init__(
        self, dim: int, heads: int | None, scale: float, deliver: Callable[[Calibration], None]
    ) -> None:
        self._dim, self._heads, self._scale, self._deliver = dim, heads, scale, deliver
        self._queries: Moments | None = None
        self._keys: Moments | None = None

    def update(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Calibrator:
        """Add a batch: query ``(B, H, N, d)``, key ``(B, G, M, d)``, mask bool ``(B, N)`` for both.

        Raises:
            ValueError: shapes that do not fit the map, or NaN or infinity in a row that counts.
        """
        new = {}
        for name, (rows, kept) in rows_per_head(query, key, mask, self._dim, self._heads).items():
            new[name] = Moments.of(rows * self._scale**0.5, kept)
        self._queries = new["query"] if self._queries is None else self._queries.plus(new["query"])
        self._keys = new["key"] if self._keys is None else self._keys.plus(new["key"])
        return self

    def finish(self) -> None:
        """Set the map's calibration from everything seen.

        Raises:
            ValueError: no row was seen.
        """
        queries, keys = self._queries, self._keys
        if queries is None or keys is None or bool((queries.rows == 0).any() | (keys.rows == 0).any()):
            raise ValueError("calibration needs at least one real query and key; call update first")
        forward = balance(queries.covariance(), keys.covariance()).float().double()
        backward = torch.linalg.inv(forward).mT
        spread = _trace(forward @ _plain(queries) @ forward.mT) + _trace(
            backward @ _plain(keys) @ backward.mT
        )
        found = Calibration(
            queries.mean()[:, None], keys.mean()[:, None], forward, backward, spread[:, None, None]
        )
        if self._heads is None:
            found = Calibration(*(t.reshape(t.shape[1:]) for t in found))
            found = found._replace(
                query_center=found.query_center[0], key_center=found.key_center[0],
                mean_square=found.mean_square.reshape(()),
            )  # fmt: skip
        self._deliver(found)


def exact_dtype(x: Tensor) -> torch.dtype:
    """The smaller of float32 and float64 that holds such numbers exactly."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rows_per_head(
    query: Tensor, key: Tensor, mask: Tensor | None, dim: int, heads: int | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """A calibration batch by key head: for "query" and "key" rows ``(h, n, d)``, and which of them count.

    float64 on the CPU and bool ``(h, n)``, h = heads or 1; rows that do not count are zero.

    Raises:
        ValueError: shapes that do not fit, or NaN or infinity in a row that counts.
    """
    for name, x in (("query", query), ("key", key)):
        if x.ndim != 4 or x.shape[-1] != dim:
            raise ValueError(f"{name} must have shape (B, heads, tokens, {dim}), got {tuple(x.shape)}")
        if mask is not None and tuple(mask.shape) != (x.shape[0], x.shape[2]):
            raise ValueError(
                f"mask must have shape (B, tokens) = {(x.shape[0], x.shape[2])} to match {name}, "
                f"got {tuple(mask.shape)}"
            )
    if heads is not None and (key.shape[1] != heads or query.shape[1] % heads):
        raise ValueError(
            f"the map has heads={heads}: key must have {heads} heads and query a multiple, got "
            f"{key.shape[1]} and {query.shape[1]}"
        )
    found = {}
    for name, x in (("query", query), ("key", key)):
        real = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool) if mask is None else mask.cpu()
        kept = real[:, None].expand(-1, x.shape[1], -1)
        rows = x.detach().to("cpu", torch.float64).masked_fill(~kept[..., None], 0.0)
        if not rows.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity in a row that is not masked")
        shape = (heads or 1, -1)
        rows, kept = (t.unflatten(1, shape).transpose(0, 1).flatten(1, 3) for t in (rows, kept))
        found[name] = (rows, kept)
    return found


class RowSample:
    """An even sample of rows over batches, for each head: at most ``size``."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self._size, self._generator = size, generator
        self._heads: list[tuple[Tensor, Tensor]] = []  # rows (n, d), and a random number for each

    def update(self, rows: Tensor, kept: Tensor, dtype: torch.dtype) -> None:
        """Add rows ``(h, n, d)``, of which ``kept`` bool ``(h, n)`` count; ``dtype`` holds them exactly."""
        for head in range(len(rows)):
            new = rows[head][kept[head]].to(dtype)
            tickets = torch.rand(len(new), generator=self._generator, dtype=torch.float64)
            if len(self._heads) == head:
                self._heads.append((new[:0], tickets[:0]))
            new, tickets = (torch.cat(pair) for pair in zip(self._heads[head], (new, tickets), strict=True))
            # Rows with the smallest random numbers of all so far are an even sample of all so far.
            first = tickets.argsort()[: self._size]
            self._heads[head] = new[first], tickets[first]

    def rows(self) -> list[Tensor]:
        """For each head the sampled rows, float64 ``(n, d)``, in random order.

        Raises:
            ValueError: no row was seen.
        """
        if not self._heads or any(len(rows) == 0 for rows, _ in self._heads):
            raise ValueError("calibration needs at least one real query and key; call update first")
        return [rows.double() for rows, _ in self._heads]


def balance(query_covariance: Tensor, key_covariance: Tensor) -> Tensor:
    """The symmetric A ``(h, d, d)`` with the smallest ``tr(A Cq A^T) + tr(A^-T Ck A^-1)``."""
    root, inverse_root = _power(query_covariance, 0.5), _power(query_covariance, -0.5)
    square = inverse_root @ _power(root @ key_covariance @ root, 0.5) @ inverse_root
    return _power(square, 0.5)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    smallest = values.amax(-1, keepdim=True) * 1e-12
    powered: Tensor = (vectors * values.clamp(min=smallest).pow(exponent)[..., None, :]) @ vectors.mT
    return powered


def _plain(moments: Moments) -> Tensor:
    mean = moments.mean()
    return moments.products / moments.rows[..., None] - mean[:, :, None] * mean[:, None]


def _trace(matrix: Tensor) -> Tensor:
    diagonal: Tensor = matrix.diagonal(dim1=-2, dim2=-1)
    return diagonal.sum(-1)
