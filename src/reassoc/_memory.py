"""How much memory this process holds, and held at most; on Linux."""

from __future__ import annotations

from pathlib import Path


def resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the most since :func:`forget_peak`) in bytes.

    Raises:
        OSError: a system that does not tell.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Start the high-water mark again from what is held now; ``OSError`` where that cannot be done."""
    Path("/proc/self/clear_refs").write_text("5")
