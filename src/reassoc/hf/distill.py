"""Training a converted model back towards softmax: attention transfer, then low-rank adaptation.

Stage 1, :func:`transfer`: every layer's map learns softmax's output, layer by layer, from one forward pass
of the model with its own softmax attention. Stage 2, :func:`tune`: maps and low-rank adapters of the
attention layers learn the text together. Both run in transformers' Trainer, and so under accelerate and
torchrun, and go on where an interrupted run stopped.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import get_last_checkpoint

from .._errors import InputError
from ._interface import SLOT
from ._layer import KernelLayer
from ._probe import find_sites
from .convert import kernel_layers
from .observe import softmax_teacher
from .text import Example, padded


@dataclass(frozen=True)
class Training:
    """How one stage trains.

    Attributes:
        steps: optimizer steps. batch: examples a step, on every process.
        learning_rate: of the maps; ``adapter_rate``: of the adapters, stage 2 only. Both rise over the
            first twentieth of the steps and fall along a cosine.
        folder: where checkpoints go, and where an interrupted run is found again; ``None``: nothing is kept.
        save_every: steps between checkpoints.
        bfloat16: run the model in mixed precision; maps stay in float32.
        seed: of the order of examples and of the adapters.
    """

    steps: int = 100
    batch: int = 1
    learning_rate: float = 1e-3
    adapter_rate: float = 3e-4
    folder: Path | None = None
    save_every: int = 50
    bfloat16: bool = False
    seed: int = 0


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
        The log: ``{"step": ..., "loss": ...}`` every few steps.

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
        return _train(stage, examples, training, groups)
    finally:
        for p, flag in before:
            p.requires_grad_(flag)


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
    log = _train(adapted, examples, training, [g for g in groups if g["params"]], kind)
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


def _collate(rows: Sequence[Example]) -> Example:
    batch = padded(rows)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def _train(
    stage: nn.Module,
    examples: Sequence[Example],
    training: Training,
    groups: list[dict[str, Any]],
    kind: type[Trainer] = Trainer,
) -> list[dict[str, float]]:
    if not examples:
        raise InputError("training needs at least one example of text")
    t = training
    with tempfile.TemporaryDirectory() as nowhere:
        folder = str(t.folder or nowhere)
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=t.steps,
            per_device_train_batch_size=t.batch,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, t.steps // 20),
            max_grad_norm=1.0,
            bf16=t.bfloat16,
            seed=t.seed,
            save_strategy="steps" if t.folder else "no",
            save_steps=t.save_every,
            save_total_limit=1,
            logging_steps=max(1, t.steps // 50),
            report_to=[],
            disable_tqdm=not sys.stderr.isatty(),
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            use_cpu=not torch.cuda.is_available(),
        )
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        trainer = kind(
            model=stage, args=arguments, train_dataset=list(examples), data_collator=_collate,
            optimizers=(optimizer, None),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
        trainer.train(resume_from_checkpoint=last)
        return [
            {"step": row["step"], "loss": row["loss"]} for row in trainer.state.log_history if "loss" in row
        ]
