"""`reassoc seq2seq`: translation with kernel attention against the softmax twin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ._command import command
from ._lists import numbers, words

FILE = "FILE"


def seq2seq(
    context: typer.Context,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="Text to learn from: SOURCE<tab>TARGET in each line, UTF-8. Default: numbers in English "
            "words (0 to 9,998), to be written in digits.",
            metavar=FILE,
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="Sources, one a line; with --target instead of --pairs.", metavar=FILE)
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="Targets, as many lines as --source.", metavar=FILE)
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated recipes MAP[:RULE][:NORMALIZATION][:OPTION...] as in `reassoc lm`; MAP "
            "softmax is softmax attention itself. Without learned or rotary an encoder does not know the "
            "order of its words. Default: softmax, elu+1, elu+1:delta, favor+, dpfp-1:delta, all learned.",
            metavar="LIST",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Of weights, random maps and batches. [0,1]", metavar="LIST")
    ] = None,
    width: Annotated[int, typer.Option(help="Size of a token in the model.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers of the encoder, and of the decoder.")] = 2,
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 4,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1500,
    batch: Annotated[int, typer.Option(help="Pairs of a step.")] = 16,
    rate: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 5e-3,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.01,
    every: Annotated[int, typer.Option(help="Steps from one look at the validation loss to the next.")] = 100,
    held_out: Annotated[
        int,
        typer.Option(help="Sources to watch, and as many to judge on; at most a tenth of all each."),
    ] = 500,
    limit: Annotated[int, typer.Option(help="Bytes of the longest source or target allowed.")] = 256,
    tokenize: Annotated[
        str | None,
        typer.Option(
            help="How sacrebleu cuts texts into words: 13a, char, intl, none, zh. Default: char for the "
            "numbers, 13a for files."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; made if missing.", metavar="FOLDER")
    ] = Path("reassoc-seq2seq"),
) -> None:
    """Train encoder-decoders that differ in their attention only, and compare what they write.

    The feature map is that of the recipe everywhere; its rule holds for the decoder's own attention, a whole
    source being summed. All models see the same pairs in the same order, byte by byte. Ends with exact
    matches and BLEU (sacrebleu) on pairs whose sources were never seen, against the softmax twin.

    Writes into the folder: report.html (open it), seq2seq.csv, curves.csv, examples.csv, seq2seq.json,
    times.csv, figures/. The same command gives the same bytes, times apart; an interrupted one continues
    after its last finished model.

    Examples:
    `reassoc seq2seq`

    `reassoc seq2seq --pairs german-english.tsv --width 256 --layers 3 --steps 20000`
    """
    from ..lab import InputError
    from ..lab._progress import progress_bar
    from ..lab._study import write_study
    from ..lab.recipes import recipes
    from ..lab.seq2seq import Settings, forget_parts, study
    from ..lab.seq2seq import seq2seq as run
    from ..lab.tables import write_csv
    from ._show_study import show_study

    named = words("--models", models)
    draws = numbers("--seeds", seeds, int)
    given: dict[str, Any] = {} if draws is None else {"seeds": tuple(dict.fromkeys(draws))}
    if named is not None:
        given["recipes"] = tuple(found.name for found in recipes(named))
    own = pairs is None and source is None and target is None
    settings = Settings(
        width=width, layers=layers, heads=heads, steps=steps, batch=batch, rate=rate, every=every,
        weight_decay=weight_decay, held_out=held_out, limit=limit,
        tokenize=tokenize or ("char" if own else "13a"), **given,
    )  # fmt: skip
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} exists and is not a folder")
    data, name = _pairs(pairs, source, target)
    with progress_bar("seq2seq") as progress:
        results = run(data, name, settings, resume=out, progress=progress)
    found = study(results)
    report = write_study(found, out, command(context))
    write_csv(out / "times.csv", results.times)
    forget_parts(out, results)
    show_study(found)
    typer.echo(f"\nReport: {report}")


def _pairs(pairs: Path | None, source: Path | None, target: Path | None) -> tuple[list[tuple[str, str]], str]:
    """The text and what to call it."""
    from ..lab import InputError
    from ..lab.seq2seq import numbers as number_pairs
    from ..lab.seq2seq import read_pairs, read_sides

    if pairs is not None and (source is not None or target is not None):
        raise InputError("--pairs excludes --source and --target: choose one way")
    if pairs is not None:
        return read_pairs(pairs), pairs.name
    if source is not None and target is not None:
        return read_sides(source, target), f"{source.name} to {target.name}"
    if source is not None or target is not None:
        missing = "--target" if target is None else "--source"
        raise InputError(f"--source and --target belong together: give {missing} too")
    return number_pairs(), "number words to digits"
