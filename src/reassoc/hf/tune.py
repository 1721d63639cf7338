"""Stage 2 of distillation: maps and low-rank adapters of the attention layers learn the text together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.pytorch_utils import Conv1D

from .._errors import InputError
from ._interface import SLOT
from ._probe import find_sites
from .convert import kernel_layers
from .observe import softmax_teacher
from .text import Example
from .training import Training, train
from .transfer import transfer


def tune(
    model: PreTrainedModel,
    examples: Sequence[Example],
    training: Training,
    *,
    rank: int = 8,
    alpha: int = 16,
    objective: str = "next-token",
) -> tuple[PreTrainedModel, list[dict[str, float]]]:
    """Stage 2: low-rank adapters on every attention layer's linear maps, merged at the end, and the kernels.

    A model that is not converted is trained in the same way: the control without which a figure means
    nothing.

    Args:
        model: a causal language model; changed in place.
        examples: of :func:`reassoc.hf.blocks`.
        rank, alpha: of the adapters.
        objective: ``"next-token"``, or ``"teacher"``: the divergence from the model's own predictions with
            softmax attention and without adapters.

    Returns:
        The model with the adapters merged, and the log.

    Raises:
        InputError: a model that writes no text, an unknown objective, or no teacher to learn from.
    """
    from peft import LoraConfig, get_peft_model

    if not model.can_generate() or model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} predicts no next token; only decoders are tuned")
    converted = next(kernel_layers(model), None) is not None
    if objective not in ("next-token", "teacher") or (objective == "teacher" and not converted):
        raise InputError(
            f"objective is {objective!r}; expected 'next-token', or 'teacher' for a converted model"
        )
    names = {module: name for name, module in model.named_modules()}
    attention = [m for m in names if hasattr(m, SLOT)] if converted else list(find_sites(model, None))
    targets = {
        f"{names[module]}.{name}": isinstance(part, nn.Linear)
        for module in attention
        for name, part in module.named_children()
        if isinstance(part, nn.Linear | Conv1D)
    }
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    use_cache = model.config.use_cache
    torch.manual_seed(training.seed)
    adapters = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(targets),
        modules_to_save=[SLOT] if converted else None, fan_in_fan_out=not all(targets.values()),
    )  # fmt: skip
    with warnings.catch_warnings():
        # peft asks for a property under its old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted = get_peft_model(model, adapters)
    # Checkpoints would look for this name on a hub.
    adapted.peft_config["default"].base_model_name_or_path = ""
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            split["lora_" in name].append(parameter)
    groups = [
        {"params": split[True], "lr": training.adapter_rate},
        {"params": split[False], "lr": training.learning_rate},
    ]
    adapted.config.use_cache = False
    kind = _TeacherTrainer if objective == "teacher" else Trainer
    log = train(adapted, examples, training, [g for g in groups if g["params"]], kind)
    merged: PreTrainedModel = adapted.merge_and_unload()
    merged.config.use_cache = use_cache
    for name, parameter in merged.named_parameters():
        parameter.requires_grad_(before[name])
    return merged, log


def distill(
    model: PreTrainedModel, examples: Sequence[Example], first: Training, second: Training, **options: Any
) -> tuple[PreTrainedModel, list[list[dict[str, float]]]]:
    """Both stages, each resumable in its own folder: :func:`transfer`, then :func:`tune` with ``options``.

    Returns:
        The model, and the log of each stage.
    """
    log = transfer(model, examples, first)
    tuned, more = tune(model, examples, second, **options)
    return tuned, [log, more]


class _TeacherTrainer(Trainer):
    """Trains towards the predictions of the same model with softmax attention and without adapters."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Any:
        """Mean divergence of the predictions over real tokens, in nats."""
        inputs = {name: part for name, part in inputs.items() if name != "labels"}
        adapted: Any = self.accelerator.unwrap_model(model)
        with torch.no_grad(), softmax_teacher(), adapted.disable_adapter():
            wanted = adapted(**inputs).logits.float().log_softmax(-1)
        outputs = model(**inputs)
        got = outputs.logits.float().log_softmax(-1)
        real = inputs["attention_mask"].bool()
        loss = (wanted.exp() * (wanted - got)).sum(-1)[real].mean()
        return (loss, outputs) if return_outputs else loss
