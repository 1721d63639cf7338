"""Finished parts of a long run on disk, each a whole file: an interrupted run continues from them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from ._files import atomic_write


class Parts:
    """Parts of one run, in a hidden folder that only a run with the same manifest finds.

    Args:
        folder: of the results; ``None`` keeps nothing. manifest: what decides the numbers, as JSON holds it.
    """

    def __init__(self, folder: Path | None, manifest: dict[str, Any]) -> None:
        self._folder: Path | None = None
        if folder is not None:
            key = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
            self._folder = folder / f".unfinished-{key}"
            self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def folder(self) -> Path:
        """Where the parts are, for files that are not JSON."""
        assert self._folder is not None
        return self._folder

    def get(self, name: str) -> Any:
        """What was put, or ``None``: not there, or damaged."""
        if self._folder is None:
            return None
        try:
            return json.loads((self._folder / f"{name}.json").read_text())
        except (OSError, ValueError):
            return None

    def put(self, name: str, value: Any) -> None:
        """Keep something that JSON can hold."""
        if self._folder is not None:
            # Again: another run of the same settings may have ended here, and removed it.
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._folder / f"{name}.json") as path:
                path.write_text(json.dumps(value))

    def forget(self) -> None:
        """Remove all: the results have been written."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
