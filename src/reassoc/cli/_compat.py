"""`reassoc compat check`: what an old checkpoint relies on, and whether the clean operator can take over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..compat.check import Report

app = typer.Typer(help="Old models of other libraries.", no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def group() -> None:
    """Old models of performer-pytorch, pytorch-fast-transformers and PyTorch Geometric."""
    # Without it a typer of one command would be that command.


@app.command()
def check(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="Weights: safetensors, or a state dict of torch.save.", metavar="CHECKPOINT"),
    ],
    input: Annotated[
        Path | None,
        typer.Option(
            help="safetensors file with tokens (B, N) or x (B, N, dim), what the first layer gets; perhaps "
            "mask (B, N), True = real, context (B, M, dim) and context_mask. Both modes run on it.",
            metavar="FILE",
        ),
    ] = None,
    causal: Annotated[
        bool,
        typer.Option(
            "--causal/--bidirectional", help="Whether tokens see earlier ones only: no weight tells."
        ),
    ] = False,
    features: Annotated[
        str | None,
        typer.Option(
            help="performer-pytorch: favor, generalized (ReLU) or none (no projection). fast-transformers: "
            "favor, fourier or generalized with an omega, elu without. Default: the first; generalized for "
            "MoLFormer's layers.",
            metavar="NAME",
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(help="fast-transformers without an omega: heads of each layer.", metavar="N"),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option(
            help="fast-transformers: relu or gelu. Default: relu; gelu for MoLFormer's layers.",
            metavar="NAME",
        ),
    ] = None,
    stabilize: Annotated[
        bool, typer.Option("--stabilize", help="fast-transformers: made with Favor(stabilize=True).")
    ] = False,
    softmax_temp: Annotated[
        float | None,
        typer.Option(help="fast-transformers: of the feature map, if it was given one.", metavar="T"),
    ] = None,
    cross_attend: Annotated[
        bool, typer.Option("--cross-attend", help="performer-pytorch: every second layer reads a context.")
    ] = False,
    local_heads: Annotated[
        int, typer.Option(help="performer-pytorch: heads with local attention, in each layer.", metavar="N")
    ] = 0,
    local_window: Annotated[int, typer.Option(help="performer-pytorch: their window.", metavar="N")] = 256,
    older: Annotated[
        bool,
        typer.Option(
            "--older", help="performer-pytorch: a release before 1.1.1; known by itself before 1.0.9."
        ),
    ] = False,
    root: Annotated[
        str | None,
        typer.Option(
            help="Which model, by what its tensors' names begin with, if there are several.", metavar="NAME"
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(help="Largest relative difference of the last output that is safe.", metavar="ERROR"),
    ] = 1e-3,
) -> None:
    """Say which library wrote a checkpoint, which quirks its weights rely on, and whether to switch.

    Loads weights of performer-pytorch, pytorch-fast-transformers or PyTorch Geometric's Performer without
    running any code of the file. With an input, the model runs in both modes of `reassoc.compat`: the
    original's arithmetic and the clean operator; a table says how far they are apart after each layer.

    Examples:
    `reassoc compat check model.pt`

    `reassoc compat check model.pt --input batch.safetensors --causal`
    """
    import contextlib
    import io

    from ..compat.check import check as run

    # The modes announce themselves on standard error; here both are the point, and the tables say so.
    with contextlib.redirect_stderr(io.StringIO()):
        reports = run(
            checkpoint, input, causal=causal, features=features, heads=heads, activation=activation,
            stabilize=stabilize, softmax_temp=softmax_temp, cross_attend=cross_attend,
            local_heads=local_heads, local_window=local_window, older=older, root=root,
            tolerance=tolerance,
        )  # fmt: skip
    for report in reports:
        _show(checkpoint, report)


def _show(checkpoint: Path, report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def table(*columns: str) -> Table:
        made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for name in columns:
            made.add_column(name, overflow="fold")
        return made

    console = Console(highlight=False, markup=False)
    where = f" under {report.root}" if report.root else ""
    console.print(f"{checkpoint.name}{where}: {report.library} {report.version}", style="bold")
    console.print(", ".join(f"{name} {_words(value)}" for name, value in report.sizes.items()))
    console.print(f"Taken so, because no weight tells: {', '.join(report.assumed)}.")
    rows = table("quirk", "in the original, and here", "legacy=None")
    for quirk in report.quirks:
        rows.add_row(*quirk)
    console.print(rows)
    if report.gap is not None:
        whole = report.gap.layers[0].so_far is not None
        rows = table("attention layer", "differs alone", *(["differs so far"] if whole else []))
        for layer in report.gap.layers:
            rows.add_row(layer.name, f"{layer.alone:.2g}", *([f"{layer.so_far:.2g}"] if whole else []))
        console.print(rows)
    verdict = {None: "Not run", True: "Safe to switch to legacy=None", False: 'Keep legacy="exact"'}
    console.print(f"{verdict[report.safe]}: {report.reason}.", soft_wrap=True)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)
