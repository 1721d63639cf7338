"""The page as HTML: served in parts by this machine, or whole in one file."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from . import cost
from .panels import PANELS
from .presets import PRESETS
from .tables import LARGEST, MOST, WIDEST

STYLE = "style.css"
MODULES = (
    "approximation", "capacity", "chart", "controls", "cost", "dom", "editor", "main", "number",
    "reassociation", "source", "state",
)  # fmt: skip
_START = 'import "explorer/main";'


def setup(bench: Path | None) -> dict[str, Any]:
    """What the page needs to know before it asks for anything.

    Raises:
        InputError: see :func:`.cost.measured`.
    """
    return {
        "panels": {
            name: {"controls": [c.to_json() for c in panel.controls], "tables": panel.tables}
            for name, panel in PANELS.items()
        },
        "presets": {name: preset._asdict() for name, preset in PRESETS.items()},
        "limits": {"rows": MOST, "columns": WIDEST, "largest": LARGEST},
        "measured": cost.measured(bench),
    }


def asset(name: str) -> str:
    """The text of a file of the page."""
    return resources.files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def served(about: dict[str, Any]) -> tuple[str, str]:
    """The page whose parts lie under ``static/``, and the policy under which it may run."""
    imports = {f"explorer/{name}": f"./static/{name}.js" for name in MODULES}
    text, scripts = _fill(f'<link rel="stylesheet" href="static/{STYLE}">', imports, about)
    policy = (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def whole(about: dict[str, Any]) -> str:
    """The page as one file that needs no other; ``about`` then holds every answer."""
    imports = {
        f"explorer/{name}": "data:text/javascript;base64,"
        + base64.b64encode(asset(f"{name}.js").encode()).decode()
        for name in MODULES
    }
    text, scripts = _fill(f"<style>\n{asset(STYLE)}</style>", imports, about)
    policy = f"default-src 'none'; script-src data: {scripts}; style-src 'unsafe-inline'; img-src data:"
    return text.replace(
        "<title>", f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>', 1
    )


def _fill(style: str, imports: dict[str, str], about: dict[str, Any]) -> tuple[str, str]:
    """The template with its three holes filled, and the hashes of the scripts that stand in it."""
    modules = json.dumps({"imports": imports})
    parts = {
        "style": style,
        "modules": f'<script type="importmap">{modules}</script>',
        # A "<" in the data could end the element that holds it.
        "setup": '<script type="application/json" id="setup">'
        + json.dumps(about, separators=(",", ":")).replace("<", "\\u003c")
        + "</script>",
        "start": f'<script type="module">{_START}</script>',
    }
    text = asset("index.html")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part, 1)
    return text, " ".join(_hash(script) for script in (modules, _START))


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
