"""The directive ``commands``: what ``reassoc COMMAND --help`` says, read from the program while building."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata
from typer.main import get_command

from reassoc.cli._app import app as application


class Commands(SphinxDirective):
    """A section for each command, from its Markdown help text and the help of its options."""

    def run(self) -> list[nodes.Node]:
        """Sections."""
        commands = _flat(get_command(application).commands)  # type: ignore[attr-defined]
        text = "\n\n".join(_section(name, command) for name, command in commands.items())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def _flat(commands: dict[str, Any]) -> dict[str, Any]:
    """Commands by all their words: those of a group instead of the group."""
    found = {}
    for name, command in commands.items():
        inner = _flat(getattr(command, "commands", {}))
        found |= {f"{name} {word}": each for word, each in inner.items()} or {name: command}
    return found


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    entries = []
    for option in command.get_params(context):
        named, text = option.get_help_record(context)
        if "--help" not in option.opts:
            entries.append(f"`{named}`\n: {text}")
    return "\n\n".join([f"## reassoc {name}", _words(command.help), *entries])


def _words(text: str) -> str:
    """A help text; lines that begin with ``$``, or are nothing but code, become blocks to copy."""
    shown = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        while lines:
            line = lines.pop(0)
            code = line.removeprefix("$ ") if line.startswith("$ ") else line[1:-1]
            if line.startswith("$ ") or (line[:1] == line[-1:] == "`" and "`" not in code):
                shown.append(f"\n```sh\n{code}\n```\n")
            else:
                shown.append(line)
        shown.append("")
    return "\n".join(shown)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("commands", Commands)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
