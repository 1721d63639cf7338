"""What a whole conversion is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._errors import InputError


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion is asked for.

    Attributes:
        feature_map, map_options, window, sinks, layers, rule: as :func:`reassoc.hf.convert` takes them; with
            ``layers=()`` nothing is converted: the softmax model, tuned alike, as a control.
        length: tokens of an example. calibration_tokens: how many to calibrate on.
        transfer_steps, transfer_rate: of stage 1. tune_steps, tune_rate, kernel_rate, objective: of stage 2,
            the rates of adapters and of kernel layers.
        batch, bfloat16, seed: of both. save_every: steps between checkpoints of an unfinished stage.
        eval_tokens: of each test text, taken evenly; for models that write no text, of its lines.
    """

    feature_map: str | None = "codebook"
    map_options: Mapping[str, Any] | None = None
    window: int | None = 64
    sinks: int = 4
    layers: tuple[int, ...] | None = None
    rule: str = "sum"
    length: int = 1024
    calibration_tokens: int = 65536
    transfer_steps: int = 100
    transfer_rate: float = 1e-3
    tune_steps: int = 0
    tune_rate: float = 3e-4
    kernel_rate: float = 1e-3
    objective: str = "next-token"
    batch: int = 1
    bfloat16: bool = False
    seed: int = 0
    save_every: int = 50
    eval_tokens: int = 16384

    def check(self) -> None:
        """Raise `InputError` for numbers that cannot be; what depends on the model is checked later."""
        for name, least in (
            ("calibration_tokens", 1), ("transfer_steps", 0), ("tune_steps", 0), ("batch", 1),
            ("save_every", 1), ("eval_tokens", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least {least}")
        for name in ("transfer_rate", "tune_rate", "kernel_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; expected a number above 0")
        if self.objective not in ("next-token", "teacher"):
            raise InputError(f"objective is {self.objective!r}; expected 'next-token' or 'teacher'")
        if self.objective == "teacher" and self.layers == ():
            raise InputError("objective 'teacher' needs a converted layer: the softmax model is the teacher")
        near = (self.window or 0) + self.sinks
        if self.layers != () and self.length <= near:
            raise InputError(
                f"length is {self.length}, and window and sinks are {near} tokens together: no key is ever "
                "far, so there is nothing to learn; take a longer length or a smaller window"
            )
