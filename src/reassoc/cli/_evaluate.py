"""`reassoc evaluate`: what a conversion costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._command import command
from ._lists import numbers


def evaluate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(help="Model folder, converted or not: what others are compared with.", metavar="FOLDER"),
    ],
    text: Annotated[list[Path], typer.Option(help="UTF-8 text; may be repeated.", metavar="FILE")],
    against: Annotated[
        list[str] | None,
        typer.Option(help="Another model folder to measure alike; may be repeated.", metavar="FOLDER"),
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(help="Name of a GGUF file in the folder of --model, to load instead.", metavar="NAME"),
    ] = None,
    part: Annotated[
        str, typer.Option(help="The part of each text to use, as fractions of its bytes.", metavar="A:B")
    ] = "0.95:1",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of context, comma-separated; for an encoder, where lines are cut. [256,1024; "
            "encoders 256]",
            metavar="LIST",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens of each text, taken evenly from the part.", metavar="N")
    ] = 16384,
    recall: Annotated[
        bool,
        typer.Option("--recall/--no-recall", help="Ask for a key that was named early; see --distances."),
    ] = False,
    distances: Annotated[
        str | None,
        typer.Option(help="Tokens between a key and the question, comma-separated. [1000]", metavar="LIST"),
    ] = None,
    trials: Annotated[int, typer.Option(help="Questions at each distance.", metavar="N")] = 40,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; made if missing.", metavar="FOLDER")
    ] = Path("reassoc-evaluate"),
) -> None:
    """Compare pretrained models, converted or not, on the same tokens.

    Decoders: perplexity of each text at each length of context, what a sequence so long keeps in memory, and
    with --recall how often a key named early is known again. Encoders: the cosine of their embeddings to
    those of the first model. Everything stays on this machine.

    Writes into the folder: report.html (open it), evaluate.csv, evaluate.json, recall.csv, times.csv,
    figures/. The same command gives the same numbers, times apart; an interrupted one continues after its
    last finished model.

    Examples:
    `reassoc evaluate --model smollm2 --against smollm2-linear --text book.txt --recall`

    `reassoc evaluate --model minilm --against minilm-linear --text book.txt`
    """
    from ..lab import InputError
    from ..lab._pretrained import find_pretrained
    from ..lab._progress import progress_bar
    from ..lab._study import write_study
    from ..lab.conversion import Settings, forget_parts, study
    from ..lab.conversion import evaluate as run
    from ._show_study import show_study
    from ._texts import part as fractions
    from ._texts import texts

    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} exists and is not a folder")
    if distances is not None and not recall:
        raise InputError("--distances belongs to --recall: name both")
    chosen = texts(text, fractions("--part", part))
    models = [find_pretrained(model, gguf), *(find_pretrained(other, None) for other in against or [])]
    given = numbers("--lengths", lengths, int)
    settings = Settings(
        lengths=None if given is None else tuple(sorted(set(given))), tokens=tokens, trials=trials,
        distances=tuple(sorted(set(numbers("--distances", distances, int) or [1000]))) if recall else (),
    )  # fmt: skip
    with progress_bar("evaluate") as progress:
        results = run(models, chosen, settings, resume=out, progress=progress)
    found = study(results)
    report = write_study(found, out, command(context))
    forget_parts(out, results)
    show_study(found)
    typer.echo(f"\nReport: {report}")
