"""`reassoc bench`: speed and memory of linear attention against softmax and other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._command import command
from ._lists import numbers, words

if TYPE_CHECKING:
    from ..lab.bench import Settings

LIST = "LIST"


def bench(
    context: typer.Context,
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens of a call; for steps, keys seen before. [256,1024,4096]", metavar=LIST),
    ] = None,
    maps: Annotated[
        str | None,
        typer.Option(
            help="Feature maps as in `reassoc fidelity`: elu+1, favor+, identity, dpfp-2, ... Each with "
            "every rule. Default without --maps and --rules: elu+1 and favor+ with sum, identity with "
            "decay, delta and gated-delta.",
            metavar=LIST,
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            help="Update rules: sum, decay, delta, gated-delta, kda. Each with every map.", metavar=LIST
        ),
    ] = None,
    directions: Annotated[
        str | None,
        typer.Option(
            help="forward, backward (forward and backward together), step (one decode step). "
            "[forward,backward,step]",
            metavar=LIST,
        ),
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            help="Of our own calls: auto, native, torch; more than one are compared. [auto]", metavar=LIST
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Other libraries: fast-transformers, performer-pytorch, fla-simple-gla, fla-delta, "
            "fla-gated-delta, fla-kda, transformers, opengdn; or none. Default: those installed that "
            "compute one of the cases.",
            metavar=LIST,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Heads; key heads are as many.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a query and a key.")] = 64,
    value_dim: Annotated[int | None, typer.Option(help="Size of a value. Default: --head-dim.")] = None,
    features: Annotated[
        int | None,
        typer.Option(help="Features per head of random maps. Default: d ln d, rounded up."),
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            help="attention, sum, sum+attention or none, of our own calls. Default: as published for map "
            "and rule; peers and yardstick are compared with that.",
        ),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal/--bidirectional", help="Delta rules and steps are causal only.")
    ] = True,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="Default: what torch uses.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; every contender is timed once in each.")] = 7,
    limit: Annotated[
        float,
        typer.Option(help="Seconds that one call may take; what would take longer is left out, and said."),
    ] = 2.0,
    seed: Annotated[int, typer.Option(help="Of inputs and random maps.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; made if missing.", metavar="FOLDER")
    ] = Path("reassoc-bench"),
) -> None:
    """Measure speed and memory against softmax attention and other libraries, on this machine.

    Before anything is timed, its result is compared with float64: what is wrong is called wrong and gets no
    time. All contenders take turns in one process; medians with quartiles; ratios first, then
    the length from which linear attention is never slower, times, shares of the machine's multiply-add
    ceiling, peak memory.

    Writes into the folder: report.html (open it), bench.csv, ratios.csv, bench.json (every sample),
    figures/. The same command continues an interrupted run. Close other programs first.

    Examples:
    `reassoc bench`

    `reassoc bench --lengths 512,2048,8192 --maps elu+1 --rules sum,decay --directions forward`

    `reassoc bench --backends native,torch --peers none --dtype bfloat16 --out bf16`
    """
    from ..lab import InputError
    from ..lab._progress import progress_bar
    from ..lab.bench import bench as run_bench
    from ..lab.bench import forget_parts, write_tables
    from ..lab.bench.figures import write_figures
    from ..lab.bench.report import write_report
    from ._show_bench import show

    settings = _settings(
        lengths, maps, rules, directions, backends, peers,
        {
            "batch": batch, "heads": heads, "head_dim": head_dim, "features": features,
            "value_dim": head_dim if value_dim is None else value_dim, "normalize": normalize,
            "causal": causal, "dtype": dtype, "repeats": repeats, "limit": limit, "seed": seed,
        },
        threads,
    )  # fmt: skip
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} exists and is not a folder")
    with progress_bar("bench") as progress:
        results = run_bench(settings, resume=out, progress=progress)
    repeat = command(context)
    write_tables(results, out, repeat)
    figures = write_figures(results, out)
    report = write_report(results, out, repeat, figures)
    forget_parts(out, results)
    show(results)
    typer.echo(f"\nReport: {report}")


def _settings(
    lengths: str | None,
    maps: str | None,
    rules: str | None,
    directions: str | None,
    backends: str | None,
    peers: str | None,
    sizes: dict[str, Any],
    threads: int | None,
) -> Settings:
    import torch

    from ..lab.bench import DEFAULT_PROBLEMS, RULES, Problem, Settings
    from ..lab.bench.settings import one_of

    chosen = numbers("--lengths", lengths, int)
    named, which = words("--maps", maps), words("--rules", rules)
    one_of("--rules", RULES if which is None else which, RULES)
    problems: tuple[Problem, ...] = DEFAULT_PROBLEMS
    if named is not None or which is not None:
        problems = tuple(Problem(m, r) for m in named or ["elu+1"] for r in which or ["sum"])
    lists = {"directions": words("--directions", directions), "backends": words("--backends", backends)}
    others = words("--peers", peers)
    given: dict[str, Any] = {name: tuple(value) for name, value in lists.items() if value is not None}
    if chosen is not None:
        given["lengths"] = tuple(sorted(set(chosen)))
    if others is not None:
        given["peers"] = () if others == ["none"] else tuple(others)
    threads = torch.get_num_threads() if threads is None else threads
    return Settings(problems=problems, threads=threads, **given, **sizes)
