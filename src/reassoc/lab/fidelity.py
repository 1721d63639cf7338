"""How far is a kernel from softmax, on these queries, keys and values? The sweep behind the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import InputError
from .._parts import Parts
from ._machine import machine, versions
from ._progress import Progress
from ._sites import Site
from .activations import Activations
from .candidates import Candidate, candidates
from .measure import HEAD_COLUMNS, SEED_COLUMNS, Measured, measure
from .softmax import Split, check_divisible, split

DEFAULT_MAPS = (
    "mean", "elu+1", "relu", "softmax", "dpfp-1", "taylor", "generalized-relu", "trig:calibrated",
    "favor+", "favor+:calibrated", "favor++:calibrated", "landmark",
)  # fmt: skip
DEFAULT_WIDTHS = (64, 256, 1024)
DEFAULT_SEEDS = (0, 1, 2, 3, 4)
# The plain map at a width that nobody would choose, to compare calibrated ones with.
YARDSTICK = Candidate("favor+", 4096)
DEFAULT_TARGET = 0.1

Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """Everything a fidelity sweep found.

    Attributes:
        seeds: one row per site, head, map, width and seed, with ``measure.SEED_COLUMNS``.
        heads: one row per site, head, map and width, with ``measure.HEAD_COLUMNS`` and costs.
        manifest: what was measured, with what, how to repeat it.
    """

    seeds: list[Row]
    heads: list[Row]
    manifest: dict[str, Any]


def fidelity(
    activations: Activations,
    name: str,
    *,
    maps: list[str] | None = None,
    widths: list[int] | None = None,
    seeds: list[int] | None = None,
    target: float = DEFAULT_TARGET,
    resume: Path | None = None,
    progress: Progress | None = None,
) -> Results:
    """Measure every map, width and seed on every head of the input.

    Args:
        activations: from :func:`reassoc.lab.load_activations` or :func:`reassoc.lab.synthetic`.
        name: what to call the input in the manifest.
        maps: ``name[:option...]`` as for ``reassoc fidelity --maps``; default a choice of untrained maps,
            plus ``favor+`` at 4096 features to compare with.
        widths: numbers of features r for random maps. seeds: draws of each random map.
        target: relative output error that is good enough.
        resume: folder for finished parts; a sweep with the same settings continues from there. They
            stay there once the results are written.
        progress: called with (done, total, what is next).

    Raises:
        InputError: unknown maps, impossible widths, no seeds, or sites too short to divide.
    """
    chosen = candidates(
        list(DEFAULT_MAPS if maps is None else maps), list(DEFAULT_WIDTHS if widths is None else widths)
    )
    if maps is None and widths is None:
        chosen.append(YARDSTICK)
    seeds = sorted(set(DEFAULT_SEEDS if seeds is None else seeds))
    if not seeds or seeds[0] < 0 or seeds[-1] >= 1 << 63:
        raise InputError("--seeds: give at least one seed, each 0 or more and below 2^63")
    if not (target > 0 and math.isfinite(target)):
        raise InputError(f"--target: a relative error above 0, got {target}")
    for site in activations.sites:  # before any work, and before anything is written
        check_divisible(site)
        for candidate in chosen:
            if not candidate.random:
                _build(candidate, site)
    manifest = _manifest(activations, name, chosen, seeds, target)
    parts = Parts(resume, manifest)
    seed_rows: list[Row] = []
    head_rows: list[Row] = []
    total = len(activations.sites) * len(chosen)
    done = 0
    for site in activations.sites:
        data: Split | None = None
        for candidate in chosen:
            if progress is not None:
                progress(done, total, f"{site.name}  {candidate.name} {candidate.width or ''}")
            found = _finished(parts.get(f"{done:05}"))
            if found is None:
                data = split(site) if data is None else data
                found = measure(candidate, data, seeds)
                parts.put(f"{done:05}", vars(found))
            about: Row = {
                "site": site.name,
                "model": site.model,
                "layer": site.layer,
                "causal": site.causal,
                "map": candidate.name,
                "features": found.features,
            }
            dim, columns = site.query.shape[-1], site.value.shape[-1]
            # A query head pays for its own features and read, and for its share of its key head's.
            share = 1 + len(site.key_heads) / len(site.query_heads)
            work = candidate.feature_operations(dim, found.features) + 2 * found.features * (columns + 1)
            cost = {
                "operations_per_token": round(share * work),
                "state_bytes": 4 * found.features * (columns + 1),
            }
            for index, head in enumerate(site.query_heads):
                head_rows.append(
                    about | {"head": head} | cost | {c: found.heads[c][index] for c in HEAD_COLUMNS}
                )
                for seed, values in found.seeds.items():
                    numbers = {c: values[c][index] for c in SEED_COLUMNS}
                    seed_rows.append(about | {"head": head, "seed": seed} | numbers)
            done += 1
    if progress is not None:
        progress(total, total, "")
    return Results(seed_rows, head_rows, manifest)


def _build(candidate: Candidate, site: Site) -> None:
    dim = site.query.shape[-1]
    try:
        candidate.build(dim, len(site.key_heads), site.scale, 0)
    except ValueError as error:
        raise InputError(f"--maps: {candidate.name} does not fit head size {dim}: {error}") from None


def _manifest(
    activations: Activations, name: str, chosen: list[Candidate], seeds: list[int], target: float
) -> dict[str, Any]:
    return {
        "format": "reassoc-fidelity-1",
        "versions": versions(),
        "machine": machine(),
        "input": {"name": name, "sha256": activations.sha256, "provenance": activations.provenance},
        "sites": {
            site.name: {
                "model": site.model,
                "layer": site.layer,
                "causal": site.causal,
                "scale": site.scale,
                "query_heads": list(site.query_heads),
                "key_heads": list(site.key_heads),
                "sequence_lengths": site.cu_seqlens.diff().tolist(),
                "head_size": site.query.shape[-1],
                "value_size": site.value.shape[-1],
            }
            for site in activations.sites
        },
        "candidates": [{"map": c.name, "features": c.width} for c in chosen],
        "seeds": seeds,
        "target_error": target,
    }


def forget_parts(folder: Path, results: Results) -> None:
    """Remove the finished parts of a sweep whose results have been written."""
    Parts(folder, results.manifest).forget()


def _finished(stored: Any) -> Measured | None:
    """A part as it was measured; ``None`` if there is none, or not a whole one: measured again."""
    try:
        by_seed = {int(seed): columns for seed, columns in stored["seeds"].items()}
        whole = set(stored["heads"]) == set(HEAD_COLUMNS) and by_seed
        if whole and all(set(columns) == set(SEED_COLUMNS) for columns in by_seed.values()):
            return Measured(stored["features"], by_seed, stored["heads"])
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return None
