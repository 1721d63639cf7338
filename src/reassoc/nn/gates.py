"""Learned gates: how strongly a token writes, and how much it lets the state forget."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._citation import RULE_PAPERS
from ..rules import Decay, Delta, GatedDelta, Rule, Sum
from .config import AttentionConfig

_RANK = 16  # of a gate per feature (Yang et al. 2024, section 4.4): a full matrix would outweigh the layer
# Forgetting rates at the start, spread over heads (and features): memories of 10 to 1,000 tokens
# (the range of Gu and Dao 2023, section 3.6).
_FASTEST, _SLOWEST = 0.1, 0.001


class Gates(nn.Module):
    """The rule of a layer with its gates, made from the tokens.

    ``beta = sigmoid(W x + b)`` per key head; ``log_decay = -softplus(W x + b)``, or a constant per head,
    ``log(1 - 2 ** (-5 - h))``.

    Args:
        width: of the tokens. config: names the rule and the shape of its decay.
        features: r, for a decay per feature.

    Sources: Schlag et al. 2021 (beta); Dao and Gu 2024, Yang et al. 2025 (decay per token);
        Yang et al. 2024 (per feature); Sun et al. 2023 (constant).
    """

    def __init__(self, width: int, config: AttentionConfig, features: int) -> None:
        super().__init__()
        self.rule, self.groups = config.rule, config.groups
        self.beta = nn.Linear(width, self.groups) if "delta" in config.rule else None
        self.decay: nn.Module | None = None
        if config.rule in ("decay", "gated-delta"):
            if config.decay == "fixed":
                rates = -torch.log1p(-(2.0 ** (-5.0 - torch.arange(self.groups))))
                self.register_buffer("fixed", -rates)
            else:
                per_feature = config.decay == "feature"
                count = self.groups * (features if per_feature else 1)
                last = nn.Linear(_RANK if per_feature else width, count)
                self.decay = nn.Sequential(nn.Linear(width, _RANK, bias=False), last) if per_feature else last
                self._start(last)
        self.per_feature = config.decay == "feature"

    fixed: Tensor

    @property
    def papers(self) -> tuple[str, ...]:
        """For :func:`reassoc.citation`."""
        return (*RULE_PAPERS[self.rule.replace("-", " ")], *(() if self.decay is None else ("dao2024",)))

    @staticmethod
    def _start(layer: nn.Linear) -> None:
        """Rates spread evenly in their logarithm, little input dependence."""
        with torch.no_grad():
            layer.weight.mul_(0.1)
            rates = torch.logspace(math.log10(_FASTEST), math.log10(_SLOWEST), layer.out_features)
            layer.bias.copy_(rates.expm1().log())  # the inverse of softplus

    def forward(self, x: Tensor) -> Rule:
        """The rule for tokens ``(B, M, width)``: beta ``(B, G, M)``, log_decay as the config says."""
        if self.rule == "sum":
            return Sum()
        beta = None if self.beta is None else self.beta(x).sigmoid().mT
        if self.rule == "delta":
            assert beta is not None
            return Delta(beta)
        log_decay = self._log_decay(x)
        return Decay(log_decay) if beta is None else GatedDelta(beta, log_decay)

    def _log_decay(self, x: Tensor) -> Tensor:
        if self.decay is None:
            return self.fixed
        # As a logarithm of a sigmoid: torch's compiler takes the gradient of softplus for contiguous.
        gate: Tensor = functional.logsigmoid(-self.decay(x))
        if self.per_feature:
            gate = gate.unflatten(-1, (self.groups, -1))
        return gate.transpose(1, 2)

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return f"rule={self.rule}"
