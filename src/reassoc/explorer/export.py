"""The page as one file for teaching, every answer that it can show already inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._files import atomic_write
from .._threads import use_threads
from .controls import grid, key
from .page import setup, whole
from .panels import PANELS, answer


def export(
    file: Path, bench: Path | None = None, progress: Callable[[int, int, str], None] | None = None
) -> int:
    """Write the page; an earlier file is replaced whole or stays.

    Args:
        file: to write. bench: folder of `reassoc bench` whose times to show. progress: called with (done,
            total, what is next).

    Returns:
        The number of settings that the file holds.

    Raises:
        InputError: ``bench`` holds no results. OSError: the file cannot be written.
    """
    about = setup(bench)
    wanted = [(name, settings) for name, panel in PANELS.items() for settings in grid(panel.controls)]
    answers: dict[str, dict[str, Any]] = {name: {} for name in PANELS}
    # Tensors here are tiny: waking a second thread costs more than it brings.
    with atomic_write(file) as path, use_threads(1):
        for done, (name, settings) in enumerate(wanted):
            if progress is not None:
                progress(done, len(wanted), name)
            answers[name][key(settings)] = json.loads(answer(name, settings.items()))
        path.write_text(whole(about | {"answers": answers}), encoding="utf-8")
    return len(wanted)
