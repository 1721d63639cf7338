"""The native library `reassoc._native`: loaded once, or the reason why it is not."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

_NOT_BUILT = (
    "not built: reassoc was installed without a working GCC, or with REASSOC_NATIVE=0; "
    "install GCC (g++), then reassoc again (pip install -v shows what goes wrong)"
)


def openmp_runtimes() -> list[str]:
    """Files of the OpenMP runtimes in this process, torch's own first; empty where there is no /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line}
    runtimes = [f for f in files if Path(f).name.startswith(("libgomp", "libiomp", "libomp"))]
    beside = str(
        Path(torch.__file__).resolve().parent
    )  # torch/lib/..., or torch.libs/... of a repaired wheel
    return sorted(runtimes, key=lambda f: (not f.startswith(beside), f))


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("REASSOC_NATIVE") == "0":
        return None, "disabled: REASSOC_NATIVE=0 is set in the environment; unset it"
    # The module is linked to no OpenMP runtime (csrc/CMakeLists.txt says why): its symbols are looked up
    # among the global ones, where torch's runtime is put here, or the system's if torch has none. Without
    # either, loading fails below and says which symbol is missing.
    with suppress(OSError):
        ctypes.CDLL((openmp_runtimes() or ["libgomp.so.1"])[0], mode=ctypes.RTLD_GLOBAL)
    try:
        return import_module("reassoc._native"), "available"
    except ModuleNotFoundError:
        return None, _NOT_BUILT
    except Exception as error:  # a broken library must not take the rest of reassoc with it
        return None, f"failed to load: {error}; install reassoc again"


# On import, not at the first call: that one may be under torch.compile, which cannot trace a loader.
_MODULE, _REASON = _load()


def library() -> ModuleType | None:
    """The native library, or None; then :func:`reason` says why."""
    return _MODULE


def reason() -> str:
    """``"available"``, or why there is no native library and what to do."""
    return _REASON
