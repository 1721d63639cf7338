"""Docstrings as the reference shows them: names that users import, and one entry for each argument."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import suppress
from functools import cache

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import ExtensionMetadata

MODULES = (
    "reassoc",
    "reassoc.feature_maps",
    "reassoc.rules",
    "reassoc.nn",
    "reassoc.hf",
    "reassoc.lab",
    "reassoc.compat.check",
)
SECTIONS = ("Args:", "Attributes:", "Raises:")
# The house writes short entries on one line: "batch: number of sequences. key_heads: G. value_dim: e."
NEXT_ENTRY = re.compile(r"(?<=\.) (?=[A-Za-z]\w*(?:, \w+)*: )")


def split_entries(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Start a new line with every entry of a section, before napoleon reads it."""
    if what in ("property", "attribute") and lines:
        lines[:0] = ["..", ""]  # else napoleon takes the words before a colon for a type
    found: list[str] = []
    inside = False
    for line in lines:
        if line.strip():
            inside = line in SECTIONS or (inside and line.startswith(" "))
        found += NEXT_ENTRY.sub("\n    ", line).split("\n") if inside else [line]
    lines[:] = found


def forget_overloads(app: Sphinx) -> None:
    """Show the one signature that a function has at run time, in place of those that type checkers read."""
    public_names()  # imports all that is documented
    for name in [name for name in sys.modules if name.partition(".")[0] == "reassoc"]:
        with suppress(PycodeError):  # compiled
            analyzer = ModuleAnalyzer.for_module(name)
            analyzer.analyze()
            analyzer.overloads.clear()


@cache
def public_names() -> dict[str, str]:
    """Where a thing is defined (``reassoc._state.AttentionState``), and what users import."""
    found: dict[str, str] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", ()):
            thing = getattr(module, attribute)
            if hasattr(thing, "__qualname__"):
                found.setdefault(f"{thing.__module__}.{thing.__qualname__}", f"{name}.{attribute}")
    return found


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Annotations name a type by where it is defined; the reference has it where users import it."""
    target = public_names().get(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or target is None:
        return None
    domain = env.domains.python_domain
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, content)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Docstrings are changed before napoleon (priority 500) reads them."""
    app.connect("autodoc-process-docstring", split_entries, priority=400)
    app.connect("builder-inited", forget_overloads)
    app.connect("missing-reference", resolve)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
