"""What a feature map hands to a kernel: a bounded part times the exponential of a logarithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Features(NamedTuple):
    """Features phi = mantissa * exp(log), kept apart so that nothing overflows on the way.

    Attributes:
        mantissa: ``(..., r)``, or ``None`` where every mantissa is one (positive exponential maps).
        log: ``(..., r)``, or ``(..., 1)`` where one logarithm serves a whole vector, or ``None``
            where every logarithm is zero (maps that are not exponential).
    """

    mantissa: Tensor | None
    log: Tensor | None

    @property
    def tensor(self) -> Tensor:
        """Whichever part is there: for shape, dtype and device."""
        part = self.mantissa if self.mantissa is not None else self.log
        assert part is not None
        return part

    def map(self, function: Callable[[Tensor], Tensor]) -> Features:
        """Apply a function of one tensor to both parts."""
        return Features(*(None if part is None else function(part) for part in self))

    def value(self) -> Tensor:
        """The features as plain numbers, ``(..., r)``; large logarithms overflow to infinity here."""
        if self.log is None:
            return self.tensor
        return self.log.exp() if self.mantissa is None else self.mantissa * self.log.exp()

    def hide(self, visible: Tensor) -> Features:
        """Features of zero wherever ``visible`` (broadcasts over ``(..., 1)``) is False.

        A logarithm becomes minus infinity; the mantissa zero as well, since it may hold NaN.
        """
        mantissa = None if self.mantissa is None else self.mantissa.masked_fill(~visible, 0.0)
        return Features(mantissa, None if self.log is None else self.log.masked_fill(~visible, -torch.inf))
