"""The summary of a run of tokens, and its composition.

A run of tokens acts on the state as an affine map ``S -> M S + B``, with ``B`` what the run itself wrote.
For the additive rules ``M`` is a diagonal, kept as a logarithm per feature; for the delta rules it is a
matrix, the product of a decay and a Householder-like factor per token. Chunking, streaming, windows,
packing and machines in a row are this one composition used five ways.

The state, a summary whose M is forgotten, is in :mod:`reassoc._state`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._affine import add_decays, advance


@dataclass(frozen=True)
class Origin:
    """What made a state: mixing states of different origin is an error, never a number."""

    feature_map: str
    rule: str
    normalize: str
    window: int | None = None

    def require(self, other: Origin, what: str) -> None:
        """Raise ``ValueError`` naming the first difference."""
        for name in ("feature_map", "rule", "normalize", "window"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(
                    f"{what}: the state was made with {name}={mine!r}, this call has {theirs!r}; "
                    "use the same settings throughout, or start from a new state"
                )


@dataclass(frozen=True)
class Tail:
    """The last ``window - 1`` positions of every sequence, which a window still needs.

    Attributes:
        mantissa, log: key features as in :class:`reassoc._features.Features`, ``(B, G, T, r)``
            (``log`` may be ``(B, G, T, 1)``).
        value: ``(B, G, T, c)``, the constant column of the normalizer included.
        log_decay: ``(B, G, T, 1 or r)`` or ``None``.
        mask: bool ``(B, T)``; positions before the start of the sequence are False.
    """

    mantissa: Tensor | None
    log: Tensor | None
    value: Tensor
    log_decay: Tensor | None
    mask: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Tail:
        """Apply a function of one tensor to every part."""
        parts = {name: None if part is None else function(part) for name, part in vars(self).items()}
        return Tail(**parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Summary:
    """The affine map of a run of tokens, as :func:`reassoc.summarize` makes it.

    Attributes:
        memory: ``(B, G, r, c)``: S, and z as a last column where the normalization keeps one.
        log_scale: ``(B, G, r)``, or ``None`` where features are not exponential.
        log_decay: ``(B, G, r or 1)``: the diagonal M as a logarithm, ``None`` for the identity. With a
            ``transition`` it acts on z alone, which no rule reduces.
        length: int64 ``(B,)``: how many real keys the run holds.
        origin: which map, rule and normalization made it.
        transition: ``(B, G, r, r)``: the M of S under a delta rule, decays included; ``None`` for the
            additive rules.
    """

    memory: Tensor
    log_scale: Tensor | None
    log_decay: Tensor | None
    length: Tensor
    origin: Origin
    transition: Tensor | None = None


def require_same_shape(what: str, mine: Tensor, other: Tensor) -> None:
    """Batch, key heads, features and value columns agree; broadcasting would make a wrong state."""
    if mine.shape != other.shape:
        raise ValueError(
            f"{what}: (batch, key heads, features, value columns) must agree, got {tuple(mine.shape)} and "
            f"{tuple(other.shape)}"
        )


def act(
    summary: Summary,
    memory: Tensor,  # (B, G, r, c) what was written before
    scale: Tensor | None,  # (B, G, r)
) -> tuple[Tensor, Tensor | None]:
    """``M S + B``: the memory and the scale after the run."""
    if summary.transition is None:
        return advance(memory, scale, summary.log_decay, summary.memory, summary.log_scale)
    has_z = "attention" in summary.origin.normalize
    S = summary.transition @ (memory[..., :-1] if has_z else memory)
    if not has_z:
        return S + summary.memory, None
    z, _ = advance(memory[..., -1:], None, summary.log_decay, summary.memory[..., -1:], None)
    return torch.cat([S + summary.memory[..., :-1], z], dim=-1), None


def compose(first: Summary, second: Summary) -> Summary:
    """The summary of ``first`` followed by ``second``. Associative; commutative only for the rule Sum.

    Raises:
        ValueError: the two were made by different maps, rules or normalizations, or differ in shape.
        TypeError: something that is no summary.
    """
    for thing in (first, second):
        if not isinstance(thing, Summary):
            raise TypeError(f"compose joins summaries, got {type(thing).__name__}")
    first.origin.require(second.origin, "compose")
    require_same_shape("compose", first.memory, second.memory)
    memory, log_scale = act(second, first.memory, first.log_scale)
    log_decay = add_decays(first.log_decay, second.log_decay)
    transition = None
    if first.transition is not None and second.transition is not None:
        transition = second.transition @ first.transition
    length = first.length + second.length
    return Summary(memory, log_scale, log_decay, length, first.origin, transition)
