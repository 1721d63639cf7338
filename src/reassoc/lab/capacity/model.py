"""The model of Schlag et al. 2021's synthetic retrieval: embeddings, three projections, one attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, one_hot, scaled_dot_product_attention

from ... import linear_attention, read
from ...rules import Delta
from .cases import Case
from .task import Batch, answers
from .weights import delta_weights, shrink, sum_weights

EPS = 1e-6  # added to the denominators of queries
_AT_ONCE = 1 << 22  # entries of one-hot values in an evaluation: 16 MB in float32


class Retrieval(nn.Module):
    """Key ``W_k [v; e_k]``, query ``W_q e_q``, value ``v``: one-hot, so that it cannot be learned.

    ``v`` is the one-hot value, ``e`` the learned embedding of a key, normal at first. The delta rule's
    strength is ``sigmoid(w_b [v; e_k])``. Projections are applied to the N keys and N values there are, and
    looked up for each token: the same sums as projecting every token, fewer of them.

    Args:
        case: the attention. count: N. dim: d of keys and queries. width: of an embedding.
        seed: of a random map. generator: of the initial weights.
    """

    def __init__(
        self, case: Case, count: int, dim: int, width: int, seed: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.case, self.count, self.dim = case, count, dim
        self.phi = None if case.softmax else case.build(dim, seed)
        self.embedding = nn.Parameter(torch.randn(count, width, generator=generator))
        # As published: uniform up to d^-1/2, for softmax Xavier's; biases up to fan-in^-1/2.
        bound = (6 / (dim + width + count)) ** 0.5 if case.softmax else dim**-0.5
        self.key_weight = _uniform((dim, count + width), bound, generator)
        self.key_bias = _uniform((dim,), (count + width) ** -0.5, generator)
        bound = (6 / (dim + width)) ** 0.5 if case.softmax else dim**-0.5
        self.query_weight = _uniform((dim, width), bound, generator)
        self.query_bias = _uniform((dim,), width**-0.5, generator)
        if case.rule == "delta":
            bound = (count + width) ** -0.5
            self.beta_weight = _uniform((1, count + width), bound, generator)
            self.beta_bias = _uniform((1,), bound, generator)

    def loss(self, batch: Batch) -> Tensor:
        """``|y - read|^2 / 2``, the mean over the sequences."""
        query = embedding(batch.query, self.embedding) @ self.query_weight.T + self.query_bias
        key, beta = self._written(batch.keys, batch.values)
        if self.phi is None:
            weights = ((key @ query[..., None])[..., 0] * self.dim**-0.5).softmax(-1)
        elif beta is None:
            weights = sum_weights(query, key, self.phi, self.case.normalize, EPS)
        else:
            weights = delta_weights(query, key, beta, self.phi, self.case.normalize, EPS)
        found = weights.new_zeros(len(weights), self.count).scatter_add(1, batch.values, weights)
        return _loss(found, batch.target).mean()

    @torch.no_grad()
    def evaluate(self, keys: Tensor, values: Tensor) -> float:
        """The mean loss over every key of every sequence, by the operator itself.

        Args:
            keys, values: ``(B, T)``.
        """
        sequences = max(1, _AT_ONCE // self.count**2)
        parts = zip(keys.split(sequences), values.split(sequences), strict=True)
        return torch.cat([self._losses(*part) for part in parts]).mean().item()

    def _losses(self, keys: Tensor, values: Tensor) -> Tensor:
        """Loss of every key that is in its sequence, ``(n,)``."""
        target, asked = answers(keys, values, self.count)
        query = (self.embedding @ self.query_weight.T + self.query_bias).expand(len(keys), 1, -1, -1)
        key, beta = self._written(keys, values)
        key, value = key[:, None], one_hot(values, self.count).to(key.dtype)[:, None]
        normalize = self.case.normalize
        eps = EPS if normalize == "attention" else 0.0
        if self.phi is None:
            found = scaled_dot_product_attention(query, key, value)
        elif beta is None:
            found = linear_attention(
                query, key, value, self.phi, normalize=normalize, eps=eps, undefined="zero"
            )
        else:
            _, state = linear_attention(
                key, key, value, self.phi, rule=Delta(beta[:, None]), normalize=normalize, causal=True,
                eps=eps, undefined="zero", return_state=True,
            )  # fmt: skip
            found = read(query, self.phi, state, eps=eps, undefined="zero")
        if self.phi is not None and normalize == "sum":
            found = found * shrink(query, self.phi, EPS)
        return _loss(found[:, 0], target)[asked]

    def _written(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys ``(B, T, d)`` and strengths ``(B, T)`` of every token."""
        weight: Tensor = self.key_weight
        bias: Tensor = self.key_bias
        if self.case.rule == "delta":
            weight, bias = torch.cat([weight, self.beta_weight]), torch.cat([bias, self.beta_bias])
        of_value, of_key = weight.split([self.count, weight.shape[1] - self.count], dim=1)
        found = embedding(values, of_value.T + bias) + embedding(keys, self.embedding @ of_key.T)
        if self.case.rule != "delta":
            return found, None
        return found[..., :-1], found[..., -1].sigmoid()


def _loss(found: Tensor, target: Tensor) -> Tensor:
    """Half the squared distance to a one-hot value: ``(..., N)``, ``(...)`` -> ``(...)``."""
    hit = found.gather(-1, target[..., None])[..., 0]
    return (found.square().sum(-1) - 2 * hit + 1) / 2


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))
