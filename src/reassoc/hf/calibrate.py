"""Setting every layer's map from one pass over text: no training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._errors import InputError
from ._layer import KernelLayer
from .convert import kernel_layers
from .observe import softmax_teacher
from .text import Example, padded


def calibrate(
    model: PreTrainedModel,
    examples: Sequence[Example],
    *,
    tokens: int = 16384,
    batch: int = 1,
    bfloat16: bool = False,
) -> int:
    """Let the map of every converted layer learn from what softmax attention sees there.

    Random maps learn exact identities of their kernel (:class:`reassoc.feature_maps.Calibrator`), codebooks
    their centers, landmark maps their fit. The model runs with its own softmax attention meanwhile.

    Args:
        model: a converted model; its maps are set in place.
        examples: from :func:`reassoc.hf.blocks` or :func:`reassoc.hf.lines`.
        tokens: how many to look at, taken evenly from all examples.
        batch: examples in one pass. bfloat16: run the model in mixed precision.

    Returns:
        Number of layers set; maps that learn nothing from data count for none.

    Raises:
        InputError: a model that is not converted, or no examples.
    """
    layers = list(kernel_layers(model))
    if not layers:
        raise InputError("calibrate takes a converted model; call convert first")
    makers: dict[KernelLayer, Any] = {
        layer: getattr(layer.feature_map, "calibrator", None) for layer in layers
    }
    calibrators = {layer: make() for layer, make in makers.items() if make is not None}
    if not calibrators:
        return 0
    if not examples:
        raise InputError("calibrate needs at least one example of text")

    def collect(
        layer: KernelLayer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor
    ) -> None:
        if layer in calibrators:
            calibrators[layer].update(query.float(), key.float(), mask)

    training = model.training
    model.eval()
    device = model.device
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
    with torch.no_grad(), softmax_teacher(collect), mixed:
        chosen = spread(examples, tokens)
        for start in range(0, len(chosen), batch):
            rows = padded(chosen[start : start + batch])
            model.base_model(**{name: row.to(device) for name, row in rows.items()})
    model.train(training)
    for calibrator in calibrators.values():
        calibrator.finish()
    return len(calibrators)


def spread(examples: Sequence[Example], tokens: int) -> list[Example]:
    """About ``tokens`` tokens' worth of the examples, evenly from first to last."""
    total = sum(len(row["input_ids"]) for row in examples)
    count = max(1, min(len(examples), round(len(examples) * tokens / max(1, total))))
    return [examples[int((index + 0.5) * len(examples) / count)] for index in range(count)]
