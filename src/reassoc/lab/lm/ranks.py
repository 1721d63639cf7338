"""Several processes training one model: what they share, and who speaks."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from ..._errors import InputError


@dataclass(frozen=True)
class Ranks:
    """One process among all: number ``rank`` of ``count``."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The mean over processes of a tensor, in place."""
        if self.count > 1:
            distributed.all_reduce(value)
            value /= self.count
        return value

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every process, on the first one; nothing on the others."""
        if self.count == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.count)] if self.first else None
        distributed.gather(tensor.contiguous(), found)
        return found or []

    def wait(self) -> None:
        """Until every process is here."""
        if self.count > 1:
            distributed.barrier()

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model with gradients averaged over processes.

        Buffers are not sent around: every process draws the same random features by itself, which
        :meth:`check_same` makes sure of.
        """
        if self.count == 1:
            return model
        self.check_same(model)
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)

    def check_same(self, model: nn.Module) -> None:
        """Parameters and random features are the same bits in every process.

        Raises:
            RuntimeError: they are not; going on would average gradients of different models.
        """
        if self.count == 1:
            return
        digest = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            digest.update(
                name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.count)]
        distributed.all_gather(found, own)
        if any(not torch.equal(other, own) for other in found):
            raise RuntimeError("the processes hold different models: random features or weights differ")


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    """Join the other processes of ``torchrun``, if that started this one.

    Raises:
        InputError: the environment of ``torchrun`` is incomplete.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        yield Ranks()
        return
    try:
        distributed.init_process_group("gloo")
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"WORLD_SIZE is {size}, but the processes cannot be joined ({error}); start them with torchrun"
        ) from None
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()
