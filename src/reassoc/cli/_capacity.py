"""`reassoc capacity`: how many associations a memory keeps apart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ._command import command
from ._lists import numbers, words

LIST = "LIST"


def capacity(
    context: typer.Context,
    setting: Annotated[
        str | None,
        typer.Option(
            help="What to do: closed (signal and crosstalk in closed form), 1 (retrieval, every key once), 2 "
            "(keys come again with new values). [closed,1,2; with --keys closed]",
            metavar=LIST,
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Each MAP[:RULE][:NORMALIZATION][:OPTION...], in all settings: MAP as in "
            "reassoc.feature_maps.names(), or softmax; RULE sum or delta; NORMALIZATION attention (usual for "
            "sum), sum (usual for delta) or none; OPTION features=N or iid for random maps. FAVOR+ is the "
            "one of Schlag et al., drawn anew for every batch. Default: a choice for each setting.",
            metavar=LIST,
        ),
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            help="Numbers N of keys. Default: some below and above the number of features of each map.",
            metavar=LIST,
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Of weights, sequences and random maps; each trains anew.", metavar=LIST)
    ] = "0",
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Keys for the closed form: safetensors with `key`, (N, d) or (heads, N, d), and perhaps "
            "`value` alike, or a file of `reassoc capture`. Default: made keys.",
            metavar="FILE",
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="All models and pairs of the documented experiment: half an hour on one core."
        ),
    ] = False,
    dim: Annotated[int, typer.Option(help="Size of keys; 64 is what was published.")] = 64,
    max_steps: Annotated[
        int, typer.Option(help="Training steps at most; a training that hits this is marked.")
    ] = 20_000,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; made if missing.", metavar="FOLDER")
    ] = Path("reassoc-capacity"),
) -> None:
    """Find out how many key-value pairs a linear attention memory keeps apart.

    In closed form: for given keys, what each read takes of its own value and of the others', and the least
    error that any rule could reach. By experiment: the synthetic retrieval of Schlag et al. 2021, settings
    1 and 2, as published, softmax included; our losses beside theirs. Without options a choice of models
    and pairs that takes about four minutes of one core.

    Writes into the folder: report.html (open it), capacity.csv (a row per training), closed.csv, curves.csv
    (loss along each training), times.csv, capacity.json, figures/. The same command gives the same bytes,
    times apart; an interrupted one continues after the last finished training.

    Examples:
    `reassoc capacity`

    `reassoc capacity --setting 1 --models elu+1,relu,dpfp-2 --pairs 50,60,70,80 --seeds 0,1,2`

    `reassoc capacity --keys qkv.safetensors --models elu+1,elu+1:delta`
    """
    from ..lab import InputError
    from ..lab._progress import progress_bar
    from ..lab._study import write_study
    from ..lab.capacity import Settings, forget_parts, load_keys, study
    from ..lab.capacity import capacity as run
    from ._show_study import show_study

    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} exists and is not a folder")
    lists: dict[str, Any] = {
        "parts": words("--setting", setting), "models": words("--models", models),
        "pairs": numbers("--pairs", pairs, int), "seeds": numbers("--seeds", seeds, int),
    }  # fmt: skip
    given = {name: tuple(dict.fromkeys(found)) for name, found in lists.items() if found is not None}
    if keys is not None:
        given.setdefault("parts", ("closed",))
        if "closed" not in given["parts"]:
            raise InputError("--keys: the file is for the closed form; add closed to --setting")
    settings = Settings(**given, full=full, dim=dim, limit=max_steps)
    stored = None if keys is None else (*load_keys(keys), keys.name)
    with progress_bar("capacity") as progress:
        results = run(settings, keys=stored, resume=out, progress=progress)
    found = study(results)
    report = write_study(found, out, command(context))
    forget_parts(out, settings)
    show_study(found)
    typer.echo(f"\nReport: {report}")
