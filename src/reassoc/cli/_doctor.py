"""`reassoc doctor`: what is in use on this machine, and why."""

from __future__ import annotations

import json
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

CPUINFO = Path("/proc/cpuinfo")
# What the native kernels need of a processor, in the words of /proc/cpuinfo; widest first.
NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon": {"asimd"},
}
LOST = "speed only: backend 'torch' serves every call with the same results"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
) -> None:
    """Report versions, processor, native kernels, threads and extras: what is in use, and why."""
    found = report()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for part, entries in found.items():
        typer.echo(part)
        for name, value in entries.items():
            typer.echo(f"  {name:16} {_words(value)}")


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)


def report() -> dict[str, dict[str, Any]]:
    """Everything that `reassoc doctor` prints: part -> name -> text, number, truth value or list of texts."""
    import reassoc
    from reassoc.kernels._library import openmp_runtimes
    from reassoc.lab._machine import machine, processor, versions

    return {
        "versions": versions(),
        "machine": {
            **machine(),
            **processor(),
            "instruction sets": _instruction_sets(),
            "openmp runtimes": openmp_runtimes(),
        },
        "native kernels": _native(),
        "extras": _extras(),
        "backends": reassoc.backends(),
    }


def _native() -> dict[str, Any]:
    import reassoc
    from reassoc.kernels._library import library, reason

    module = library()
    if module is None:
        return {"in use": False, "why": reason(), "lost": LOST}
    same = module.version == reassoc.__version__
    return {
        "in use": True,
        "version": module.version if same else f"{module.version}: another version's; install reassoc again",
        "instruction set": module.isa,
        "chosen by": "REASSOC_ISA" if os.environ.get("REASSOC_ISA") else "the processor",
        "openmp": module.openmp or "no: built for one thread; install GCC with libgomp and install again",
        "file": module.__file__,
    }


def _instruction_sets() -> list[str]:
    """Those of NEEDS that the processor has; none where there is no /proc/cpuinfo to ask."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    return [isa for isa, needs in NEEDS.items() if needs <= flags]


def _extras() -> dict[str, str]:
    """Optional extras of this installation: "installed", or which packages are missing."""
    try:
        requirements = metadata.requires("reassoc") or []
    except metadata.PackageNotFoundError:
        return {"unknown": "reassoc runs from its source folder, not from an installation"}
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"extra == ['\"]([^'\"]+)", requirement)
        package = re.match(r"[\w.-]+", requirement)
        if extra and package:
            lacks = missing.setdefault(extra[1], [])
            try:
                metadata.version(package[0])
            except metadata.PackageNotFoundError:
                lacks.append(package[0])
    return {
        extra: "missing: " + ", ".join(lacks) if lacks else "installed" for extra, lacks in missing.items()
    }
