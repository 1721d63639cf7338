"""Training on the next token, and sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from .language_model import PerformerLM


def top_k(logits: Tensor, thres: float = 0.9) -> Tensor:
    """Minus infinity for all but the largest ``1 - thres`` of the logits ``(B, V)``; one is always left."""
    count = max(1, int((1 - thres) * logits.shape[-1]))
    kept, where = logits.topk(count)
    return torch.full_like(logits, -torch.inf).scatter(1, where, kept)


def top_p(logits: Tensor, thres: float = 0.9) -> Tensor:
    """Minus infinity for logits ``(B, V)`` after those that make up a probability of ``1 - thres``."""
    ordered, where = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    ordered = ordered.masked_fill((before > 1 - thres).index_fill(1, where.new_zeros(1), False), -torch.inf)
    return logits.scatter(1, where, ordered)


def repetition_penalty_fn(logits: Tensor, ctx: Tensor, theta: float = 1.2) -> Tensor:
    """Logits ``(B, V)`` of the tokens in ``ctx`` ``(B, N)`` made less likely, in each sequence by its own."""
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ctx, True)
    return torch.where(seen, torch.where(logits > 0, logits / theta, logits * theta), logits)


def _original_penalty(logits: Tensor, ctx: Tensor, theta: float) -> Tensor:
    """The original's: tokens of any sequence count for all, and a negative logit becomes likelier."""
    weight = torch.ones(logits.shape[-1], device=logits.device).index_fill(0, ctx.unique(), theta)
    return logits / weight


class AutoregressiveWrapper(nn.Module):
    """A language model with the loss of the next token, and generation.

    Args:
        net: the model, causal. ignore_index: token whose prediction counts for nothing.
        pad_value: there for old calls.
    """

    def __init__(self, net: PerformerLM, ignore_index: int = 0, pad_value: int = 0) -> None:
        super().__init__()
        self.pad_value = pad_value
        self.ignore_index = ignore_index
        self.net = net
        self.max_seq_len = net.max_seq_len

    @torch.no_grad()
    def generate(
        self,
        start_tokens: Tensor,  # (B, N) or (N,)
        seq_len: int,
        eos_token: int | None = None,
        temperature: float = 1.0,
        filter_logits_fn: Callable[..., Tensor] = top_k,
        filter_thres: float = 0.9,
        repetition_penalty: float = 1.0,
        repetition_penalty_ctx: int = 32,
        **kwargs: Any,
    ) -> Tensor:  # (B, at most seq_len) or (at most seq_len,)
        """Sample ``seq_len`` tokens, or until every sequence has just produced ``eos_token``.

        Args:
            filter_logits_fn: called with the logits and ``thres=filter_thres``.
            repetition_penalty: above 1, makes the last ``repetition_penalty_ctx`` tokens less likely.
            kwargs: ``mask`` for the start, ``context``, ``context_mask``, and others of the model's.
        """
        exact = getattr(self.net, "legacy", None) == "exact"
        out = torch.atleast_2d(start_tokens)
        start = out.shape[1]
        mask = kwargs.pop("mask", None)
        mask = torch.ones_like(out, dtype=torch.bool) if mask is None else torch.atleast_2d(mask)
        was_training = self.net.training
        self.net.eval()
        try:
            for _ in range(seq_len):
                mask = mask[:, -self.max_seq_len :]
                logits = self.net(out[:, -self.max_seq_len :], mask=mask, **kwargs)[:, -1]
                if repetition_penalty > 1.0:
                    recent = out[-repetition_penalty_ctx:] if exact else out[:, -repetition_penalty_ctx:]
                    penalize = _original_penalty if exact else repetition_penalty_fn
                    logits = penalize(logits, recent, theta=repetition_penalty)
                filtered = filter_logits_fn(logits, thres=filter_thres)
                sample = torch.multinomial((filtered / temperature).softmax(-1), 1)
                out = torch.cat([out, sample], dim=-1)
                mask = pad(mask, (0, 1), value=True)
                if eos_token is not None and bool((sample == eos_token).all()):
                    break
        finally:
            self.net.train(was_training)
        made: Tensor = out[:, start:]
        return made[0] if start_tokens.ndim == 1 else made

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The mean loss of each token of ``x`` ``(B, N)`` given those before; a mask has N or N - 1."""
        mask = kwargs.get("mask")
        if mask is not None and mask.shape[1] == x.shape[1]:
            kwargs["mask"] = mask[:, :-1]
        logits = self.net(x[:, :-1], **kwargs)
        loss: Tensor = cross_entropy(logits.transpose(1, 2), x[:, 1:], ignore_index=self.ignore_index)
        return loss
