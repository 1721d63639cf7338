"""Update rules: what a token does to the state.

Each rule is an affine map of the state, ``S -> M S + B``. For the additive family (:class:`Sum`,
:class:`Decay`) M is the identity or a diagonal; for the delta family (:class:`Delta`,
:class:`GatedDelta`) it also takes away what the state held for the token's key. A rule only names its
gates: the arithmetic is in the kernel family that it points to.
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
    def beta(self) -> None:
        """A sum writes every value as it is."""
        return None

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
        _check_log_decay(self.log_decay)

    @property
    def beta(self) -> None:
        """A decay writes every value as it is."""
        return None


@dataclass(frozen=True, eq=False)
class Delta:
    """``S_t = S_{t-1} + phi(k_t) u_t^T`` with ``u_t = beta_t (v_t - S_{t-1}^T phi(k_t))``.

    Instead of adding the value, a token moves what the state holds for its key towards it. Causal
    only, without a window. ``normalize`` must be named: ``"sum"`` is what the rule was published with,
    ``"none"`` leaves the features as they are; under ``"attention"`` the normalizer z still adds up
    (unweighted by beta), so outputs shrink with time: that is there for comparison.

    The rule is not linear in its keys, so features are taken at their true scale. It is stable where
    ``0 <= beta_t |phi(k_t)|^2 <= 2``. Exponential maps under ``"none"`` or ``"attention"`` overflow
    where the recurrence itself does, and then give what IEEE arithmetic gives (infinity or NaN, from that
    token on): use ``"sum"``, which bounds positive features by one.

    Args:
        beta: writing strength, floating point ``(B, G, M)``; usually in [0, 1], not restricted.

    Raises:
        TypeError: ``beta`` is not a floating point tensor.
        ValueError: ``beta`` does not have three axes.

    Source: Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight Programmers".
    """

    beta: Tensor
    name: ClassVar[str] = "delta"
    family: ClassVar[str] = "delta"

    def __post_init__(self) -> None:
        _check_beta(self.beta)

    @property
    def log_decay(self) -> None:
        """The delta rule has no decay of its own."""
        return None


@dataclass(frozen=True, eq=False)
class GatedDelta:
    """:class:`Delta` after a decay: ``S <- exp(log_decay_t) S``, then the delta write with that S.

    z decays alike. Everything said of :class:`Delta` holds here.

    Args:
        beta: as for :class:`Delta`. log_decay: as for :class:`Decay`; per token this is Gated DeltaNet,
            per token and feature the rule of Kimi Linear.

    Raises:
        TypeError, ValueError: as for :class:`Delta` and :class:`Decay`.

    Sources: Yang et al. 2025 (Gated DeltaNet), Kimi Team 2025 (Kimi Linear).
    """

    beta: Tensor
    log_decay: Tensor
    name: ClassVar[str] = "gated delta"
    family: ClassVar[str] = "delta"

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        _check_log_decay(self.log_decay)


Rule = Sum | Decay | Delta | GatedDelta


def _check_beta(beta: Tensor) -> None:
    _check_floating("beta", beta)
    if beta.ndim != 3:
        raise ValueError(f"beta must have shape (B, G, M), got {tuple(beta.shape)}")


def _check_log_decay(gate: Tensor) -> None:
    _check_floating("log_decay", gate)
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


def _check_floating(name: str, gate: Tensor) -> None:
    if not isinstance(gate, Tensor) or not gate.is_floating_point():
        got = f"{gate.dtype} tensor" if isinstance(gate, Tensor) else type(gate).__name__
        raise TypeError(f"{name} must be a floating point tensor, got {got}")
