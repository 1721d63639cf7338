"""What a conversion costs: perplexity, agreement of embeddings, and recall over a distance.

Every measure takes a model as it is, converted or not, and the same examples give the same tokens to both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from .._errors import InputError
from .text import Example, padded, plain_ids

# Common nouns; those whose first token is their own in a model's vocabulary become its candidates.
WORDS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket",
    "kitchen", "ladder", "mirror", "needle", "ocean", "pencil", "queen", "river", "silver", "tiger",
    "uncle", "valley", "window", "yellow", "anchor", "basket", "copper", "dragon", "eagle", "flower",
    "guitar", "honey", "iron", "jungle", "king", "lemon", "moon", "north", "orange", "paper", "rabbit",
    "school", "table", "winter", "bread", "camera", "doctor", "finger", "glass", "horse",
)  # fmt: skip
CANDIDATES = 20
BEFORE = 32  # tokens of text in front of the key: it is not among the first ones, which stay exact
LOGITS = 1024  # positions whose predictions are in float32 at a time


def decodes(model: PreTrainedModel) -> bool:
    """Whether a model writes text, one token after another."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def check_length(model: PreTrainedModel, length: int) -> None:
    """Raise `InputError` if a model does not take sequences so long."""
    most = getattr(model.config, "max_position_embeddings", None)
    if length < 2 or (isinstance(most, int) and length > most):
        limit = f"at most {most}" if isinstance(most, int) else "any number from 2 on"
        raise InputError(f"length is {length}; this model takes {limit} tokens, and at least 2 are needed")


@torch.no_grad()
def block_losses(
    model: PreTrainedModel, examples: Sequence[Example], progress: Callable[[int], None] | None = None
) -> list[float]:
    """Mean negative log likelihood of a token, in nats, for each block of :func:`reassoc.hf.blocks`.

    The first token of a block is given, not predicted.

    Raises:
        InputError: a model that writes no text, or no examples.
    """
    if not decodes(model):
        raise InputError(f"{type(model).__name__} predicts no next token: it has no perplexity")
    if not examples:
        raise InputError("perplexity needs at least one block of text")
    check_length(model, max(len(row["input_ids"]) for row in examples))
    training, found = model.training, []
    model.eval()
    for done, row in enumerate(examples):
        ids = row["input_ids"].to(model.device)
        logits, wanted = model(ids[None], use_cache=False).logits[0, :-1], ids[1:]
        parts = zip(logits.split(LOGITS), wanted.split(LOGITS), strict=True)
        total = sum(functional.cross_entropy(some.float(), of, reduction="sum").item() for some, of in parts)
        found.append(total / len(wanted))
        if progress is not None:
            progress(done + 1)
    model.train(training)
    return found


def perplexity(model: PreTrainedModel, examples: Sequence[Example]) -> float:
    """The exponential of the mean negative log likelihood of a token, over blocks of text.

    The first token of a block is given, not predicted.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import torch, reassoc.hf
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> row = {"input_ids": torch.arange(64), "attention_mask": torch.ones(64, dtype=torch.int64)}
        >>> 50 < reassoc.hf.perplexity(LlamaForCausalLM(config), [row]) < 80
        True
    """
    losses = block_losses(model, examples)
    return math.exp(sum(losses) / len(losses))


@torch.no_grad()
def embeddings(model: PreTrainedModel, examples: Sequence[Example], batch: int = 16) -> Tensor:
    """The mean of the last layer's outputs over the real tokens of each example: float32 ``(n, width)``.

    Args:
        examples: of :func:`reassoc.hf.lines`. batch: how many together; padding changes nothing.

    Raises:
        InputError: no examples.
    """
    if not examples:
        raise InputError("embeddings need at least one line of text")
    check_length(model, max(2, *(len(row["input_ids"]) for row in examples)))
    training, found = model.training, []
    model.eval()
    for start in range(0, len(examples), batch):
        rows = {n: t.to(model.device) for n, t in padded(examples[start : start + batch]).items()}
        hidden = model.base_model(**rows).last_hidden_state.float()
        weight = rows["attention_mask"][..., None].float()
        found.append(((hidden * weight).sum(1) / weight.sum(1)).cpu())
    model.train(training)
    return torch.cat(found)


