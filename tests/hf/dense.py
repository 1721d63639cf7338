"""What a converted layer means, with every weight written out in an N x N matrix, in float64."""

import torch
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "reassoc_dense"


def attend(module, query, key, value, attention_mask, scaling=None, is_causal=None, **options):
    layer = getattr(module, "reassoc", None)
    group = query.shape[1] // key.shape[1]
    if layer is None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = bool(module.is_causal if is_causal is None else is_causal)
        seen = sight(query.shape[2], key.shape[2], causal, options.get("sliding_window"), attention_mask)
        scores = scaling * query @ repeat(key, group).mT
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num()
        output = weights @ repeat(value, group)
    else:
        output = (delta if "delta" in layer.conversion.rule else additive)(
            layer, query, key, value, attention_mask, group
        )
    return output.transpose(1, 2).contiguous(), None


def repeat(x, group):
    return x.repeat_interleave(group, 1)


def sight(queries, keys, causal, span, mask):
    """Which keys a query may see, bool (B or 1, N, M)."""
    ago = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = torch.ones_like(ago, dtype=torch.bool)
    if causal:
        seen = (ago >= 0) & (ago < (span or keys))
    return seen[None] if mask is None else seen & mask[:, None].bool()


def features(layer, query, key, group):
    """Queries with the factor that a map leaves out, and keys for every query head."""
    phi = layer.feature_map
    q = phi.query(query.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1))  # one head for each map
    q = q.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2)
    return q, repeat(phi.key(key), group)


def additive(layer, query, key, value, mask, group):
    site, wanted = layer.site, layer.conversion
    length = key.shape[2]
    mask = torch.ones(key.shape[0], length, dtype=torch.bool) if mask is None else mask.bool()
    seen = sight(length, length, site.causal, site.span, mask)
    hybrid = wanted.window is not None and site.causal
    near = torch.zeros_like(seen)
    counted = mask  # keys that the rule writes, one after the other
    sinks = 0 if site.span else wanted.sinks
    lag = 0
    if hybrid:
        early = mask & (mask.cumsum(1) <= sinks)
        near = seen & (sight(length, length, True, wanted.window, mask) | early[:, None])
        counted, lag = mask & ~early, wanted.window
    weights = torch.zeros(*query.shape[:3], length, dtype=torch.float64)
    if hybrid:
        scores = site.scale * query @ repeat(key, group).mT
        weights = weights + scores.exp() * near[:, None]
    if layer.feature_map is not None:
        q, k = features(layer, query, key, group)
        far = q @ k.mT * (seen & ~near)[:, None]
        if wanted.rule == "decay":
            order = counted.cumsum(1)  # how many keys are written up to this position
            row = torch.arange(length) - lag
            written = order[:, row.clamp(min=0)] * (row >= 0)
            if not site.causal:
                written = order[:, -1:].expand_as(order)
            since = (written[:, :, None] - order[:, None]).clamp(min=0)
            rate = repeat(layer.decay.double().exp()[None], group)[..., None, None]
            far = far * (-rate * since[:, None]).exp()
        if hybrid:
            far = far * layer.log_weight.exp()[:, None, None]
        weights = weights + far
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1.0, total)) @ repeat(value, group)


def delta(layer, query, key, value, mask, group):
    """One token after the other: S <- S + beta k (v - k S), features that add up to one, no denominator."""
    q, k = (t / t.sum(-1, keepdim=True) for t in features(layer, query, key, group))
    value = repeat(value, group)
    beta = repeat(layer.strength.sigmoid()[None], group)[..., None, None]
    memory = torch.zeros(*k.shape[:2], k.shape[3], value.shape[3], dtype=torch.float64)
    rows = []
    for i in range(k.shape[2]):
        one, v = k[:, :, i : i + 1], value[:, :, i : i + 1]
        write = beta * one.mT @ (v - one @ memory)
        if mask is not None:
            write = write * mask[:, i, None, None, None]
        memory = memory + write
        rows.append(q[:, :, i : i + 1] @ memory)
    return torch.cat(rows, 2)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, attention_mask=None, **__: attention_mask)
