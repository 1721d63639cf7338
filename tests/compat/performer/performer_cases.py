"""Options that the comparisons with performer-pytorch share, and a quiet way to import it."""

import contextlib
import io
import warnings

import pytest
import torch

SIZES = {"num_tokens": 20, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "generalized": {"generalized_attention": True},
    "generalized causal": {"generalized_attention": True, "causal": True},
    "generalized sigmoid": {"generalized_attention": True, "kernel_fn": torch.nn.Sigmoid()},
    "no projection": {"no_projection": True},
    "no projection causal": {"no_projection": True, "causal": True},
    "reversible": {"reversible": True},
    "cross": {"cross_attend": True},
    "cross causal": {"cross_attend": True, "causal": True},
    "cross reversible": {"cross_attend": True, "reversible": True},
    "rezero": {"use_rezero": True},
    "scalenorm": {"use_scalenorm": True},
    "glu": {"ff_glu": True},
    "chunks": {"ff_chunks": 3},
    "shifted": {"shift_tokens": True},
    "shifted causal": {"shift_tokens": True, "causal": True},
    "local": {"local_attn_heads": 2, "local_window_size": 8},
    "local by layer": {"local_attn_heads": (4, 0), "local_window_size": 8, "causal": True},
    "tied": {"tie_embed": True},
    "learned positions": {"rotary_position_emb": False},
    "axial positions": {
        "rotary_position_emb": False, "axial_position_emb": True, "axial_position_shape": (8, 8),
    },
    "biases": {"qkv_bias": True, "attn_out_bias": True},
    "features": {"nb_features": 40},
}  # fmt: skip


def original():
    """performer-pytorch's modules, or skip. What it warns of on being imported is its own age."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The distutils package is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "distutils Version classes are deprecated", DeprecationWarning)
        package = pytest.importorskip("performer_pytorch")
        return package, pytest.importorskip("performer_pytorch.performer_pytorch")


def quietly(make, *args, **options):
    """Call; the original prints a line for every causal layer."""
    with contextlib.redirect_stdout(io.StringIO()):
        return make(*args, **options)


def distance(got, expected):
    """Largest difference relative to the largest entry."""
    return ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def padded(batch, length, hidden):
    """A mask of which the last sequence's last ``hidden`` positions are padding."""
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[-1, length - hidden :] = False
    return mask
