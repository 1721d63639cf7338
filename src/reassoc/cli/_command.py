"""How to repeat what was done: a command line that works on another machine."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer


def command(context: typer.Context) -> str:
    """The command with the options that are not the default, ``--out`` left out.

    Files are given by their names only: this machine's paths say nothing to a reader elsewhere.
    """
    words = ["reassoc", context.command.name or ""]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name == "out" or value is None or value == option.default:
            continue
        if isinstance(value, bool):
            words.append((option.opts if value else option.secondary_opts)[0])
        else:
            words += [option.opts[0], value.name if isinstance(value, Path) else str(value)]
    return shlex.join(words)
