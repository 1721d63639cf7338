"""Formulas as MathML, converted while building: pages need no script and no font from elsewhere.

Sphinx's own renderers load MathJax, or draw images with a LaTeX installation. Docutils has a converter
of its own; here it serves Markdown's ``$...$`` and ``$$...$$`` and the ``:math:`` of docstrings alike.
"""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.util.typing import ExtensionMetadata
from sphinx.writers.html5 import HTML5Translator

LOGGER = logging.getLogger(__name__)


def inline(self: HTML5Translator, node: nodes.math) -> None:
    """``$...$``."""
    self.body.append(_converted(node, block=False))
    raise nodes.SkipNode


def block(self: HTML5Translator, node: nodes.math_block) -> None:
    """``$$...$$``, in a box of its own that scrolls where a formula is wider than the page."""
    self.body.append(self.starttag(node, "div", CLASS="math-block"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})</span>')
    self.body.append(_converted(node, block=True))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def _converted(node: nodes.Element, *, block: bool) -> str:
    """MathML, or the LaTeX itself and a warning: warnings fail the build."""
    formula = node.astext()
    try:
        return tex2mathml(formula, as_block=block)
    except MathError as error:
        LOGGER.warning("formula %r: %s", formula, error, location=node, type="mathml")
    return f"<code>{nodes.Text(formula).astext()}</code>"


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the renderer; ``html_math_renderer = "mathml"`` chooses it."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
