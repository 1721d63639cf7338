"""Finished models on disk, and back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from ..._errors import InputError
from ...nn import LanguageModel, LanguageModelConfig
from .container import read, write
from .text import BYTES, load_tokenizer

FORMAT = "reassoc-lm-model-1"


def save_model(path: Path, model: LanguageModel, about: dict[str, Any]) -> None:
    """Write weights and random features, the config, and what else there is to say.

    Raises:
        InputError: it cannot be written; an earlier file is as it was.
    """
    whole = {"format": FORMAT, "config": model.config.to_dict(), **about}
    write(path, dict(model.state_dict()), whole, "model")


def load_model(path: Path | str, tokenizer: Path | str | None = None) -> LanguageModel:
    """Load a model that ``reassoc lm`` trained, ready to generate.

    Args:
        path: a file under ``models/``. tokenizer: the ``tokenizer.json`` that texts will be read with;
            given, it must be the one of the training. Models of bytes have none.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: missing, damaged or foreign file; a tokenizer or a vocabulary that does not fit.
    """
    path = Path(path)
    tensors, about = read(path, FORMAT, "model")
    trained = about.get("tokenizer")
    try:
        config = LanguageModelConfig.from_dict(about["config"])
        _check_size(config, tensors)
        if tokenizer is not None:
            _check_tokenizer(path, trained, config, Path(tokenizer))
        if trained is None and config.vocabulary != BYTES:
            raise ValueError(f"a vocabulary of {config.vocabulary} without a tokenizer; bytes are {BYTES}")
        model = LanguageModel(config)
        model.load_state_dict(tensors)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        line = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: the model does not fit its own description ({line})") from None
    return model.eval()


def _check_tokenizer(path: Path, trained: Any, config: LanguageModelConfig, given: Path) -> None:
    maker, about = load_tokenizer(given)
    if trained is None:
        raise InputError(f"{path}: was trained on bytes; {given.name} does not fit it")
    if about["sha256"] != trained.get("sha256"):
        raise InputError(
            f"{path}: was trained with another tokenizer ({trained.get('name')}, SHA-256 "
            f"{str(trained.get('sha256'))[:12]}…) than {given.name} ({about['sha256'][:12]}…)"
        )
    if maker.get_vocab_size(with_added_tokens=True) != config.vocabulary:
        raise InputError(f"{path}: its vocabulary of {config.vocabulary} is not that of {given.name}")


def _check_size(config: LanguageModelConfig, tensors: dict[str, Tensor]) -> None:
    """Before anything is built: a file cannot ask for a model larger than what it holds."""
    c = config.attention
    dim, columns = c.sizes(config.width)
    per_layer = config.width * (config.hidden_size + c.heads * (dim + columns))
    per_layer += dim * int(c.map_options.get("num_features", 0))
    least = config.width * (config.vocabulary + config.learned_positions) + config.layers * per_layer
    held = sum(math.prod(t.shape) for t in tensors.values())
    if least > held:
        raise ValueError(f"{least:,} numbers described, {held:,} in the file")
