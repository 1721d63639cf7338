"""How to repeat what was done: a command line that works on another machine."""

from __future__ import annotations

import os
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
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0], _shown(each)]
    return shlex.join(words)


def _shown(value: object) -> str:
    """A file or folder by its name, given as a path or found at what was given; anything else as it is."""
    text = str(value)
    local = isinstance(value, Path) or (isinstance(value, str) and os.sep in text and os.path.exists(text))
    return Path(text).name if local else text
