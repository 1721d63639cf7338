"""An encoder, and a decoder that reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .autoregressive_wrapper import AutoregressiveWrapper
from .language_model import PerformerLM


class PerformerEncDec(nn.Module):
    """Two :class:`PerformerLM`; options of the encoder begin with ``enc_``, of the decoder with ``dec_``.

    Args:
        dim: size of a token in both. ignore_index, pad_value: see :class:`AutoregressiveWrapper`.
        tie_token_embeds: one table of token embeddings. no_projection, legacy: see :class:`FastAttention`.
        kwargs: options of :class:`PerformerLM` with either prefix; others are ignored.

    Raises:
        ValueError: ``enc_dim`` or ``dec_dim``.
    """

    def __init__(
        self,
        dim: int,
        ignore_index: int = 0,
        pad_value: int = 0,
        tie_token_embeds: bool = False,
        no_projection: bool = False,
        *,
        legacy: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        encoder, decoder, _ = _by_prefix(kwargs)
        if "dim" in encoder or "dim" in decoder:
            raise ValueError("enc_dim and dec_dim are not options: dim is that of both")
        shared = {"dim": dim, "no_projection": no_projection}
        enc = PerformerLM(**{"legacy": legacy, **encoder, **shared})
        dec = PerformerLM(**{"legacy": legacy, **decoder, **shared, "causal": True, "cross_attend": True})
        if tie_token_embeds:
            enc.token_emb = dec.token_emb
        self.enc = enc
        self.dec = AutoregressiveWrapper(dec, ignore_index=ignore_index, pad_value=pad_value)

    @torch.no_grad()
    def generate(
        self,
        seq_in: Tensor,  # (B, M)
        seq_out_start: Tensor,  # (B, N)
        seq_len: int,
        **kwargs: Any,
    ) -> Tensor:  # (B, at most seq_len)
        """Sample after ``seq_out_start``; ``enc_mask`` masks ``seq_in``, also where the decoder reads it."""
        encoder, decoder, others = _by_prefix(kwargs)
        if "mask" in encoder:
            decoder.setdefault("context_mask", encoder["mask"])
        was_training = self.enc.training
        self.enc.eval()
        try:
            context = self.enc(seq_in, return_encodings=True, **encoder)
        finally:
            self.enc.train(was_training)
        return self.dec.generate(seq_out_start, seq_len, context=context, **{**decoder, **others})

    def forward(
        self,
        seq_in: Tensor,  # (B, M)
        seq_out: Tensor,  # (B, N)
        enc_mask: Tensor | None = None,  # bool (B, M)
        **kwargs: Any,
    ) -> Tensor:
        """The loss of ``seq_out`` given ``seq_in``."""
        encoder, decoder, _ = _by_prefix(kwargs)
        context = self.enc(seq_in, mask=enc_mask, return_encodings=True, **encoder)
        loss: Tensor = self.dec(seq_out, context=context, context_mask=enc_mask, **decoder)
        return loss


def _by_prefix(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Options of the encoder and of the decoder without their prefixes, and the others."""
    encoder, decoder, others = {}, {}, {}
    for name, given in options.items():
        if name.startswith("enc_"):
            encoder[name.removeprefix("enc_")] = given
        elif name.startswith("dec_"):
            decoder[name.removeprefix("dec_")] = given
        else:
            others[name] = given
    return encoder, decoder, others
