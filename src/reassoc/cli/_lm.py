"""`reassoc lm`: which attention predicts a text best, trained from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import FAILED
from ._command import command
from ._lists import numbers, words

if TYPE_CHECKING:
    from ..lab.recipes import Recipe

DEFAULT = ["softmax:conv=4", "elu+1:conv=4", "elu+1:delta:conv=4"]


def lm(
    context: typer.Context,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to train on. Default: the embedded New Testament, 0.95 MB.", metavar="FILE"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json of Hugging Face's tokenizers. Default: bytes.", metavar="FILE"),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated recipes MAP[:RULE][:NORMALIZATION][:OPTION...]; MAP softmax is softmax "
            "attention itself. OPTION: features=N, iid, redraw=N, carried, rotary, rotary-after, learned, "
            "conv=N. Default, unless --maps is given: softmax, elu+1 and elu+1:delta with conv=4: without "
            "convolution or positions, softmax and sums learn the order of letters slowly.",
            metavar="LIST",
        ),
    ] = None,
    maps: Annotated[
        str | None,
        typer.Option(help="A grid besides: comma-separated maps, with options if any.", metavar="LIST"),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            help="Of the grid: sum, decay, gla, retention, delta, gated-delta, kda. [sum]", metavar="LIST"
        ),
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            help="Of the grid: attention, sum, sum+attention, none. Default: as each rule is published.",
            metavar="LIST",
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option("--context", help="Of the grid: truncated, carried. [truncated]", metavar="LIST"),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Comma-separated seeds of weights and features. [0]", metavar="LIST")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1200,
    batch: Annotated[int, typer.Option(help="Streams that the text is cut into.")] = 4,
    segment: Annotated[int, typer.Option(help="Tokens that a step takes of each stream.")] = 256,
    width: Annotated[int, typer.Option(help="Size of a token.")] = 128,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 2,
    heads: Annotated[int, typer.Option(help="Heads of each block.")] = 4,
    rate: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 3e-3,
    warmup: Annotated[int, typer.Option(help="Steps of warm-up.")] = 100,
    clip: Annotated[float, typer.Option(help="Largest norm of a gradient.")] = 1.0,
    dropout: Annotated[float, typer.Option(help="Share of activations dropped in training.")] = 0.0,
    checkpoint: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    threads: Annotated[int | None, typer.Option(help="Threads of torch. [torch's own choice]")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; made if missing.", metavar="FOLDER")
    ] = Path("reassoc-lm"),
) -> None:
    """Train small language models that differ in their attention only, and compare them.

    The first 90 % of the text are for training, 5 % for validation, 5 % for test, by bytes, in order. All
    models see the same tokens in the same order; models that carry context keep their state from segment to
    segment. Ends with perplexities, and which differences are larger than the spread over seeds.

    Writes into the folder: report.html (open it), lm.csv, lm.json, curves.csv, differences.csv, samples.csv,
    times.csv, figures/, models/ (safetensors; reassoc.lab.lm.load_model reads them), checkpoints/ while
    training. The same command gives the same numbers, times apart; an interrupted one continues. Under
    torchrun the batch is divided among the processes.

    Examples:
    `reassoc lm`

    `reassoc lm --maps softmax,elu+1,dpfp-1 --rules sum,delta --context truncated,carried --seeds 0,1,2`

    `torchrun --nproc-per-node 2 --no-python reassoc lm --text book.txt --tokenizer tokenizer.json`
    """
    import contextlib

    from ..lab import InputError
    from ..lab._progress import progress_bar
    from ..lab._study import write_study
    from ..lab.lm import Settings, compare, forget_parts, ranks, read, study
    from ._show_study import show_study

    with ranks() as own:
        try:
            chosen, left_out = _recipes(models, maps, rules, normalize, contexts)
            settings = Settings(
                width=width, layers=layers, heads=heads, segment=segment, batch=batch, steps=steps,
                rate=rate, warmup=warmup, clip=clip, dropout=dropout,
            )  # fmt: skip
            draws = numbers("--seeds", seeds, int)
            if out.exists() and not out.is_dir():
                raise InputError(f"--out: {out} exists and is not a folder")
            data = read(text, tokenizer)
            with progress_bar("lm") if own.first else contextlib.nullcontext() as progress:
                results = compare(
                    chosen, data, settings, [0] if draws is None else draws, folder=out, every=checkpoint,
                    threads=threads, ranks=own, progress=progress,
                )  # fmt: skip
        except (InputError, RuntimeError) as error:
            # The first process says what is wrong; the others may only find that it has left.
            if own.first or not (isinstance(error, InputError) or "gloo" in str(error)):
                raise
            raise typer.Exit(FAILED) from None
        if not own.first:
            return
        found = study(results)
        report = write_study(found, out, command(context))
        forget_parts(out, results)
    show_study(found)
    for line in left_out:
        typer.echo(f"left out: {line}")
    typer.echo(f"\nReport: {report}")


def _recipes(
    models: str | None, maps: str | None, rules: str | None, normalize: str | None, contexts: str | None
) -> tuple[list[Recipe], list[str]]:
    """What is named and what the grid makes of it, and what that left out."""
    from ..lab import InputError
    from ..lab.recipes import grid, recipes

    texts, left_out = words("--models", models) or [], []
    named = words("--maps", maps)
    choices = {"--rules": rules, "--normalize": normalize, "--context": contexts}
    if named is not None:
        made = grid(
            named, words("--rules", rules) or ["sum"], words("--normalize", normalize) or [None],
            words("--context", contexts) or ["truncated"],
        )  # fmt: skip
        texts, left_out = texts + made.texts, made.left_out
    elif given := [option for option, value in choices.items() if value is not None]:
        raise InputError(f"{given[0]} belongs to the grid of --maps: name the maps, for example --maps elu+1")
    return recipes(DEFAULT if models is None and named is None else texts), left_out
