"""The benchmark: judge, take turns, measure memory; every finished cell is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._parts import Parts
from ..._threads import use_threads
from .._machine import machine, processor, versions
from .._progress import Progress
from .._series import quartiles
from .ceilings import counted, measure_ceilings, moved, shares
from .clock import time_rounds
from .contenders import Contender, Ready, UnsupportedError, ours, plain, softmax
from .gate import arranged, cotangent, judge, perform
from .inputs import make_inputs
from .memory import Case, measure_memory
from .peers import peers
from .ratios import MEASURED, SKIPPED, WRONG, Row, crossovers, ratios
from .settings import Problem, Settings


@dataclass(frozen=True)
class Results:
    """Everything a benchmark found.

    Attributes:
        rows: one per contender, direction and length. ratios: see :func:`.ratios.ratios`.
        crossovers: see :func:`.ratios.crossovers`. manifest: what was measured, with what; ceilings.
    """

    rows: list[Row]
    ratios: list[Row]
    crossovers: list[Row]
    manifest: dict[str, Any]


def contenders_of(settings: Settings) -> tuple[list[Contender], dict[str, str]]:
    """All who take part, ours first; and of each peer its version or why it is missing.

    Raises:
        InputError: an unknown peer, or one named that is not installed.
    """
    mine = [ours(settings, problem, name) for problem in settings.problems for name in settings.backends]
    others = [softmax(settings)]
    if Problem("elu+1", "sum") in settings.problems:
        others.append(plain(settings))
    found, about = peers(settings)
    return [*mine, *others, *found], about


def bench(
    settings: Settings,
    *,
    resume: Path | None = None,
    progress: Progress | None = None,
    contenders: list[Contender] | None = None,
) -> Results:
    """Run a benchmark.

    Args:
        settings: what to compare. resume: folder for finished parts; a run with the same settings on the
            same machine continues from there. Call :func:`forget_parts` once results are written.
        progress: called with (done, total, what is next).
        contenders: instead of those that the settings name; memory is then not measured.

    Raises:
        InputError: unknown or missing peers.
    """
    with use_threads(settings.threads):
        return _bench(settings, resume, progress or (lambda *_: None), contenders)


def forget_parts(folder: Path, results: Results) -> None:
    """Remove the finished parts of a run whose results have been written."""
    Parts(folder, results.manifest["key"]).forget()


def _bench(
    settings: Settings, resume: Path | None, progress: Progress, given: list[Contender] | None
) -> Results:
    contenders, about = contenders_of(settings) if given is None else (given, {})
    key = {
        "format": "reassoc-bench-1", "versions": versions(), "machine": machine() | processor(),
        "settings": settings.to_json(), "peers": about,
    }  # fmt: skip
    parts = Parts(resume, key)
    total = len(settings.directions) * len(settings.lengths) + 1
    progress(0, total, "ceilings of this machine")
    ceilings = parts.get("ceilings")
    if ceilings is None:
        ceilings = measure_ceilings(settings)
        parts.put("ceilings", ceilings)
    rows: list[Row] = []
    done = 0
    for direction in settings.directions:
        known: dict[str, tuple[int, float]] = {}
        for length in sorted(set(settings.lengths)):
            name = f"{direction}-{length}"
            cell = parts.get(name)
            if cell is None:
                report = _report(progress, done, total, f"{direction}, {length:,} tokens")
                cell = _cell(contenders, settings, direction, length, known, report)
                parts.put(name, cell)
            for row in cell:
                if row["status"] == MEASURED:
                    known[row["contender"]] = (length, min(row["samples"]))
            rows += cell
            done += 1
    if given is None:
        progress(done, total, "memory")
        remembered = parts.get("memory")
        if remembered is None:
            remembered = _memory(rows, settings, _report(progress, done, total, "memory"))
            parts.put("memory", remembered)
    else:
        remembered = {"bytes": [], "why": "memory: not measured for contenders given by the caller"}
    by_name = {c.name: c for c in contenders}
    found = {(name, way, length): size for (name, way, length), size in remembered["bytes"]}
    for row in rows:
        _derive(row, by_name[row["contender"]], settings, ceilings)
        row["memory"] = found.get((row["contender"], row["direction"], row["length"]))
    pairs = ratios(rows, contenders, settings)
    manifest = {
        "key": key,
        "ceilings": ceilings,
        "memory": remembered["why"],
        "contenders": _roll(contenders),
    }
    progress(total, total, "")
    return Results(rows, pairs, crossovers(pairs), manifest)


def _report(progress: Progress, done: int, total: int, what: str) -> Callable[[str], None]:
    return lambda more: progress(done, total, f"{what}: {more}" if more else what)


def _roll(contenders: list[Contender]) -> list[Row]:
    return [
        {"name": c.name, "kind": c.kind, "computes": c.problem.title, "features": c.features or None}
        for c in contenders
    ]


def _cell(
    contenders: list[Contender],
    settings: Settings,
    direction: str,
    length: int,
    known: dict[str, tuple[int, float]],
    report: Callable[[str], None],
) -> list[Row]:
    """Judge all contenders at a length, then time those that are right, in turns."""
    rows, calls = [], {}
    for contender in contenders:
        if direction not in contender.directions or (direction == "step" and contender.step is None):
            continue
        if direction == "step" and not settings.causal:
            continue
        report(contender.name)
        row: Row = {
            "contender": contender.name, "direction": direction, "length": length, "status": SKIPPED,
            "reason": "", "error": None, "budget": None, "judged_at": None, "held": None,
            "calls": None, "samples": None,
        }  # fmt: skip
        rows.append(row)
        try:
            ready = _admit(contender, settings, direction, length, known, row)
        except UnsupportedError as error:
            row["reason"] = str(error)
        except Exception as error:  # whatever somebody's library raises: the others go on, and it is told
            row["reason"] = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        else:
            if ready is not None:
                row["held"] = ready.held
                weight = arranged(cotangent(settings, length), ready)
                calls[contender.name] = _bound(ready, direction, weight)
    report("taking turns")
    timings = time_rounds(
        calls, settings.repeats, progress=lambda n: report(f"round {n} of {settings.repeats}")
    )
    for row in rows:
        if row["contender"] in timings:
            timing = timings[row["contender"]]
            row.update(status=MEASURED, calls=timing.calls, samples=list(timing.seconds))
    return rows


def _bound(ready: Ready, direction: str, weight: torch.Tensor) -> Callable[[], object]:
    return lambda: perform(ready, direction, weight)


def _admit(
    contender: Contender,
    settings: Settings,
    direction: str,
    length: int,
    known: dict[str, tuple[int, float]],
    row: Row,
) -> Ready | None:
    """The call to be timed, or ``None`` with the row saying why not."""
    if contender.name in known and not _affordable(contender, settings, direction, length, known, row):
        return None
    verdict = judge(contender, settings, direction, length)
    row.update(error=verdict.error, budget=verdict.budget, judged_at=verdict.tokens)
    if not verdict.right:
        row.update(
            status=WRONG,
            reason=f"relative error {verdict.error:.1e}, allowed {verdict.budget:.0e}: not timed",
        )
        return None
    if contender.name not in known:
        known[contender.name] = (verdict.tokens, verdict.seconds)
        if verdict.seconds > settings.limit / 4:  # the first call pays for loading: judge a second one
            known[contender.name] = (verdict.tokens, judge(contender, settings, direction, length).seconds)
        if not _affordable(contender, settings, direction, length, known, row):
            return None
    inputs = make_inputs(settings, contender.problem, length + (direction == "step"))
    return contender.ready(inputs, direction)


def _affordable(
    contender: Contender,
    settings: Settings,
    direction: str,
    length: int,
    known: dict[str, tuple[int, float]],
    row: Row,
) -> bool:
    """Whether a call can be expected to stay within the limit, going by an earlier one."""
    tokens, seconds = known[contender.name]
    power = contender.power - (direction == "step")
    expected = seconds * (length / tokens) ** power
    if expected > settings.limit:
        row["reason"] = (
            f"a call would take about {expected:.2g} s (it took {seconds:.2g} s at {tokens:,} tokens); "
            f"the limit is {settings.limit:g} s"
        )
    return expected <= settings.limit


def _memory(rows: list[Row], settings: Settings, report: Callable[[str], None]) -> dict[str, Any]:
    """Peak memory of everyone, forward and backward, at the longest length that it was timed at."""
    cases: list[Case] = []
    for direction in ("forward", "backward"):
        timed = [r for r in rows if r["direction"] == direction and r["status"] == MEASURED]
        longest = {r["contender"]: r["length"] for r in timed}
        cases += [(name, direction, length) for name, length in longest.items()]
    if not cases:
        return {"bytes": [], "why": ""}
    sizes, why = measure_memory(settings, cases, lambda n: report(f"case {n} of {len(cases)}"))
    return {"bytes": [[list(case), size] for case, size in zip(cases, sizes, strict=True)], "why": why}


def _derive(row: Row, contender: Contender, settings: Settings, ceilings: dict[str, Any]) -> None:
    """Medians and shares; nothing for a row without valid times."""
    names = ("seconds", "lower", "upper", "flops", "bytes", "intensity", "limit", "share", "share_of_limit")
    row.update(dict.fromkeys(names))
    if row["status"] != MEASURED:
        return
    middle = quartiles(row["samples"])
    assert middle is not None
    flops = counted(contender, settings, row["direction"], row["length"])
    moves = moved(contender, settings, row["direction"], row["length"], row["held"] or 0)
    row.update(lower=middle[0], seconds=middle[1], upper=middle[2], flops=flops, bytes=moves)
    row.update(shares(flops, moves, middle[1], ceilings))
