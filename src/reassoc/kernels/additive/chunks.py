"""Keys cut into chunks, what each chunk writes, and the state before each chunk.

Shapes: n chunks of C positions; B, G, r, c as in :mod:`.problem`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._affine import add_decays, advance
from ..._features import Features

CHUNK = 64  # positions: the triangle inside costs as much as the reads of a 64-column state


class KeyChunks(NamedTuple):
    """Consecutive positions in chunks: features ``(B, G, n, C, r)``, value ``(B, G, n, C, c)``,
    log_decay ``(B, G, n, C, 1 or r)`` or ``None``.
    """  # noqa: D205

    key: Features
    value: Tensor
    log_decay: Tensor | None


class Written(NamedTuple):
    """What runs of tokens do to a state: memory ``(B, G, n, r, c)`` at ``scale`` ``(B, G, n, r)``,
    after everything older has decayed by ``log_decay`` ``(B, G, n, 1 or r)``.
    """  # noqa: D205

    memory: Tensor
    scale: Tensor | None
    log_decay: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Written:
        """Apply a function of one tensor to every part."""
        scale, log_decay = (None if part is None else function(part) for part in self[1:])
        return Written(function(self.memory), scale, log_decay)

    def narrow(self, start: int, count: int) -> Written:
        """Chunks ``start`` to ``start + count - 1``."""
        return self.map(lambda t: t.narrow(2, start, count))


class Before(NamedTuple):
    """The state that each chunk's queries see of everything older: memory ``(B, G, n, r, c)``,
    scale ``(B, G, n, r)`` or ``None``.
    """  # noqa: D205

    memory: Tensor
    scale: Tensor | None


def cut(x: Tensor, chunk: int, pad: float = 0.0) -> Tensor:
    """``(..., L, w)`` -> ``(..., n, chunk, w)``, the last chunk filled up with ``pad``."""
    missing = -x.shape[-2] % chunk
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing), value=pad)
    chunks: Tensor = x.unflatten(-2, (-1, chunk))
    return chunks


def decay_after(log_decay: Tensor) -> Tensor:
    """Decay from just after each position to the end of its run (positions on axis -2).

    A sum from the end, never a difference of two long sums: minus infinity stays harmless.
    """
    later = log_decay.flip(-2).cumsum(-2).flip(-2)
    return torch.cat([later[..., 1:, :], torch.zeros_like(later[..., :1, :])], dim=-2)


def running_max(log: Tensor, log_decay: Tensor | None) -> Tensor:
    """Largest logarithm up to each position (axis -2), older ones decayed on the way; no gradient.

    Doubling instead of one long cumulative sum: resets (minus infinity) do not meet.
    """
    if log_decay is None:
        return log.cummax(-2).values
    log, span = torch.broadcast_tensors(log, log_decay.detach())
    step = 1  # `log` is the maximum over the last `step` positions, `span` their total decay
    while step < log.shape[-2]:
        older = log[..., :-step, :] + span[..., step:, :]
        log = torch.cat([log[..., :step, :], torch.maximum(log[..., step:, :], older)], dim=-2)
        longer = span[..., step:, :] + span[..., :-step, :]
        span = torch.cat([span[..., :step, :], longer], dim=-2)
        step *= 2
    return log


def write(chunks: KeyChunks) -> Written:
    """The summary of every chunk on its own."""
    (mantissa, log), value, log_decay = chunks
    total = None if log_decay is None else log_decay.sum(-2)
    if log_decay is not None:
        after = decay_after(log_decay)
        log = after if log is None else log + after
    scale = None
    if log is not None:
        if chunks.key.log is not None:
            scale = log.detach().amax(-2)
            log = log - torch.where(scale == -torch.inf, 0.0, scale)[..., None, :]
        weight = log.exp()
        mantissa = weight if mantissa is None else mantissa * weight
    assert mantissa is not None
    if scale is not None:
        scale = scale.expand(*scale.shape[:-1], mantissa.shape[-1])
    return Written(mantissa.mT @ value, scale, total)


def scan(
    written: Written,
    memory: Tensor,  # (B, G, r, c): the state before the first chunk
    scale: Tensor | None,  # (B, G, r)
) -> tuple[Before, Tensor, Tensor | None]:
    """The state before every chunk, and after the last."""
    if written.scale is None and written.log_decay is None:
        states = torch.cat([memory[:, :, None], written.memory], dim=2).cumsum(2)
        # A copy: a view would keep the states of every chunk alive for as long as the last one.
        return Before(states[:, :, :-1], None), states[:, :, -1].clone(), None
    memories, scales = [], []
    for index in range(written.memory.shape[2]):
        memories.append(memory)
        scales.append(scale)
        part = written.narrow(index, 1).map(lambda t: t[:, :, 0])
        memory, scale = advance(memory, scale, part.log_decay, part.memory, part.scale)
    kept = None if scale is None else torch.stack([s for s in scales if s is not None], dim=2)
    return Before(torch.stack(memories, dim=2), kept), memory, scale


def compose(first: Written, second: Written) -> Written:
    """Run ``first``, then run ``second``, elementwise over chunks."""
    memory, scale = advance(first.memory, first.scale, second.log_decay, second.memory, second.scale)
    return Written(memory, scale, add_decays(first.log_decay, second.log_decay))


def slide(written: Written, width: int) -> Written:
    """Composition of every ``width`` consecutive chunks: ``(.., n, ..)`` -> ``(.., n - width + 1, ..)``.

    Powers of two composed as in fast exponentiation: about ``2 log2(width)`` compositions, and never
    a subtraction, which would lose the small keys behind a large one that has left the window.
    """
    count = written.memory.shape[2] - width + 1
    power, size, offset = written, 1, 0
    result: Written | None = None
    while True:
        if width & size:
            piece = power.narrow(offset, count)
            result = piece if result is None else compose(result, piece)
            offset += size
        if offset == width:
            assert result is not None
            return result
        reach = power.memory.shape[2] - size
        power = compose(power.narrow(0, reach), power.narrow(size, reach))
        size *= 2
