"""From what a kernel read to the output."""

from __future__ import annotations

from torch import Tensor

from ._normalize import divide, settle, unscale
from ._prepare import Queries, Settings


def finish(read: Tensor, log_row: Tensor | None, s: Settings, queries: Queries) -> Tensor:
    """Normalize what a kernel read: ``(B, H, N, c) -> (B, H, N, e)``."""
    log_row = queries.log_row if log_row is None else log_row
    if s.has_z:
        return divide(read, log_row, s.eps, s.undefined, queries.empty)
    output = unscale(read, log_row)
    if queries.empty is not None:
        bad = queries.empty[..., None]
        output = settle(output, bad, s.undefined, "the query's features sum to zero")
    return output
