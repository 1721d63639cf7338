"""Names in a state dict, which tell the release that its weights were trained with.

From 1.0.9 on every entry of the layers is named a second time under ``proj_updater.instance``, and a counter
is there too. Older copies, scBERT's for one, have neither: their counter is the performer's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_UPDATER, _COUNTER = "proj_updater.", "calls_since_last_redraw"


def tells_older(state_dict: dict[str, Any], prefix: str, net: nn.Module) -> bool | None:
    """Whether the layers under ``prefix`` are of a copy from before 1.0.9; ``None``: too few to tell."""
    if any(name.startswith(f"{prefix}{_UPDATER}") for name in state_dict):
        return False
    return True if all(f"{prefix}net.{entry}" in state_dict for entry in net.state_dict()) else None


def complete(state_dict: dict[str, Any], prefix: str, net: nn.Module) -> None:
    """Give an older copy the names that it lacks; a counter that it has not either begins at 0."""
    counter = state_dict.pop(f"{prefix}{_COUNTER}", None)
    state_dict[f"{prefix}{_UPDATER}{_COUNTER}"] = torch.tensor(0) if counter is None else counter
    for entry in net.state_dict():
        state_dict[f"{prefix}{_UPDATER}instance.{entry}"] = state_dict[f"{prefix}net.{entry}"]


def reduce(state_dict: dict[str, Any], prefix: str) -> None:
    """The names of an older copy."""
    counter = state_dict[f"{prefix}{_UPDATER}{_COUNTER}"]
    for name in [name for name in state_dict if name.startswith(f"{prefix}{_UPDATER}")]:
        del state_dict[name]
    state_dict[f"{prefix}{_COUNTER}"] = counter
