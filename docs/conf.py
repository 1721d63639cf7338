"""How the documentation is built: `make docs`. Pages open from disk; nothing in them comes from elsewhere."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import reassoc

project = "reassoc"
author = "the reassoc authors"
version = release = reassoc.__version__
html_title = f"reassoc {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml", "docstrings", "commands"]
exclude_patterns = ["_build"]
nitpicky = True  # whatever a docstring or an annotation names is in the reference

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_search_summary = False  # it would be fetched, which browsers refuse to pages opened from disk
html_show_copyright = False

default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
# Entries that describe several arguments together stay together, as they are written.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]

nitpick_ignore_regex = [
    # Other libraries: a build that is offline has no index of their names.
    ("py:.*", r"(torch|transformers|tokenizers|numpy|pathlib|collections|os)\..*"),
    ("py:class", r"reassoc\.nn\.config\._Config"),  # a type variable: the class that the method is called on
]
