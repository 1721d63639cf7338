"""Stage 1 of distillation: every layer's map learns softmax's output, all from one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._errors import InputError
from ._layer import KernelLayer
from .convert import kernel_layers
from .observe import softmax_teacher
from .text import Example
from .training import Training, train


class Transfer(nn.Module):
    """The kernel layers of a model as something to train; its loss is how far each is from softmax.

    The loss of a layer is ``sum |o - t|^2 / sum |t|^2`` over real rows, for each head, t being softmax's
    output. Each layer's gradient is taken while its inputs are at hand, so that the memory is that of one
    layer; they are handed to autograd all at once, so that any trainer works.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kernel_layers(model))
        self._model = [model]  # not a submodule: it is not trained, saved or wrapped

    def _apply(self, fn: Any, recurse: bool = True) -> Transfer:
        # A trainer that moves the layers to a device moves the whole model.
        self._model[0]._apply(fn, recurse)
        return self

    def forward(self, labels: Tensor | None = None, **inputs: Tensor) -> dict[str, Tensor]:
        """``{"loss": ()}``, the mean over layers, for a batch as :func:`reassoc.hf.padded` makes it.

        ``labels`` are not looked at: what is learned is in the layers.
        """
        losses: list[Tensor] = []
        gradients: list[Tensor] = []

        def observe(
            layer: KernelLayer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, target: Tensor
        ) -> None:
            parameters = [p for p in layer.parameters() if p.requires_grad]
            with torch.enable_grad():
                output, _ = layer(query, key, value, mask)
                loss = relative_error(output, target, mask)
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
                losses.append(loss.detach())
                gradients.extend(
                    (p * g).sum() for p, g in zip(parameters, found, strict=True) if g is not None
                )

        model = self._model[0]
        training = model.training
        model.eval()
        with torch.no_grad(), softmax_teacher(observe):
            model.base_model(**inputs)
        model.train(training)
        loss = torch.stack(losses).mean()
        # Its gradient is the layers' own; its value is the loss.
        carrier = torch.stack(gradients).sum() / len(losses)
        return {"loss": loss + carrier - carrier.detach()}


def relative_error(output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """``sum |o - t|^2 / sum |t|^2`` over real rows of ``(B, H, N, e)``, mean over heads: ``()``."""
    error, size = ((output.float() - target.float()).square(), target.float().square())
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        error, size = error.masked_fill(hidden, 0.0), size.masked_fill(hidden, 0.0)
    over = (0, 2, 3)
    return (error.sum(over) / size.sum(over).clamp(min=torch.finfo(torch.float32).tiny)).mean()


def transfer(
    model: PreTrainedModel, examples: Sequence[Example], training: Training
) -> list[dict[str, float]]:
    """Stage 1: train the maps of a converted model, in place; nothing else changes.

    Returns:
        A list of ``{"step": ..., "loss": ...}`` every few steps.

    Raises:
        InputError: a model that is not converted, or whose maps have nothing to train.
    """
    stage = Transfer(model)
    if not any(True for _ in stage.parameters()):
        raise InputError(
            "transfer needs a converted model whose maps can be trained, such as 'codebook' or 'hedgehog'"
        )
    trainable = {id(p) for p in stage.parameters()}
    before = [(p, p.requires_grad) for p in model.parameters()]
    for p, _ in before:
        p.requires_grad_(id(p) in trainable)
    try:
        groups = [{"params": list(stage.parameters()), "lr": training.learning_rate}]
        return train(stage, examples, training, groups)
    finally:
        for p, flag in before:
            p.requires_grad_(flag)
