"""What was measured with: versions and the machine, for manifests."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import reassoc


def versions() -> dict[str, str]:
    """Of everything that decides numbers."""
    return {
        "reassoc": reassoc.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """What decides the order of sums."""
    return {
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def processor() -> dict[str, Any]:
    """What decides times, besides :func:`machine`: the processor, its vectors, the system."""
    return {
        "processor": _model(), "vectors": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.release()}",
    }  # fmt: skip


def _model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
