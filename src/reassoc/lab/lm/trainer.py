"""One model in training: a step, and everything that the next step depends on."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...nn import ModelState, RedrawSchedule
from .._training import optimizer, schedule, update
from ..recipes import Recipe
from .ranks import Ranks
from .settings import Settings
from .streams import Streams
from .text import Text

_SOURCES = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class Curve:
    """What was measured at each step: loss (nats per token, before the step), norm of the gradient before
    clipping, seconds. ``diverged``: the step whose loss or gradient was not finite, where training ended.
    """  # noqa: D205

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    diverged: int | None = None


class Trainer:
    """Trains a recipe's model on a text.

    Reads and sets torch's random numbers: whoever makes one keeps theirs with ``torch.random.fork_rng``.

    Args:
        recipe, settings, text: what to train. seed: of weights, random features and dropout.
        ranks: processes that share the batch.

    Raises:
        InputError: the batch cannot be divided among the processes.
    """

    def __init__(self, recipe: Recipe, settings: Settings, text: Text, seed: int, ranks: Ranks) -> None:
        self.recipe, self.settings, self.ranks = recipe, settings, ranks
        self.streams = Streams(
            text.training.tokens, settings.batch, settings.segment, ranks.rank, ranks.count
        )
        torch.manual_seed(seed)
        self.model = settings.model(recipe, text.vocabulary, seed)
        if ranks.rank:  # weights are those of every process, dropout is not
            torch.manual_seed(_mixed(seed, ranks.rank))
        self.redraws = None if recipe.redraw is None else RedrawSchedule(self.model, recipe.redraw)
        self.optimizer = optimizer(self.model, settings.rate, settings.weight_decay)
        self._parallel: nn.Module = ranks.wrapped(self.model)
        self.states: ModelState | None = None
        self.curve = Curve()

    @property
    def step_number(self) -> int:
        """Steps done."""
        return len(self.curve.losses)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.curve.diverged is not None or self.step_number >= self.settings.steps

    def step(self) -> None:
        """Train one step. A loss or gradient that is not finite ends the training and leaves the weights."""
        start = time.perf_counter()
        number = self.step_number
        inputs, targets, fresh = self.streams.at(number)
        if self.redraws is not None and self.redraws.step():
            self.states = None  # made with the features before: another kernel
            self.ranks.check_same(self.model)
        if self.recipe.carried:
            before = None if fresh or self.states is None else self.states.detach()
            logits, self.states = self._parallel(inputs, states=before, return_states=True)
        else:
            logits = self._parallel(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        value = self.ranks.mean(loss.detach().clone()).item()
        norm = math.nan
        if math.isfinite(value):
            rate = self.settings.rate * schedule(number, self.settings.steps, self.settings.warmup)
            norm = update(self.model, self.optimizer, loss, lr=rate, clip=self.settings.clip)
        if not math.isfinite(norm):
            self.curve.diverged = number
        self.curve.losses.append(value)
        self.curve.norms.append(norm)
        self.curve.seconds.append(time.perf_counter() - start)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on, on the first process; the others take part."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, moments in self.optimizer.state.items():
            found |= {f"optimizer.{names[id(parameter)]}.{s}": moments[s] for s in _SOURCES}
        for name in ("losses", "norms", "seconds"):
            found[f"curve.{name}"] = torch.tensor(getattr(self.curve, name), dtype=torch.float64)
        own, about = ({}, "") if self.states is None else self.states.tensors()
        own = {"random": torch.get_rng_state(), **{f"state.{name}": t for name, t in own.items()}}
        for name, tensor in own.items():
            for rank, part in enumerate(self.ranks.gather(tensor)):
                found[f"rank{rank}.{name}"] = part
        redraws = None if self.redraws is None else self.redraws.state_dict()
        return found, {
            "step": self.step_number, "segment": self.step_number % self.streams.segments,
            "states": about, "redraws": redraws, "diverged": self.curve.diverged,
        }  # fmt: skip

    def load(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Go on from what :meth:`tensors` gave.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: it is not that of this recipe and these settings.
        """
        self.model.load_state_dict(_under("model.", tensors))
        if about["step"] != 1 or about["diverged"] is None:  # a first step that failed made no moments
            self._load_moments(_under("optimizer.", tensors))
        curve = {name: tensors[f"curve.{name}"].tolist() for name in ("losses", "norms", "seconds")}
        self.curve = Curve(**curve, diverged=about["diverged"])
        if not (len({len(column) for column in curve.values()}) == 1 and about["step"] == self.step_number):
            raise ValueError("the curve does not end at the step of the checkpoint")
        own = _under(f"rank{self.ranks.rank}.", tensors)
        state = _under("state.", own)
        self.states = ModelState.from_tensors(state, about["states"]) if state else None
        if self.redraws is not None:
            self.redraws.load_state_dict(about["redraws"])
        self.ranks.check_same(self.model)
        torch.set_rng_state(own["random"])

    def _load_moments(self, moments: dict[str, Tensor]) -> None:
        # By name and in place: the optimizer's own state_dict goes by position, and what a file holds may
        # be aligned differently from new memory, which can change the order of sums.
        for name, parameter in self.model.named_parameters():
            if f"{name}.step" not in moments:
                raise ValueError(f"moments of {name} are missing")
            for source in _SOURCES:
                tensor = moments[f"{name}.{source}"]
                if tensor.shape != (torch.Size() if source == "step" else parameter.shape):
                    raise ValueError(f"moments of {name} have shape {tuple(tensor.shape)}")
                self.optimizer.state[parameter][source] = tensor.clone()


def _mixed(seed: int, rank: int) -> int:
    """A seed for each process: torch looks at 32 bits, so a sum or a shift would repeat another stream."""
    return int.from_bytes(hashlib.sha256(f"{seed} {rank}".encode()).digest()[:4], "big")


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
