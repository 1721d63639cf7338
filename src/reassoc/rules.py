"""Update rules: what a token does to the state before its feature and value are written.

Each rule is an affine map of the state, ``S -> M S + phi(k) v^T``; ``M`` is the identity for
:class:`Sum` and a diagonal for :class:`Decay`. A rule only names its gates: the arithmetic is in the
kernel family that it points to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sum:
    """``S_t = S_{t-1} + phi(k_t) v_t^T``: every token adds, nothing is forgotten.

    Source: Katharopoulos et al. 2020, "Transformers are RNNs", equations 16-20.
    """

    name: ClassVar[str] = "sum"
    family: ClassVar[str] = "additive"

    @property
    def log_decay(self) -> None:
        """A sum has no decay."""
        return None


@dataclass(frozen=True, eq=False)
class Decay:
    """``S_t = exp(log_decay_t) S_{t-1} + phi(k_t) v_t^T``: decay first, then write; z decays alike.

    Args:
        log_decay: natural logarithm of the factor kept per token, all entries <= 0; minus infinity
            forgets everything seen before the token (a reset). Floating point, of shape
            ``(G,)`` (one constant per key head: RetNet), ``(B, G, M)`` (per token: Mamba-2, simple
            GLA) or ``(B, G, M, r)`` (per token and feature: gated linear attention).

    Raises:
        TypeError: ``log_decay`` is not a floating point tensor.
        ValueError: an entry is positive or the rank is none of the above. The sign is read from the
            data, so it is not checked while ``torch.compile`` traces.

    Sources: Sun et al. 2023 (RetNet), Yang et al. 2024 (gated linear attention).
    """

    log_decay: Tensor
    name: ClassVar[str] = "decay"
    family: ClassVar[str] = "additive"

    def __post_init__(self) -> None:
        gate = self.log_decay
        if not isinstance(gate, Tensor) or not gate.is_floating_point():
            got = f"{gate.dtype} tensor" if isinstance(gate, Tensor) else type(gate).__name__
            raise TypeError(f"log_decay must be a floating point tensor, got {got}")
        if gate.ndim not in (1, 3, 4):
            raise ValueError(
                f"log_decay must have shape (G,), (B, G, M) or (B, G, M, r), got {tuple(gate.shape)}"
            )
        if not torch.compiler.is_compiling() and bool((gate > 0).any()):
            worst = gate[gate > 0].max().item()
            raise ValueError(
                f"log_decay must be <= 0 (a factor of at most one), got an entry of {worst:g}; "
                "pass the logarithm of the factor, for example torch.nn.functional.logsigmoid(gate)"
            )


Rule = Sum | Decay
