"""Runs of tokens summarized on their own."""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from ._checks import check_mask, check_tensor, key_heads
from ._features import Features
from ._prepare import Keys, settings
from ._problem import pose
from ._state import state_dtype
from ._summary import Summary
from .feature_maps import FeatureMap
from .rules import Rule


def summarize(
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap | str,
    rule: Rule | None = None,
    *,
    normalize: str | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Summary:
    """The affine map of a run of tokens: what they do to any state.

    ``state.apply(summarize(...))`` is the state after them, and :func:`reassoc.compose` joins runs:
    the algebra behind chunks, pieces and several machines.

    Args:
        key: ``(B, G, M, d)``. value: ``(B, G, M, e)``.
        feature_map, rule, normalize, key_mask, backend: as in :func:`reassoc.linear_attention`.

    Returns:
        A :class:`Summary`; under a delta rule with its ``transition``, which costs as much as r more
        value columns.
    """
    check_tensor("key", key, ("B", "G", "M", "d"))
    batch, groups, length, dim = key.shape
    check_tensor("value", value, (batch, groups, length, "e"), key, "key")
    s = settings(feature_map, dim, rule=rule, normalize=normalize, backend=backend, like=key)
    key_heads(groups, groups, s.map)
    check_mask("key_mask", key_mask, (batch, length), key.device)
    with torch.autocast(key.device.type, enabled=False):
        ready = Keys(key, value, key_mask, s, s.accumulate(key.dtype))
        features, kept = s.map.feature_dim, state_dtype(key.dtype)
        log = None if ready.features.log is None else ready.value.new_zeros(batch, groups, 0, 1)
        nobody = Features(ready.value.new_zeros(batch, groups, 0, features), log)
        start: Tensor | None = None
        if ready.beta is not None:
            # What the run makes of the identity, while writing nothing to it, is its M.
            blank = ready.value.new_zeros(batch, groups, length, features)
            eye = torch.eye(features, dtype=blank.dtype, device=blank.device).expand(batch, groups, -1, -1)
            start = torch.cat([eye, blank.new_zeros(*eye.shape[:3], ready.value.shape[-1])], dim=-1)
            ready.value = torch.cat([blank, ready.value], dim=-1)
        answer = kernels.solve(pose(nobody, ready, s, memory=start, causal=False), s.backend)
        memory, transition = answer.memory, None
        assert memory is not None
        if ready.beta is not None:
            transition, memory = memory.to(kept).split([features, memory.shape[-1] - features], dim=-1)
        decay = None if ready.log_decay is None else ready.log_decay.sum(2).to(kept)
        count = torch.full((batch,), length, device=key.device) if key_mask is None else key_mask.sum(-1)
        scale = None if answer.scale is None else answer.scale.to(kept)
        return Summary(memory.to(kept), scale, decay, count, s.origin, transition)
