"""The model of a recall experiment, and the memory it keeps."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..._errors import InputError
from ...feature_maps import FeatureMap
from ...nn import LanguageModel, LanguageModelConfig
from ..recipes import recipe
from .settings import Settings


def build(settings: Settings, text: str, head_dim: int, seed: int) -> tuple[LanguageModel, int]:
    """A fresh model, and how many features a head of it has.

    Args:
        settings: its sizes. text: the recipe. head_dim: size of a head. seed: of weights and random maps.

    Raises:
        InputError: the recipe does not fit the size.
    """
    chosen = recipe(text)
    try:
        attention = replace(
            chosen.sized(heads=settings.heads, seed=seed), head_dim=head_dim, output_norm=settings.output_norm
        )
        config = LanguageModelConfig(
            vocabulary=settings.vocabulary, width=settings.width, layers=settings.layers,
            hidden=settings.width,
            learned_positions=settings.longest if chosen.learned else 0, attention=attention,
        )  # fmt: skip
        torch.manual_seed(seed)
        model = LanguageModel(config)
    except ValueError as error:
        raise InputError(f"recipe {text!r} with heads of size {head_dim}: {error}") from None
    maps = (module for module in model.modules() if isinstance(module, FeatureMap))
    return model, next((found.feature_dim for found in maps), head_dim)


@torch.no_grad()
def state_bytes(model: LanguageModel, tokens: int) -> int:
    """Bytes that the model keeps of one sequence so long in order to go on."""
    _, states = model(torch.zeros(1, tokens, dtype=torch.long), return_states=True)
    return int(states.nbytes)
