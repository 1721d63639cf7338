"""A short causal convolution: what lets a token see its neighbours before attention does."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """A causal depthwise convolution, ``(B, N, channels) -> (B, N, channels)``, that can be streamed.

    Starts near the identity (the token itself, plus small noise), so that a fresh layer is what it would
    be without it.

    Args:
        channels: number of channels. kernel: tokens seen, the current one included.

    Source: So et al. 2021 (Primer); Gu and Dao 2023 (Mamba); Arora et al. 2024 (Zoology).
    """

    papers = ("so2021",)

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.channels, self.kernel = channels, kernel
        self.weight = nn.Parameter(torch.empty(kernel, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The token itself, plus noise."""
        nn.init.normal_(self.weight, std=0.1)
        with torch.no_grad():
            self.weight[-1] += 1.0

    def forward(
        self, x: Tensor, mask: Tensor | None = None, recent: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve, and say what the next tokens will need.

        Args:
            x: ``(B, N, channels)``. mask: bool ``(B, N)``, True = real; the others are passed over, as if
                they were not there.
            recent: ``(B, kernel - 1, channels)``, inputs before x; default zeros.

        Returns:
            ``(B, N, channels)``, and the last ``kernel - 1`` real inputs, ``(B, kernel - 1, channels)``.
        """
        length, kept = x.shape[1], self.kernel - 1
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        if recent is None:
            recent = x.new_zeros(x.shape[0], kept, self.channels)
        seen = torch.cat([recent.to(x.dtype), x], dim=1)
        back_to: Tensor | None = None
        if mask is not None:
            # Padding goes in front of everything: what was recent then lies next to the first real input.
            real = torch.cat([mask.new_ones(x.shape[0], kept), mask], dim=1)
            order = real.long().argsort(dim=1, stable=True)
            seen = seen.gather(1, order[..., None].expand(-1, -1, self.channels))
            back_to = (order.argsort(dim=1)[:, kept:] - kept).clamp(min=0)
        # Shifted products stay in this layout; a convolution of torch would transpose to channels first.
        output = seen[:, kept:] * self.weight[-1]
        for back in range(1, self.kernel):
            output = torch.addcmul(
                output, seen[:, kept - back : kept - back + length], self.weight[-1 - back]
            )
        if back_to is not None:
            output = output.gather(1, back_to[..., None].expand(-1, -1, self.channels))
        return output, seen[:, length:].clone()

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return f"channels={self.channels}, kernel={self.kernel}"
