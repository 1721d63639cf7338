"""`reassoc recall`: associative recall, accuracy against the size of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ._command import command
from ._lists import numbers, words

LIST = "LIST"


def recall(
    context: typer.Context,
    models: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated recipes MAP[:RULE][:NORMALIZATION][:OPTION...] as in `reassoc lm`; MAP "
            "softmax is softmax attention itself, conv=N a short convolution. Default: softmax, elu+1 "
            "(sum, delta, gated-delta), favor+ (sum, delta) and dpfp-1:delta, all with conv=3.",
            metavar=LIST,
        ),
    ] = None,
    head_dims: Annotated[
        str | None,
        typer.Option(help="Sizes of a head, which set the size of the state. [4,8,16]", metavar=LIST),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            help="Training sequences, taken in turns: comma-separated TOKENS:PAIRS. [32:4,32:8]", metavar=LIST
        ),
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="Sequences to judge on. [32:4,32:8,64:8,64:16]", metavar=LIST)
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Tokens there are: half keys, half values.")] = 64,
    width: Annotated[int, typer.Option(help="Size of a token in the model.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 2,
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 2,
    output_norm: Annotated[
        bool,
        typer.Option(
            "--output-norm/--no-output-norm", help="Whether outputs of attention are normalized per head."
        ),
    ] = True,
    rates: Annotated[
        str | None,
        typer.Option(help="Learning rates; the best on validation sequences counts. [0.02]", metavar=LIST),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Of weights, random maps and training. [0,1]", metavar=LIST)
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps, at most.")] = 1500,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 16,
    every: Annotated[
        int, typer.Option(help="Steps from one look at the validation accuracy to the next.")
    ] = 100,
    stop: Annotated[float, typer.Option(help="Validation accuracy that ends training.")] = 0.99,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.1,
    count: Annotated[int, typer.Option(help="Sequences of each size to judge on.")] = 256,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; made if missing.", metavar="FOLDER")
    ] = Path("reassoc-recall"),
) -> None:
    """Measure how much each kind of attention can recall, for the memory it keeps.

    Small models read pairs of a key and its value, then must name the value of every key asked
    (multi-query associative recall, Arora et al. 2023). Each recipe is trained at several sizes of its state
    and judged on new sequences, harder ones too.

    Writes into the folder: report.html (open it), recall.csv (a row per model and test), curves.csv,
    recall.json, times.csv, figures/. The same command gives the same bytes, times apart; an interrupted one
    continues after its last finished model.

    Examples:
    `reassoc recall`

    `reassoc recall --models softmax:conv=3,elu+1,elu+1:conv=3 --head-dims 16 --seeds 0,1,2`

    The sizes of the paper (days): `reassoc recall --vocabulary 8192 --train
    64:4,128:8,256:16,256:32,256:64 --test 64:4,256:64,512:128,1024:256 --rates 1e-4,4.6e-4,2.2e-3,1e-2
    --batch 256 --steps 30000`
    """
    from ..lab import InputError
    from ..lab._progress import progress_bar
    from ..lab._study import write_study
    from ..lab.recall import Settings, forget_parts, size, study
    from ..lab.recall import recall as run
    from ..lab.recipes import recipes
    from ..lab.tables import write_csv
    from ._show_study import show_study

    named = words("--models", models)
    lists: dict[str, list[Any] | None] = {
        "recipes": None if named is None else [found.name for found in recipes(named)],
        "head_dims": numbers("--head-dims", head_dims, int),
        "rates": numbers("--rates", rates, float),
        "seeds": numbers("--seeds", seeds, int),
        "train": [size("--train", text) for text in words("--train", train) or []] or None,
        "test": [size("--test", text) for text in words("--test", test) or []] or None,
    }
    given: dict[str, Any] = {name: tuple(dict.fromkeys(each)) for name, each in lists.items() if each}
    settings = Settings(
        vocabulary=vocabulary, width=width, layers=layers, heads=heads, output_norm=output_norm, steps=steps,
        batch=batch, every=every, stop=stop, weight_decay=weight_decay, count=count, **given,
    )  # fmt: skip
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} exists and is not a folder")
    with progress_bar("recall") as progress:
        results = run(settings, resume=out, progress=progress)
    found = study(results)
    report = write_study(found, out, command(context))
    write_csv(out / "times.csv", results.times)
    forget_parts(out, results)
    show_study(found)
    typer.echo(f"\nReport: {report}")
