"""The command `reassoc`."""

from __future__ import annotations

import sys

FAILED = 2  # exit code of everything that did not end with a result


def main() -> None:
    """Run the command; a mistake or a failure is one line on standard error and exit code 2."""
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError:
        print("reassoc: the command line needs: pip install 'reassoc[lab]'", file=sys.stderr)
        sys.exit(FAILED)
    from ._app import run

    sys.exit(run(sys.argv[1:]))
