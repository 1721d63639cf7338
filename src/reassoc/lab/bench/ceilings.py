"""What the machine can do at best, what a call needs, and so how well it uses the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...kernels._library import library
from .contenders import Contender
from .settings import DTYPES, Settings

COPIED = 256 << 20  # bytes: beyond any cache here
CHUNK = 64
MATMUL = 2048


def measure_ceilings(settings: Settings) -> dict[str, Any]:
    """Multiply-add and copy rates with the threads that contenders have.

    Returns:
        ``flops`` per second and ``flops_from`` (how it was measured), ``bytes`` per second copied,
        reads and writes both counted.
    """
    double = settings.dtype == "float64"
    native = _native_peak(settings.threads, double)
    if native is None:
        a, b = (torch.randn(MATMUL, MATMUL, dtype=torch.float64 if double else torch.float32) for _ in "ab")
        flops = 2 * MATMUL**3 / _best(lambda: torch.mm(a, b), 1.0)
        source = f"best torch matmul of {MATMUL} x {MATMUL} (no native module here: not the true peak)"
    else:
        flops, source = native, "multiply-adds in registers (native module)"
    source += ", " + ("float64" if double else "float32")
    from_, to = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)
    return {
        "flops": flops, "flops_from": source,
        "bytes": 2 * COPIED / _best(lambda: to.copy_(from_), 0.5),
    }  # fmt: skip


def _native_peak(threads: int, double: bool) -> float | None:
    native = library()
    peak = getattr(native, "fma_peak", None)
    return None if peak is None else float(peak(threads, double, 0.3))


def _best(call: Callable[[], object], seconds: float) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def counted(contender: Contender, settings: Settings, direction: str, length: int) -> float:
    """Multiplications and additions of one call, by formula: neither feature maps nor exponentials.

    Per token and head, r features, e values, C = 64: sum and decay rules (C + 1)(r + e) + 4 r e; delta
    rules 6 r e; softmax, causal, (N + 1)(d + e). A forward and backward pass counts three times.
    """
    r, e, d = contender.features, settings.value_dim, settings.head_dim
    heads = settings.batch * settings.heads
    softmax = contender.kind == "softmax"
    if direction == "step":
        return heads * (
            2 * (length + 1) * (d + e) if softmax else (6 if contender.problem.delta else 4) * r * e
        )
    if softmax:
        token = float((length + 1 if settings.causal else 2 * length) * (d + e))
    elif contender.problem.delta:
        token = 6.0 * r * e
    else:
        token = 4.0 * r * e + ((CHUNK + 1) * (r + e) if settings.causal else 0)
    return heads * length * token * (3 if direction == "backward" else 1)


def moved(contender: Contender, settings: Settings, direction: str, length: int, held: int) -> float:
    """Bytes that a call cannot avoid to move: inputs and outputs once.

    Backward: inputs and their gradients, the output and its gradient. Steps: what is held is read, and
    written too if it is a state.
    """
    d, e = settings.head_dim, settings.value_dim
    size = DTYPES[settings.dtype].itemsize
    tokens = settings.batch * settings.heads * (1 if direction == "step" else length)
    gates = contender.problem.delta + contender.problem.decays * (
        contender.features if contender.problem.rule == "kda" else 1
    )
    once = float(tokens * (2 * d + 2 * e + gates) * size)
    if direction == "step":
        return once + held * (1 if contender.kind == "softmax" else 2)
    return once * (2 if direction == "backward" else 1)


def shares(flops: float, bytes_: float, seconds: float, ceilings: dict[str, Any]) -> dict[str, Any]:
    """How a time compares with the ceilings.

    Returns:
        ``intensity`` in operations per byte, ``limit`` (``arithmetic`` or ``memory``: which of the two
        takes longer at its ceiling), ``share`` of the multiply-add ceiling, ``share_of_limit``.
    """
    times = {"arithmetic": flops / ceilings["flops"], "memory": bytes_ / ceilings["bytes"]}
    limit = max(times, key=lambda name: times[name])
    return {
        "intensity": flops / bytes_, "limit": limit,
        "share": times["arithmetic"] / seconds, "share_of_limit": times[limit] / seconds,
    }  # fmt: skip
