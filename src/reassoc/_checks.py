"""Checks of tensors: each error names the argument, what was expected, what came and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from .feature_maps import FeatureMap
from .rules import Rule


def check_tensor(
    name: str, x: Tensor, sizes: tuple[int | str, ...], like: Tensor | None = None, whose: str = "query"
) -> None:
    """Rank, sizes (a string names a free one), floating dtype, and agreement with ``like``."""
    if not isinstance(x, Tensor):
        hint = "; torch.from_numpy(x) makes one" if type(x).__module__ == "numpy" else ""
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}{hint}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    fits = x.ndim == len(sizes) and all(
        isinstance(s, str) or s == n for s, n in zip(sizes, x.shape, strict=True)
    )
    if not fits:
        wanted = "(" + ", ".join(str(s) for s in sizes) + ")"
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
    if like is not None and (x.dtype != like.dtype or x.device != like.device):
        raise TypeError(
            f"{name} must have the {whose}'s dtype and device ({like.dtype}, {like.device}), got "
            f"({x.dtype}, {x.device})"
        )


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    """A bool mask of keys; anything of another rank is not a mask of keys."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor, True = real key, got {got}; use mask.bool()")
    if tuple(mask.shape) != shape:
        hint = ""
        if mask.ndim > 2:
            hint = (
                "; a mask over pairs of positions cannot be used: no summary shared by all queries "
                "exists for it. Use causal=, window=, key_mask= or cu_seqlens=, or softmax attention"
            )
        raise ValueError(f"{name} must have shape (B, M) = {shape}, got {tuple(mask.shape)}{hint}")
    if mask.device != device:
        raise TypeError(f"{name} must be on {device}, got {mask.device}")


def check_visibility(rule: Rule, causal: bool, window: int | None, queries: int, keys: int) -> None:
    """``causal`` needs as many queries as keys, ``window`` needs ``causal``, delta rules are causal."""
    if rule.family == "delta" and not causal:
        raise ValueError(
            f"rule {type(rule).__name__} needs causal=True: what a key writes depends on the keys before it. "
            "For queries that all read the final state, use read(query, feature_map, state) with the state "
            "of return_state=True or of AttentionState.apply(summarize(...))"
        )
    if causal and queries != keys:
        raise ValueError(
            f"causal=True needs as many queries as keys, got N={queries} and M={keys}; for queries that "
            "continue a sequence pass the earlier keys as state="
        )
    if window is not None and not causal:
        raise ValueError("window needs causal=True: it counts back from the query's own position")


def key_heads(query_heads: int, heads: int, feature_map: FeatureMap) -> None:
    """Grouped heads fit, and the map's own heads too."""
    if heads == 0 or query_heads % heads:
        raise ValueError(
            f"query heads must be a multiple of key heads, got {query_heads} and {heads}; head h reads "
            "key head h // (H // G)"
        )
    check_map_heads(heads, feature_map)


def check_map_heads(heads: int, feature_map: FeatureMap) -> None:
    """A map with parameters per head needs exactly its own number of key heads."""
    if feature_map.heads is not None and feature_map.heads != heads:
        raise ValueError(f"feature_map has heads={feature_map.heads}, the keys have {heads} heads")
