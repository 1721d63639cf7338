"""When a difference between two things counts: seeds differ, too."""

from __future__ import annotations

from collections.abc import Sequence

SPREAD = "within the spread"


def compared(mine: Sequence[float], others: Sequence[float], margin: float) -> str:
    """``"better"`` or ``"worse"`` only where every seed of one lies beyond every seed of the other.

    Args:
        mine, others: scores of each seed, larger is better. margin: how far beyond, for what is left when
            there is one seed only.
    """
    if min(mine) > max(others) + margin:
        return "better"
    return "worse" if max(mine) < min(others) - margin else SPREAD
