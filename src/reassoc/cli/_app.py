"""Commands, and what becomes of errors."""

from __future__ import annotations

import sys

import typer
from typer.main import get_command

from . import FAILED
from ._bench import bench
from ._capacity import capacity
from ._capture import capture
from ._compat import app as compat
from ._convert import convert
from ._doctor import doctor
from ._evaluate import evaluate
from ._explore import explore
from ._fidelity import fidelity
from ._generate import generate
from ._lm import lm
from ._recall import recall
from ._seq2seq import seq2seq

INTERRUPTED = "interrupted; nothing half-written is left, and the same command continues a sweep"
OUT_OF_MEMORY = "out of memory: use fewer or shorter sequences, or fewer features"
SUMMARY = "Kernel (linear) attention that can be trusted: how close to softmax, how fast, how capacious."

app = typer.Typer(
    name="reassoc",
    help=SUMMARY,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.command()(fidelity)
app.command()(capture)
app.command()(convert)
app.command()(evaluate)
app.command()(generate)
app.command()(bench)
app.command()(capacity)
app.command()(recall)
app.command()(lm)
app.command()(seq2seq)
app.command()(explore)
app.command()(doctor)
app.add_typer(compat, name="compat")


@app.command()
def backends() -> None:
    """Which backends this machine has, and why not the others."""
    import reassoc

    for name, status in reassoc.backends().items():
        typer.echo(f"{name:10} {status}")


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Print the version and leave.", is_eager=True),
) -> None:
    # What --help says of the whole is the text given above.
    if show:
        import reassoc

        typer.echo(reassoc.__version__)
        raise typer.Exit


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    from .._errors import InputError

    try:
        result = get_command(app).main(args=arguments, prog_name="reassoc", standalone_mode=False)
        return _ended(result if isinstance(result, int) else 0)
    except KeyboardInterrupt:
        return _fail(INTERRUPTED)
    except InputError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail(OUT_OF_MEMORY)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except Exception as error:
        # Usage errors of the option parser, whichever click it is built on; anything else is a bug,
        # and its traceback is what we need to mend it.
        if hasattr(error, "format_message"):
            return _fail(error.format_message())
        if type(error).__name__ == "Abort":
            return _fail(INTERRUPTED)
        if type(error).__name__ == "Exit":
            return _ended(int(getattr(error, "exit_code", 0)))
        if isinstance(error, RuntimeError) and "allocate" in str(error):  # torch's own out of memory
            return _fail(OUT_OF_MEMORY)
        raise


def _ended(code: int) -> int:
    """Ctrl-C: the option parser may have turned it into its own exit code before it reaches us."""
    return _fail(INTERRUPTED) if code == 130 else code


def _fail(message: str) -> int:
    line = " ".join(message.split())
    if line:
        print(f"reassoc: {line}", file=sys.stderr)
    return FAILED
