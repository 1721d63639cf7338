"""The interface of a feature map: how a key, and a query, becomes r numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from .._features import Features


class FeatureMap(nn.Module):
    """Base of all feature maps: ``(..., dim) -> (..., feature_dim)``.

    A new map defines :meth:`query` and :meth:`key` (the same function twice for a symmetric map), or
    derives from :class:`ExponentialMap` and defines their logarithms. Features keep the dtype of their
    input. What distinguishes two maps of its class belongs in :attr:`fingerprint`.

    Args:
        dim: size d of a query and of a key.
        feature_dim: number r of features.
        heads: number of key heads G, for maps with parameters of their own per head; the inputs then
            have G on axis -3. ``None``: one set of parameters for every head.

    Attributes:
        nonnegative: whether no feature is ever negative; attention weights are then averages.
        symmetric: whether queries and keys are treated alike.
        papers: what :func:`reassoc.citation` prints for it.
    """

    name: ClassVar[str]
    papers: ClassVar[tuple[str, ...]] = ()
    nonnegative: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def __init__(self, dim: int, feature_dim: int, heads: int | None = None) -> None:
        super().__init__()
        for what, number in (("dim", dim), ("feature_dim", feature_dim), ("heads", heads)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{what} must be a positive integer, got {number!r}")
        self.dim, self.feature_dim, self.heads = dim, feature_dim, heads

    @property
    def symmetric(self) -> bool:
        """Whether ``phi(x)`` has one meaning."""
        return True

    @property
    def fingerprint(self) -> str:
        """What a state remembers of the map that made it. Learned weights are not part of it."""
        return f"{self.name}(dim={self.dim}, feature_dim={self.feature_dim}, heads={self.heads})"

    def query(self, x: Tensor) -> Tensor:
        """Features of queries, ``(..., d) -> (..., r)``."""
        raise NotImplementedError(f"{type(self).__name__} must define query(x)")

    def key(self, x: Tensor) -> Tensor:
        """Features of keys, ``(..., d) -> (..., r)``."""
        raise NotImplementedError(f"{type(self).__name__} must define key(x)")

    def query_features(self, x: Tensor) -> Features:
        """Features of queries in the form that kernels take."""
        return Features(self.query(x), None)

    def key_features(self, x: Tensor) -> Features:
        """Features of keys in the form that kernels take."""
        return Features(self.key(x), None)

    def log_query_factor(self, x: Tensor) -> Tensor | None:
        """Logarithm ``(...,)`` of a factor left out of a query's features; ``None``: nothing is.

        It cancels under attention normalization and is put back wherever it does not.
        """
        return None

    def forward(self, x: Tensor) -> Tensor:
        """``phi(x)`` for a symmetric map, ``(..., d) -> (..., r)``.

        Raises:
            TypeError: the map treats queries and keys differently; call ``query`` or ``key``.
        """
        self._require_symmetric("query(x) or key(x)")
        return self.key(x)

    def _require_symmetric(self, instead: str) -> None:
        if not self.symmetric:
            raise TypeError(f"{self.name} treats queries and keys differently here: call {instead}")

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        heads = "" if self.heads is None else f", heads={self.heads}"
        return f"dim={self.dim}, feature_dim={self.feature_dim}{heads}"


class ExponentialMap(FeatureMap):
    """A map with features ``exp(l)``: kernels take the logarithms, so nothing overflows."""

    nonnegative = True

    def log_query(self, x: Tensor) -> Tensor:
        """Logarithms of the features of queries, ``(..., d) -> (..., r)``."""
        raise NotImplementedError(f"{type(self).__name__} must define log_query(x)")

    def log_key(self, x: Tensor) -> Tensor:
        """Logarithms of the features of keys, ``(..., d) -> (..., r)``."""
        raise NotImplementedError(f"{type(self).__name__} must define log_key(x)")

    def log_query_factors(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """``left (..., k)`` and ``right (r, k)`` or ``(G, r, k)`` with ``log_query(x) = left @ right.mT``.

        For maps whose logarithm is such a product: a kernel can then make it where it is used.
        ``None``: it is not.
        """
        return None

    def log_key_factors(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """As :meth:`log_query_factors`, for ``log_key``."""
        return None

    def query(self, x: Tensor) -> Tensor:
        """Features of queries, ``(..., d) -> (..., r)``; infinity where they overflow."""
        return self.log_query(x).exp()

    def key(self, x: Tensor) -> Tensor:
        """Features of keys, ``(..., d) -> (..., r)``; infinity where they overflow."""
        return self.log_key(x).exp()

    def query_features(self, x: Tensor) -> Features:
        """Logarithms only."""
        return Features(None, self.log_query(x))

    def key_features(self, x: Tensor) -> Features:
        """Logarithms only."""
        return Features(None, self.log_key(x))

    def log_forward(self, x: Tensor) -> Tensor:
        """Logarithm of ``phi(x)`` for a symmetric map, ``(..., d) -> (..., r)``."""
        self._require_symmetric("log_query(x) or log_key(x)")
        return self.log_key(x)
