"""Masks: which keys a query may see (attention masks), or which tokens are real (lengths). True is kept."""

from __future__ import annotations

import torch
from torch import Tensor


class BaseMask:
    """Any mask: a new one defines :attr:`bool_matrix`. Other forms are made once, when asked for."""

    @property
    def bool_matrix(self) -> Tensor:
        """Bool, True where something is kept."""
        raise NotImplementedError(f"{type(self).__name__} must define bool_matrix")

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        return self.bool_matrix.shape

    @property
    def float_matrix(self) -> Tensor:
        """1 where kept, else 0."""
        if not hasattr(self, "_float_matrix"):
            self._float_matrix = self.bool_matrix.float()
        return self._float_matrix

    @property
    def additive_matrix(self) -> Tensor:
        """0 where kept, else minus infinity: to be added before a softmax."""
        return self._additive("_additive_matrix", -torch.inf)

    @property
    def additive_matrix_finite(self) -> Tensor:
        """As :attr:`additive_matrix`, with -1e24."""
        return self._additive("_additive_matrix_finite", -1e24)

    def _additive(self, name: str, hidden: float) -> Tensor:
        if not hasattr(self, name):
            kept = self.bool_matrix
            setattr(self, name, torch.zeros(kept.shape, device=kept.device).masked_fill_(~kept, hidden))
        found: Tensor = getattr(self, name)
        return found

    @property
    def lengths(self) -> Tensor:
        """How many entries of each row are kept, where these come first.

        Raises:
            ValueError: in some row they do not.
        """
        if not hasattr(self, "_lengths"):
            kept = self.bool_matrix
            counts = kept.long().sum(-1)
            first = torch.arange(kept.shape[-1], device=kept.device) < counts[..., None]
            if not torch.equal(first, kept):
                raise ValueError("mask has no lengths: in some row a kept entry comes after a hidden one")
            self._lengths = counts
        return self._lengths

    @property
    def all_ones(self) -> bool:
        """Whether everything is kept."""
        if not hasattr(self, "_all_ones"):
            self._all_ones = bool(self.bool_matrix.all())
        return self._all_ones

    @property
    def lower_triangular(self) -> bool:
        """Whether row i keeps entries 0..i, and no others."""
        if not hasattr(self, "_lower_triangular"):
            try:
                counts = self.lengths
            except ValueError:
                self._lower_triangular = False
            else:
                rows = torch.arange(1, counts.shape[0] + 1, device=counts.device)
                self._lower_triangular = counts.ndim == 1 and torch.equal(counts, rows)
        return self._lower_triangular


class FullMask(BaseMask):
    """Any mask given as a tensor; or one that keeps everything, which needs no matrix until it is asked for.

    Args:
        mask: bool tensor, copied; or N as a number.
        N, M: rows and columns of a mask that keeps everything; M is N by default.
        device: where such a matrix would be.

    Raises:
        ValueError: neither a mask nor N, or a mask that is not bool.
    """

    def __init__(
        self,
        mask: Tensor | int | None = None,
        N: int | None = None,
        M: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._mask: Tensor | None = None
        if isinstance(mask, Tensor):
            if mask.dtype != torch.bool:
                raise ValueError(f"mask must be a bool tensor, got {mask.dtype}; use mask.bool()")
            self._mask = mask.detach().clone()
            self._size = self._mask.shape
            return
        if isinstance(mask, int) and M is None:  # FullMask(N, M)
            N, M = mask, N
        if N is None:
            raise ValueError("FullMask needs a bool tensor mask, or the number N of rows; got neither")
        self._size = torch.Size((N, M or N))
        self._device = device
        self._all_ones = True

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        return self._size

    @property
    def bool_matrix(self) -> Tensor:
        """``(N, M)``, or as given."""
        if self._mask is None:
            self._mask = torch.ones(self._size, dtype=torch.bool, device=self._device)
        return self._mask


class LengthMask(BaseMask):
    """Row i keeps its first ``lengths[i]`` entries of ``max_len``.

    Args:
        lengths: int64 ``(N,)``. max_len: by default the largest length.
        device: by default that of the lengths.
    """

    def __init__(
        self, lengths: Tensor, max_len: int | None = None, device: torch.device | str | None = None
    ) -> None:
        self._device = device or lengths.device
        self._lengths = lengths.detach().clone().to(self._device)
        self._max_len = int(max_len or self._lengths.max())
        self._all_ones = bool((self._lengths == self._max_len).all())
        self._bool_matrix: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """``(N, max_len)``."""
        return torch.Size((*self._lengths.shape, self._max_len))

    @property
    def bool_matrix(self) -> Tensor:
        """``(N, max_len)``."""
        if self._bool_matrix is None:
            positions = torch.arange(self._max_len, device=self._device)
            self._bool_matrix = positions < self._lengths[:, None]
        return self._bool_matrix


class TriangularCausalMask(LengthMask):
    """Row i of N keeps entries 0..i."""

    def __init__(self, N: int, device: torch.device | str = "cpu") -> None:
        super().__init__(torch.arange(1, N + 1, device=device), N, device)
        self._lower_triangular = True
