"""From an input file to a call: embeddings and head of a language model, masks, checks."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._errors import InputError
from ._checkpoint import FLOATS, INTEGERS, read_safetensors
from ._compare import Run
from ._recognize import FAST, PERFORMER, Model

# name: axes, kind of number
EXPECTED = {
    "tokens": ("(B, N)", "integer"),
    "x": ("(B, N, dim)", "floating point"),
    "mask": ("(B, N)", "bool"),
    "context": ("(B, M, dim)", "floating point"),
    "context_mask": ("(B, M)", "bool"),
}


@dataclass(frozen=True)
class Batch:
    """What the first layer gets, ``x (B, N, dim)``, with masks (True = real) and perhaps a context."""

    x: Tensor
    mask: Tensor | None
    context: Tensor | None
    context_mask: Tensor | None


def read_batch(path: str | os.PathLike[str], model: Model) -> Batch:
    """An input file for ``model``: safetensors with ``tokens`` or ``x``, and others of :data:`EXPECTED`.

    Raises:
        InputError: the file or its tensors do not fit the model.
    """
    given = read_safetensors(path)
    unknown = sorted(given.keys() - EXPECTED.keys())
    if unknown or ("tokens" in given) == ("x" in given):
        raise InputError(
            f"{path}: expected tokens or x, and perhaps {', '.join(list(EXPECTED)[2:])}; "
            f"it holds {', '.join(given) or 'nothing'}"
        )
    for name, tensor in given.items():
        axes, kind = EXPECTED[name]
        is_kind = {
            "integer": tensor.dtype in INTEGERS,
            "floating point": tensor.dtype in FLOATS,
            "bool": tensor.dtype == torch.bool,
        }[kind]
        if tensor.ndim != axes.count(",") + 1 or not is_kind or not tensor.numel():
            raise InputError(
                f"{path}: {name} must be {kind} {axes}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    x = _embedded(path, given["tokens"], model) if "tokens" in given else given["x"].float()
    dim = next(model.sizes[name] for name in ("dim", "d_model", "channels") if name in model.sizes)
    context = given.get("context")
    for name, numbers in (("x", x), ("context", context)):
        if numbers is not None and (numbers.shape[-1] != dim or not bool(numbers.isfinite().all())):
            raise InputError(f"{path}: {name} must be finite, with {dim} numbers a token as the model has")
    for name, like in (("mask", x), ("context_mask", context)):
        mask = given.get(name)
        if mask is not None and (like is None or mask.shape != like.shape[:2]):
            raise InputError(f"{path}: {name} of shape {tuple(mask.shape)} does not fit its tokens")
        if mask is not None and not bool(mask.any()):
            raise InputError(f"{path}: {name} has no real token, so there is nothing to compare")
    return Batch(
        x, given.get("mask"), None if context is None else context.float(), given.get("context_mask")
    )


def runner(model: Model, batch: Batch) -> Run:
    """A function that runs a rebuilt model on ``batch``, up to logits where the checkpoint has a head."""
    plain = replace(batch, mask=None, context_mask=None)
    options: dict[str, Any] = {}
    rotary = _beside(model, "layer_pos_emb.emb") if model.library == PERFORMER else None
    if rotary is not None and rotary.ndim == 2:
        if batch.x.shape[1] > rotary.shape[0]:
            raise InputError(f"{batch.x.shape[1]} tokens, but the model has {rotary.shape[0]} positions")
        options["pos_emb"] = rotary[None, : batch.x.shape[1]].float()

    def run(module: nn.Module, masked: bool = True, /) -> Tensor:
        given = batch if masked else plain
        if model.library == FAST:
            return _run_fast(module, given)
        if given.context is not None:
            options.update(context=given.context, context_mask=given.context_mask)
        return _head(model, module(given.x, mask=given.mask, **options))

    return run


def has_logits(model: Model) -> bool:
    """Whether what :func:`runner` gives are logits of tokens."""
    return model.library == PERFORMER and _logit_weight(model) is not None


def _run_fast(module: nn.Module, batch: Batch) -> Tensor:
    from .fast_transformers.attention import CausalLinearAttention
    from .fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

    length, lengths = batch.x.shape[1], None
    if batch.mask is not None:
        count = batch.mask.sum(1)
        if not torch.equal(batch.mask, torch.arange(length) < count[:, None]):
            raise InputError("mask: pytorch-fast-transformers takes lengths, so padding must come last")
        lengths = LengthMask(count, max_len=length)
    causal = any(isinstance(m, CausalLinearAttention) for m in module.modules())
    attn_mask = TriangularCausalMask(length) if causal else FullMask(length)
    output: Tensor = module(batch.x, attn_mask=attn_mask, length_mask=lengths)
    return output


def _beside(model: Model, name: str) -> Tensor | None:
    """A tensor of the language model around a performer, which its own name ends."""
    return model.around.get(model.root.removesuffix("performer.") + name)


def _embedded(path: str | os.PathLike[str], tokens: Tensor, model: Model) -> Tensor:
    table = _beside(model, "token_emb.weight") if model.library == PERFORMER else None
    if table is None or table.ndim != 2:
        raise InputError(f"{path}: the checkpoint has no token_emb.weight; give x, what the first layer gets")
    if bool((tokens < 0).any()) or bool((tokens >= table.shape[0]).any()):
        raise InputError(f"{path}: tokens must lie in 0..{table.shape[0] - 1}")
    x = functional.embedding(tokens.long(), table.float())
    positions = _beside(model, "pos_emb.emb")
    if positions is None:
        positions = _beside(model, "pos_emb.emb.weight")
    if positions is None or positions.ndim != 2 or positions.shape[1] != x.shape[-1]:
        raise InputError(
            f"{path}: positions of a kind that is not known here; give x, what the first layer gets"
        )
    if tokens.shape[1] > positions.shape[0]:
        raise InputError(
            f"{path}: {tokens.shape[1]} tokens, but the model has {positions.shape[0]} positions"
        )
    return x + positions[: tokens.shape[1]].float()


def _logit_weight(model: Model) -> Tensor | None:
    """Of the head of a PerformerLM, or its embeddings where it has none of its own."""
    weight = _beside(model, "to_out.weight")
    if weight is None:
        start = model.root.removesuffix("performer.") + "to_out."
        tied = not any(name.startswith(start) for name in model.around)
        weight = _beside(model, "token_emb.weight") if tied else None
    return weight if weight is not None and weight.ndim == 2 else None


def _head(model: Model, hidden: Tensor) -> Tensor:
    """The norm and the head that follow the layers of a PerformerLM, as far as the file has them."""
    scale, shift = _beside(model, "norm.weight"), _beside(model, "norm.bias")
    if not model.root.endswith("performer.") or scale is None or scale.shape != hidden.shape[-1:]:
        return hidden
    hidden = functional.layer_norm(
        hidden, scale.shape, scale.float(), None if shift is None else shift.float()
    )
    weight, bias = _logit_weight(model), _beside(model, "to_out.bias")
    if weight is None or weight.shape[1] != hidden.shape[-1]:
        return hidden
    return functional.linear(hidden, weight.float(), None if bias is None else bias.float())
