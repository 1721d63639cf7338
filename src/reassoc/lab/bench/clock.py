"""Times that can be compared: one process, warmed up, taking turns, a ratio from every round."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ENOUGH = 1e-3  # seconds: a shorter call is repeated within a round until it takes as long
MOST = 10_000  # calls in a round
SETTLE = 3  # calls before any is counted, of those that are short


@dataclass(frozen=True)
class Timing:
    """Times of one contender.

    Attributes:
        calls: in each round. seconds: per call, one number a round.
    """

    calls: int
    seconds: tuple[float, ...]


def turns(count: int, round_: int) -> list[int]:
    """The order of a round: every other one runs backwards, every pair of them starts one further.

    So over many rounds each contender is first, and last, as often as the others, and follows different
    ones.
    """
    order = [(index + round_ // 2) % count for index in range(count)]
    return order[::-1] if round_ % 2 else order


def time_rounds(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Timing]:
    """Time every call once in each of ``repeats`` rounds, in turns.

    Args:
        calls: name -> the call. clock: seconds. progress: called with the number of rounds done.
    """
    names = list(calls)
    counts = {name: _count(calls[name], clock) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection belongs to no contender
    try:
        for round_ in range(repeats):
            for index in turns(len(names), round_):
                name = names[index]
                seconds[name].append(_clock(calls[name], counts[name], clock) / counts[name])
            if progress is not None:
                progress(round_ + 1)
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(counts[name], tuple(seconds[name])) for name in names}


def _count(call: Callable[[], object], clock: Callable[[], float]) -> int:
    """Warm up, and how often to call so that a round takes long enough for the clock."""
    took = _clock(call, 1, clock)
    for _ in range(SETTLE):
        if took >= ENOUGH:
            break
        took = _clock(call, 1, clock)
    return max(1, min(MOST, math.ceil(ENOUGH / took) if took > 0 else MOST))


def _clock(call: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        call()
    return clock() - start
