"""The experiment: the closed form, then every training; each finished training is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._parts import Parts
from .._machine import machine, versions
from .._progress import Progress
from ..fidelity import Row
from .cases import capacity as capacity_of
from .closed import closed
from .keys import Stored, made_keys
from .published import PUBLISHED_DIM, published
from .settings import Settings, check_cases
from .train import STOPS, Outcome, Run, train


@dataclass(frozen=True)
class Results:
    """Everything a capacity experiment found.

    Attributes:
        runs: one row per trained model. closed: rows of the closed form, see :func:`.closed.closed`.
        curves: loss along every training. times: what every training took. manifest: what was done, how.
    """

    runs: list[Row]
    closed: list[Row]
    curves: list[Row]
    times: list[Row]
    manifest: dict[str, Any]


def capacity(
    settings: Settings,
    *,
    keys: tuple[list[Stored], str, str] | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
) -> Results:
    """Run an experiment.

    Args:
        settings: what to compute and to train.
        keys: of :func:`.keys.load_keys` for the closed form, with the file's SHA-256 and name; else made.
        resume: folder for finished trainings; an experiment with the same key size and step limit on the
            same machine continues from there. Call :func:`forget_parts` once the results are written.
        progress: called with (done, total, what is next).

    Raises:
        InputError: a map that cannot have the size of the file's keys.
    """
    tell = progress or (lambda *_: None)
    runs = settings.runs()
    cases = settings.closed()
    stored: list[Stored] = []
    if cases and keys is not None:
        stored = keys[0]
        for dim in {one.key.shape[1] for one in stored}:
            check_cases(cases, dim)
    elif cases:
        stored = made_keys(settings.dim, settings.closed_pairs(), settings.seeds[0])
    total = len(runs) + len(stored)
    rows: list[Row] = []
    for done, one in enumerate(stored):
        tell(done, total, f"closed form: {one.name} keys, {len(one.key):,}")
        rows += [closed(one, case, settings.seeds[0]) for case in cases]
    results = Results([], rows, [], [], _manifest(settings, keys))
    parts = Parts(resume, _decisive(settings))
    for done, run in enumerate(runs, total - len(runs)):
        report = _report(tell, done, total, title(run))
        report("")
        outcome = _finished(parts.get(_name(run)))
        if outcome is None:
            outcome = train(run, dim=settings.dim, limit=settings.limit, report=report)
            parts.put(_name(run), outcome._asdict())
        _add(results, run, outcome, settings.dim)
    tell(total, total, "")
    return results


def forget_parts(folder: Path, settings: Settings) -> None:
    """Remove the finished trainings of an experiment whose results have been written."""
    Parts(folder, _decisive(settings)).forget()


def title(run: Run) -> str:
    """A training in words."""
    return f"setting {run.setting}: {run.case.name}, {run.pairs:,} pairs, seed {run.seed}"


def _report(tell: Progress, done: int, total: int, what: str) -> Callable[[str], None]:
    return lambda more: tell(done, total, f"{what}, {more}" if more else what)


def _decisive(settings: Settings) -> dict[str, Any]:
    """What a training's numbers depend on besides the training itself."""
    return {
        "format": "reassoc-capacity-1", "versions": versions(), "machine": machine(), "dim": settings.dim,
        "limit": settings.limit,
    }  # fmt: skip


def _manifest(settings: Settings, keys: tuple[list[Stored], str, str] | None) -> dict[str, Any]:
    found = _decisive(settings) | {"settings": dict(vars(settings))}
    if keys is not None:
        found["keys"] = {"name": keys[2], "sha256": keys[1]}
    return found


def _name(run: Run) -> str:
    return f"{run.setting}-{run.case.name}-{run.pairs}-{run.seed}".replace(":", "_").replace("=", "_")


def _finished(stored: Any) -> Outcome | None:
    """A training as it ended; ``None`` if there is none, or not a whole one: trained again."""
    try:
        found = Outcome(**stored)
        if found.stopped in STOPS and found.steps == found.curve[-1][0]:
            return found
    except (TypeError, IndexError):
        pass
    return None


def _add(results: Results, run: Run, outcome: Outcome, dim: int) -> None:
    features = None if run.case.softmax else capacity_of(run.case.build(dim, run.seed))
    about: Row = {
        "setting": run.setting, "case": run.case.name, "map": run.case.map, "rule": run.case.rule,
        "normalize": run.case.normalize, "features": features, "pairs": run.pairs, "seed": run.seed,
    }  # fmt: skip
    # Without repeats every answer is asked for, and the reads are a matrix of rank r at most that should
    # be a permutation: half of what Eckart and Young leave, whatever is learned.
    floor = None
    if features is not None and run.setting == 1:
        floor = 0.5 * max(0.0, 1 - features / run.pairs)
    theirs = published(run.setting, run.case.name, run.pairs) if dim == PUBLISHED_DIM else None
    results.runs.append(
        about
        | {
            "loss": outcome.loss, "published": theirs, "floor": floor, "best": outcome.best,
            "long_loss": outcome.long_loss, "steps": outcome.steps, "ended": STOPS[outcome.stopped],
        }
    )  # fmt: skip
    key = {name: about[name] for name in ("setting", "case", "pairs", "seed")}
    results.curves.extend(key | {"step": step, "loss": loss} for step, loss in outcome.curve)
    results.times.append(
        key | {"steps": outcome.steps, "seconds": outcome.seconds, "processor_seconds": outcome.processor}
    )
