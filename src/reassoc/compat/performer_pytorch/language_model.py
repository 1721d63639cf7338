"""Tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .kernels import RELU
from .layers import Always
from .performer import Performer
from .positions import AbsolutePositionalEmbedding, FixedPositionalEmbedding, axial_positional_embedding


class PerformerLM(nn.Module):
    """Embeddings, a :class:`Performer`, and a linear layer to the tokens.

    Args:
        num_tokens: size of the vocabulary. max_seq_len: longest sequence. dim: size of a token.
        emb_dropout: of the embeddings. tie_embed: logits from the token embeddings.
        rotary_position_emb: sinusoidal positions, and rotary ones in every layer.
        axial_position_emb: without rotary ones, those of the package axial-positional-embedding, of
            axial_position_shape; without either, learned ones.
        The others: see :class:`Performer`, with some defaults of their own.

    Raises:
        ValueError: sizes that do not fit. ImportError: axial positions or local heads without their package.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        max_seq_len: int,
        dim: int,
        depth: int,
        heads: int,
        dim_head: int = 64,
        local_attn_heads: int | tuple[int, ...] = 0,
        local_window_size: int = 256,
        causal: bool = False,
        ff_mult: int = 4,
        nb_features: int | None = None,
        feature_redraw_interval: int | None = 1000,
        reversible: bool = False,
        ff_chunks: int = 1,
        ff_glu: bool = False,
        emb_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        generalized_attention: bool = False,
        kernel_fn: Callable[[Tensor], Tensor] = RELU,
        use_scalenorm: bool = False,
        use_rezero: bool = False,
        cross_attend: bool = False,
        no_projection: bool = False,
        tie_embed: bool = False,
        rotary_position_emb: bool = True,
        axial_position_emb: bool = False,
        axial_position_shape: tuple[int, ...] | None = None,
        auto_check_redraw: bool = True,
        qkv_bias: bool = False,
        attn_out_bias: bool = False,
        shift_tokens: bool = False,
        legacy: str | None = None,
    ) -> None:
        super().__init__()
        self.legacy = legacy
        self.max_seq_len = max_seq_len
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.pos_emb: nn.Module
        self.layer_pos_emb: nn.Module
        if rotary_position_emb:
            self.pos_emb = FixedPositionalEmbedding(dim, max_seq_len)
            self.layer_pos_emb = FixedPositionalEmbedding(dim_head, max_seq_len)
        elif axial_position_emb:
            self.pos_emb = axial_positional_embedding(dim, max_seq_len, axial_position_shape)
        else:
            self.pos_emb = AbsolutePositionalEmbedding(dim, max_seq_len)
        if not rotary_position_emb:
            self.layer_pos_emb = Always(None)
        self.dropout = nn.Dropout(emb_dropout)
        self.performer = Performer(
            dim, depth, heads, dim_head, local_attn_heads, local_window_size, causal, ff_mult, nb_features,
            feature_redraw_interval, reversible, ff_chunks, generalized_attention, kernel_fn, use_scalenorm,
            use_rezero, ff_glu, ff_dropout, attn_dropout, cross_attend, no_projection, auto_check_redraw,
            qkv_bias, attn_out_bias, shift_tokens, legacy=legacy,
        )  # fmt: skip
        self.norm = nn.LayerNorm(dim)
        self.to_out = None if tie_embed else nn.Linear(dim, num_tokens)

    def check_redraw_projections(self) -> None:
        """See :meth:`Performer.check_redraw_projections`."""
        self.performer.check_redraw_projections()

    def fix_projection_matrices_(self) -> None:
        """See :meth:`Performer.fix_projection_matrices_`."""
        self.performer.fix_projection_matrices_()

    def forward(self, x: Tensor, return_encodings: bool = False, **kwargs: Any) -> Tensor:
        """Logits ``(B, N, num_tokens)``; with ``return_encodings`` what they are made from, ``(B, N, dim)``.

        Args:
            x: token numbers ``(B, N)``. kwargs: as for :meth:`Performer.forward`.

        Raises:
            ValueError: more tokens than ``max_seq_len``.
        """
        if x.shape[1] > self.max_seq_len:
            raise ValueError(f"x must have at most max_seq_len={self.max_seq_len} tokens, got {x.shape[1]}")
        embedded = self.token_emb(x)
        embedded = self.dropout(embedded + self.pos_emb(embedded))
        out: Tensor = self.performer(embedded, pos_emb=self.layer_pos_emb(embedded), **kwargs)
        out = self.norm(out)
        if return_encodings:
            return out
        return out @ self.token_emb.weight.mT if self.to_out is None else self.to_out(out)
