"""`reassoc fidelity`: how far kernels are from softmax on given queries, keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._lists import numbers


def fidelity(
    input: Annotated[
        Path | None,
        typer.Option(
            help="Activation file (safetensors) of `reassoc capture`, or one that holds query, key and "
            "value, each (heads, tokens, size). Default: the embedded sample of two real models.",
            metavar="FILE",
        ),
    ] = None,
    maps: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated maps, each NAME[:OPTION...]: NAME as in reassoc.feature_maps.names() or "
            "mean; OPTION calibrated, hyperbolic, iid. Default: a choice of untrained maps.",
            metavar="LIST",
        ),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated numbers of features for random maps. [64,256,1024]", metavar="LIST"
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Comma-separated draws of random maps. [0,1,2,3,4]", metavar="LIST"),
    ] = None,
    target: Annotated[
        float, typer.Option(help="Relative output error that is good enough.", metavar="ERROR")
    ] = 0.1,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Random inputs instead: sweeps over input norm and length."),
    ] = False,
    norms: Annotated[
        str | None,
        typer.Option(help="With --synthetic: norms of scaled queries and keys. [0.5,1,2,4]", metavar="LIST"),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="With --synthetic: sequence lengths. [64,256,1024]", metavar="LIST")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; made if missing.", metavar="FOLDER")
    ] = Path("reassoc-fidelity"),
) -> None:
    """Measure how far each kernel is from softmax on real queries, keys and values.

    For every map, width, seed and head: errors of outputs and gradients against softmax in float64, the
    weights, variance predicted and observed, bias, cost. Calibration is learned on one half of the tokens
    and judged on the other. Ends with an answer: the cheapest map within the target, or that none will do.

    Writes into the folder: report.html (open it), results.csv (per seed), heads.csv (over seeds),
    manifest.json, times.csv, figures/. The same command gives the same bytes, times apart; an
    interrupted one continues.

    Examples:
    `reassoc fidelity`

    `reassoc fidelity --input qkv.safetensors --maps favor+,favor++:calibrated --widths 256,1024`

    `reassoc fidelity --synthetic --norms 1,2,4 --out norms`
    """
    from .. import lab
    from ..lab._progress import progress_bar
    from ..lab.fidelity import forget_parts
    from ..lab.figures import write_figures
    from ..lab.report import write_report
    from ..lab.timing import measure_times, write_times
    from ._show import show

    if input is not None and synthetic:
        raise lab.InputError("--input and --synthetic exclude each other: choose one")
    if not synthetic and (norms is not None or lengths is not None):
        raise lab.InputError("--norms and --lengths need --synthetic")
    if synthetic:
        data = lab.synthetic(numbers("--norms", norms, float), numbers("--lengths", lengths, int))
        name = "synthetic"
    else:
        path = lab.sample_path() if input is None else input
        data, name = lab.load_activations(path), path.name
    chosen = None if maps is None else [part for part in maps.split(",") if part.strip()]
    if chosen == []:
        raise lab.InputError("--maps: give at least one map")
    sizes, draws = numbers("--widths", widths, int), numbers("--seeds", seeds, int)
    if out.exists() and not out.is_dir():
        raise lab.InputError(f"--out: {out} exists and is not a folder")
    with progress_bar("fidelity") as progress:
        results = lab.fidelity(
            data, name, maps=chosen, widths=sizes, seeds=draws, target=target, resume=out, progress=progress
        )
    times = []
    if not synthetic:
        with progress_bar("timing") as progress:
            times = measure_times(results, progress)
    lab.write_tables(results, out)
    write_times(times, out)
    figures = write_figures(results, out)
    command = _command(input, maps, widths, seeds, target, synthetic, norms, lengths)
    report = write_report(results, out, command, figures)
    forget_parts(out, results)
    show(results, times)
    typer.echo(f"\nReport: {report}")


def _command(
    input: Path | None,
    maps: str | None,
    widths: str | None,
    seeds: str | None,
    target: float,
    synthetic: bool,
    norms: str | None,
    lengths: str | None,
) -> str:
    """How to repeat it, with file names instead of this machine's paths."""
    import shlex

    words = ["reassoc", "fidelity"]
    words += [] if input is None else ["--input", input.name]
    words += ["--synthetic"] if synthetic else []
    lists = {"--maps": maps, "--widths": widths, "--seeds": seeds, "--norms": norms, "--lengths": lengths}
    for option, value in lists.items():
        words += [] if value is None else [option, value]
    words += [] if target == 0.1 else ["--target", f"{target:g}"]
    return shlex.join(words)
