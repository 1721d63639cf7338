"""When random features are drawn anew during training."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..feature_maps import RandomFeatures
from .config import check_count


class RedrawSchedule:
    """Redraws every random map of a model every so many training steps.

    ``step()`` comes first in each training step: the draw then changes where training goes on, and a model is
    judged, saved and used with the features that it was trained with.

    What is drawn depends on each map's (seed, draw count) only, so all ranks of a distributed run agree
    without talking, and a checkpoint of the model (the counts are in its ``state_dict``) and of this
    schedule goes on as if nothing had happened. States made before a redraw are of another kernel and are
    refused after it: start them afresh.

    Args:
        model: with maps in it. every: steps from one draw to the next.

    Raises:
        ValueError: nothing to redraw.

    Source: Choromanski et al. 2021, section 4.2.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        check_count("every", every)
        self.every, self.steps = every, 0
        self._maps = [m for m in model.modules() if isinstance(m, RandomFeatures)]
        if not self._maps:
            raise ValueError("the model has no random feature maps: nothing to redraw")

    def step(self) -> bool:
        """Begin a training step; ``True`` if the maps were just redrawn: before step every + 1, and so on."""
        due = self.steps > 0 and self.steps % self.every == 0
        if due:
            for phi in self._maps:
                phi.redraw_()
        self.steps += 1
        return due

    def state_dict(self) -> dict[str, Any]:
        """Steps begun so far; the draws themselves are in the model's ``state_dict``."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.steps = int(state["steps"])