class Agreement(NamedTuple):
    """Cosines between two models' embeddings of the same examples."""

    mean: float
    low: float  # 5th percentile
    lines: int


def agreement(first: Tensor, second: Tensor) -> Agreement:
    """How alike two sets of embeddings ``(n, width)`` are, row by row."""
    cosine = functional.cosine_similarity(first.double(), second.double(), dim=-1)
    return Agreement(cosine.mean().item(), cosine.quantile(0.05).item(), len(cosine))


class Recalled(NamedTuple):
    """How often a word was known again, with a 95 % interval (Wilson) of the share."""

    distance: int
    right: int
    trials: int
    low: float
    high: float


@torch.no_grad()
def recall(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str],
    distance: int = 1000,
    *,
    trials: int = 40,
    progress: Callable[[int], None] | None = None,
) -> Recalled:
    """A key named early, asked for ``distance`` tokens later: what a window alone cannot do.

    A trial is some text, "The pass key is WORD. Remember it.", ``distance`` tokens of text, and "The pass
    key is". It is right if, of 20 candidate words, WORD is the one whose first token is most probable: a
    guess is right once in 20. Words take turns, and every trial has a stretch of text of its own.

    Raises:
        InputError: a model that writes no text, texts that are too short, or a tokenizer without 20 words
            that differ in their first token.
    """
    if not decodes(model):
        raise InputError(f"{type(model).__name__} predicts no next token: it cannot be asked for a word")
    if distance < 1 or trials < 1:
        raise InputError(f"recall takes at least 1 token and 1 trial, got {distance} and {trials}")
    words, firsts = _candidates(tokenizer)
    stretches = _stretches(tokenizer, texts, BEFORE + distance, trials)
    asked, rest = plain_ids(tokenizer, "\nThe pass key is"), plain_ids(tokenizer, ". Remember it.\n")
    check_length(model, BEFORE + distance + 2 * len(asked) + len(rest) + max(map(len, words)))
    training, right = model.training, 0
    model.eval()
    for trial, stretch in enumerate(stretches):
        index = trial % CANDIDATES
        ids = [*stretch[:BEFORE], *asked, *words[index], *rest, *stretch[BEFORE:], *asked]
        logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1]
        right += int(logits[firsts].argmax()) == index
        if progress is not None:
            progress(trial + 1)
    model.train(training)
    return Recalled(distance, right, trials, *wilson(right, trials))


def wilson(right: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of a share, which stays within 0 and 1 (Wilson 1927)."""
    share, extra = right / trials, z * z / trials
    middle = (share + extra / 2) / (1 + extra)
    half = z * math.sqrt(share * (1 - share) / trials + extra / trials / 4) / (1 + extra)
    return max(0.0, middle - half), min(1.0, middle + half)


def _candidates(tokenizer: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens of 20 words, and the first of each, no two alike."""
    found: dict[int, list[int]] = {}
    for word in WORDS:
        ids = plain_ids(tokenizer, f" {word}")
        if ids and ids[0] != tokenizer.unk_token_id:
            found.setdefault(ids[0], ids)
    if len(found) < CANDIDATES:
        raise InputError(
            f"this tokenizer tells {len(found)} of {len(WORDS)} words apart by their first token; "
            f"{CANDIDATES} are needed to ask for one"
        )
    firsts = list(found)[:CANDIDATES]
    return [found[first] for first in firsts], firsts


def _stretches(tokenizer: Any, texts: Sequence[str], length: int, count: int) -> list[list[int]]:
    """``count`` runs of ``length`` tokens, spread evenly over the texts, which take turns."""
    ids = [plain_ids(tokenizer, text) for text in texts]
    short = min(map(len, ids), default=0)
    if short < length:
        raise InputError(f"recall needs {length} tokens of each text, the shortest has {short}")
    found = []
    for index in range(count):
        own = ids[index % len(ids)]
        start = (len(own) - length) * index // max(1, count - 1)
        found.append(own[start : start + length])
    return found
