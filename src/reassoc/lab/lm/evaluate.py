"""How well a trained model predicts text it has not seen, with and without carried context."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ...nn import LanguageModel
from .text import Split, Text

_ROWS = 16  # segments at a time
_PIECE = 2048  # tokens at a time of a carried text: any cut gives the same numbers


def nats(
    model: LanguageModel, split: Split, segment: int, carried: bool, before: Tensor | None = None
) -> float:
    """Mean negative log probability of every token but the first, in nats.

    Args:
        segment: truncated, every so many tokens the context is dropped. carried: it never is, one state goes
            over the whole part. before: int64 ``(n,)``, what that state has read when the part begins: a
            model trained with carried context is at a loss without one.
    """
    model.eval()
    tokens = split.tokens
    inputs, targets = tokens[:-1], tokens[1:]
    with torch.no_grad():
        if carried:
            total = _carried(model, inputs, targets, inputs[:0] if before is None else before)
        else:
            total = _truncated(model, inputs, targets, segment)
    return total / len(targets)


def _truncated(model: LanguageModel, inputs: Tensor, targets: Tensor, segment: int) -> float:
    whole = len(inputs) // segment * segment
    total = 0.0
    rows = zip(inputs[:whole].view(-1, segment).split(_ROWS), targets[:whole].view(-1, segment).split(_ROWS),
               strict=True)  # fmt: skip
    for these, those in rows:
        total += _sum(model(these), those)
    if whole < len(inputs):
        total += _sum(model(inputs[None, whole:]), targets[None, whole:])
    return total


def _carried(model: LanguageModel, inputs: Tensor, targets: Tensor, before: Tensor) -> float:
    total, states = 0.0, None
    for these in before[None].split(_PIECE, 1) if len(before) else ():
        _, states = model(these, states=states, return_states=True)
    for these, those in zip(inputs[None].split(_PIECE, 1), targets[None].split(_PIECE, 1), strict=True):
        logits, states = model(these, states=states, return_states=True)
        total += _sum(logits, those)
    return total


def _sum(logits: Tensor, targets: Tensor) -> float:
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.double().sum().item()


def perplexity(value: float) -> float:
    """Of nats per token; infinity beyond what a float can hold."""
    return math.exp(value) if value < 700 else math.inf if value == value else math.nan


def bits_per_byte(value: float, split: Split) -> float:
    """Of nats per token: the same scale for every tokenizer."""
    return value * (len(split.tokens) - 1) / max(1, split.bytes) / math.log(2)


def state_bytes(model: LanguageModel, segment: int) -> int:
    """Bytes that one sequence carries on after a segment: the state, or for softmax the cache by then."""
    model.eval()
    with torch.no_grad():
        _, states = model(torch.zeros(1, segment, dtype=torch.int64), return_states=True)
    return int(states.nbytes)


def sample(model: LanguageModel, text: Text, segment: int, seed: int, temperature: float = 0.7) -> list[str]:
    """The beginning of the test text, and how the model goes on: together one segment, as in training."""
    model.eval()
    prompt = text.test.tokens[: max(1, segment // 4)]
    generator = torch.Generator().manual_seed(seed)
    count = max(0, segment - len(prompt))
    tokens = [
        int(t) for t in model.generate(prompt[None], count, temperature=temperature, generator=generator)
    ]
    return [text.words(prompt.tolist()), text.words(tokens)]
