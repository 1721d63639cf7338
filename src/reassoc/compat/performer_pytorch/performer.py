"""The stack of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from .._mode import say_once
from .attention import CrossAttention, SelfAttention
from .checkpoints import complete, reduce, tells_older
from .fast_attention import FastAttention
from .kernels import RELU
from .layers import Chunk, FeedForward, PreLayerNorm, PreScaleNorm, PreShiftTokens, ReZero, find_modules
from .redraw import ProjectionUpdater
from .reversible import ReversibleSequence, SequentialSequence


class Performer(nn.Module):
    """Layers of self-attention and feed-forward, and with ``cross_attend`` of cross-attention after each.

    Args:
        dim: size of a token. depth: number of layers. heads, dim_head: see :class:`Attention`.
        local_attn_heads: number of local heads, for all layers or a tuple of one for each.
        local_window_size: their window. causal: each token sees those up to itself.
        ff_mult, ff_glu, ff_dropout: see :class:`FeedForward`. ff_chunks: see :class:`Chunk`.
        nb_features, generalized_attention, kernel_fn, no_projection: see :class:`FastAttention`.
        feature_redraw_interval: see :class:`ProjectionUpdater`. auto_check_redraw: count at each call.
        reversible: keep no activations; see :class:`ReversibleSequence`.
        use_scalenorm, use_rezero: instead of layer normalization. shift_tokens: see :class:`PreShiftTokens`.
        attn_dropout, qkv_bias, attn_out_bias: see :class:`Attention`.
        legacy: see :class:`FastAttention`.

    A state dict tells by its names whether its weights are of a release before 1.0.9. Such a one loads as
    well, and sets ``FastAttention.older``; where that is set, ``state_dict`` gives the older names, so that a
    saved model keeps its arithmetic. Loading later names clears it.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        dim_head: int | None,
        local_attn_heads: int | tuple[int, ...] = 0,
        local_window_size: int = 256,
        causal: bool = False,
        ff_mult: int = 4,
        nb_features: int | None = None,
        feature_redraw_interval: int | None = 1000,
        reversible: bool = False,
        ff_chunks: int = 1,
        generalized_attention: bool = False,
        kernel_fn: Callable[[Tensor], Tensor] = RELU,
        use_scalenorm: bool = False,
        use_rezero: bool = False,
        ff_glu: bool = False,
        ff_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        cross_attend: bool = False,
        no_projection: bool = False,
        auto_check_redraw: bool = True,
        qkv_bias: bool = True,
        attn_out_bias: bool = True,
        shift_tokens: bool = False,
        *,
        legacy: str | None = None,
    ) -> None:
        super().__init__()
        self.legacy = legacy
        local = local_attn_heads if isinstance(local_attn_heads, tuple) else (local_attn_heads,)
        local = local * depth if len(local) == 1 else local
        if len(local) != depth:
            raise ValueError(f"local_attn_heads must name one number for each of {depth} layers, got {local}")
        shared: dict[str, Any] = {
            "heads": heads, "dim_head": dim_head, "nb_features": nb_features,
            "generalized_attention": generalized_attention, "kernel_fn": kernel_fn, "dropout": attn_dropout,
            "no_projection": no_projection, "qkv_bias": qkv_bias, "attn_out_bias": attn_out_bias,
            "legacy": legacy,
        }  # fmt: skip
        wrap: Callable[[nn.Module], nn.Module] = partial(PreLayerNorm, dim)
        if use_rezero:
            wrap = ReZero
        if use_scalenorm:
            wrap = partial(PreScaleNorm, dim)

        def feed_forward() -> nn.Module:
            return Chunk(ff_chunks, FeedForward(dim, ff_mult, ff_dropout, glu=ff_glu), along_dim=1)

        layers = nn.ModuleList()
        for local_heads in local:
            pair: list[nn.Module] = [
                SelfAttention(
                    dim, causal, local_heads=local_heads, local_window_size=local_window_size, **shared
                ),
                feed_forward(),
            ]
            if shift_tokens:
                pair = [PreShiftTokens((0, 1) if causal else (-1, 0, 1), fn) for fn in pair]
            layers.append(nn.ModuleList(map(wrap, pair)))
            if cross_attend:
                layers.append(nn.ModuleList(map(wrap, [CrossAttention(dim, **shared), feed_forward()])))
        # The feed-forward layer gets the mask only where shifted tokens would leak padding into it; in the
        # original they do.
        masked = (True, shift_tokens and legacy is None)
        total = depth * (2 if cross_attend else 1)
        route = {"mask": (masked,) * total, "pos_emb": ((True, False),) * total}
        if cross_attend:
            route |= dict.fromkeys(("context", "context_mask"), ((False, False), (True, False)) * depth)
        self.net = (ReversibleSequence if reversible else SequentialSequence)(layers, args_route=route)
        self.auto_check_redraw = auto_check_redraw
        self.proj_updater = ProjectionUpdater(self.net, feature_redraw_interval)
        self.register_state_dict_post_hook(_older_names)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        older = tells_older(state_dict, prefix, self.net)
        if older:
            if self.legacy == "exact":
                say_once("performer_pytorch", "weights from before 1.0.9, whose arithmetic differs: as then")
            complete(state_dict, prefix, self.net)
        if older is not None:
            for attention in find_modules(self.net, FastAttention):
                attention.older = older
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def calls_since_last_redraw(self) -> Tensor:
        """The updater's counter, by the name that it has in an older state dict."""
        return self.proj_updater.calls_since_last_redraw

    def fix_projection_matrices_(self) -> None:
        """Never redraw again."""
        self.proj_updater.fix_projections_()

    def check_redraw_projections(self) -> None:
        """Count a call, and redraw if it is time: what ``auto_check_redraw`` does at each."""
        self.proj_updater.redraw_projections()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """``(B, N, dim) -> (B, N, dim)``.

        Args:
            x: tokens.
            kwargs: ``mask`` and ``pos_emb``, with ``cross_attend`` ``context`` and ``context_mask``, as for
                :meth:`Attention.forward`; others are ignored, as in the original.

        Raises:
            ValueError: ``output_attentions``, which scBERT's copy has: N x N weights.
        """
        if kwargs.get("output_attentions"):
            raise ValueError(
                "output_attentions is not here: linear attention never forms its weights. "
                "reassoc.attention_matrix gives those of the rows that you name"
            )
        if self.auto_check_redraw:
            self.check_redraw_projections()
        out: Tensor = self.net(x, **kwargs)
        return out


def _older_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """What keeps :attr:`FastAttention.older` across a file."""
    if any(attention.older for attention in find_modules(module, FastAttention)):
        reduce(state_dict, prefix)
