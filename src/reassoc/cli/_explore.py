"""`reassoc explore`: the page on which kernel attention can be seen at work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explore(
    port: Annotated[int, typer.Option(help="On this machine only; 0 takes a free one.")] = 8420,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    bench: Annotated[
        Path | None,
        typer.Option(
            help="Folder of `reassoc bench`, whose times of this machine the page shows. Default: times that "
            "come with the package, from another machine.",
            metavar="FOLDER",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write the page as one file instead, results inside, for a browser without a server.",
            metavar="FILE.html",
        ),
    ] = None,
) -> None:
    """See kernel attention at work: reassociation, cost, approximation, capacity.

    Serves one page on this machine (nobody else can reach it) until Ctrl-C. Every number on it is computed
    by this library. The address holds what you set: a link shows another the same.

    Examples:
    `reassoc explore --open`

    `reassoc bench --out mine`, then `reassoc explore --bench mine --open`

    `reassoc explore --export explorer.html`
    """
    from .._errors import InputError

    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("explore needs: pip install 'reassoc[explore]'") from None
    if export is not None:
        from ..explorer.export import export as write
        from ..lab._progress import progress_bar

        if export.suffix.lower() not in (".html", ".htm"):
            raise InputError(f"--export: name a file that ends in .html, got {export}")
        if not export.parent.is_dir():
            raise InputError(f"--export: there is no folder {export.parent}")
        with progress_bar("explore") as progress:
            count = write(export, bench, progress)
        size = export.stat().st_size / 1e6
        typer.echo(f"{count:,} computed settings in {export} ({size:.1f} MB); open it in a browser.")
        return
    from ..explorer.server import serve

    serve(port, bench=bench, open_browser=open_browser, say=typer.echo)
