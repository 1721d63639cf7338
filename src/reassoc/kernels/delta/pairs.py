"""Products of features with the decay between them: ``sum_f x_if exp(D_ijf) k_jf`` for every pair of a chunk.

``D_ij`` is the sum of the gates after position j through position i. Nothing larger than one is ever
exponentiated and no long sums are subtracted, so that gates of -50 a token, and of minus infinity, are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..additive.chunks import decay_after
from ..additive.plain import decay_between


def pairs(
    rows: Tensor,  # (B, G, n, R, C, r): several kinds of rows for the same keys
    key: Tensor,  # (B, G, n, C, r)
    log_decay: Tensor | None,  # (B, G, n, C, 1 or r)
) -> Tensor:
    """``(B, G, n, R, C, C)``, row i and column j; what is above the diagonal means nothing."""
    if log_decay is not None and log_decay.shape[-1] > 1:
        return _by_feature(rows, key, log_decay)
    product: Tensor = (rows.flatten(3, 4) @ key.mT).unflatten(3, rows.shape[3:5])
    return product if log_decay is None else product * decay_between(log_decay).exp()[:, :, :, None]


def _by_feature(rows: Tensor, key: Tensor, log_decay: Tensor) -> Tensor:
    """Halves of halves: rows of a second half and keys of the first meet at the boundary between them.

    There both decays are at most one, and the features can be multiplied as a matrix product.
    """
    block = (rows * key[:, :, :, None]).sum(-1)[..., None, None]  # (B, G, n, R, C, 1, 1): the diagonal
    half = 1
    while half < key.shape[-2]:
        gates = log_decay.unflatten(-2, (-1, 2, half))
        late = rows.unflatten(-2, (-1, 2, half))[..., 1, :, :]
        late = late * gates[..., 1, :, :].cumsum(-2).exp()[:, :, :, None]
        early = key.unflatten(-2, (-1, 2, half))[..., 0, :, :] * decay_after(gates[..., 0, :, :]).exp()
        first, second = block.unflatten(4, (-1, 2)).unbind(5)
        upper = torch.cat([first, torch.zeros_like(first)], dim=-1)
        block = torch.cat([upper, torch.cat([late @ early.mT[:, :, :, None], second], dim=-1)], dim=-2)
        half *= 2
    whole: Tensor = block.squeeze(4)
    return whole
