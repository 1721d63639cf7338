"""When projections are drawn anew during training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .fast_attention import FastAttention
from .layers import find_modules


class ProjectionUpdater(nn.Module):
    """Counts calls in training and redraws every :class:`FastAttention` of a module once enough have passed.

    In evaluation nothing is counted and nothing drawn, so two calls give the same output.

    Args:
        instance: the module. It is a child, so a checkpoint names its entries here a second time.
        feature_redraw_interval: calls from one draw to the next; ``None``: never.

    Attributes:
        calls_since_last_redraw: buffer, an int64 number.
    """

    calls_since_last_redraw: Tensor

    def __init__(self, instance: nn.Module, feature_redraw_interval: int | None) -> None:
        super().__init__()
        self.instance = instance
        self.feature_redraw_interval = feature_redraw_interval
        self.register_buffer("calls_since_last_redraw", torch.tensor(0))

    def fix_projections_(self) -> None:
        """Never redraw again."""
        self.feature_redraw_interval = None

    def redraw_projections(self) -> None:
        """Count a call, or redraw if it is time; in evaluation do nothing."""
        if not self.training:
            return
        every = self.feature_redraw_interval
        if every is None or self.calls_since_last_redraw < every:
            self.calls_since_last_redraw += 1
            return
        for attention in find_modules(self.instance, FastAttention):
            attention.redraw_projection_matrix(attention.projection_matrix.device)
        self.calls_since_last_redraw.zero_()
