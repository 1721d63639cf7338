"""What both stages of distillation share: how long, how fast, and transformers' Trainer to do it.

So accelerate and torchrun scale them, and an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from .._errors import InputError
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


def _collate(rows: Sequence[Example]) -> Example:
    batch = padded(rows)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def train(
    stage: nn.Module,
    examples: Sequence[Example],
    training: Training,
    groups: list[dict[str, Any]],
    kind: type[Trainer] = Trainer,
) -> list[dict[str, float]]:
    """Train what ``groups`` hold, and return the log: ``{"step": ..., "loss": ...}`` every few steps."""
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
