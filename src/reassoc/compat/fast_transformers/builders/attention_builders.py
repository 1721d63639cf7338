"""Attention from a name and parameters."""

from __future__ import annotations

from typing import Any

from ..attention._elsewhere import NAMES, PARAMETERS, refuse
from ..attention_registry import (
    AttentionRegistry,
    RecurrentAttentionRegistry,
    RecurrentCrossAttentionRegistry,
    Registry,
)
from .base import BaseBuilder


class BaseAttentionBuilder(BaseBuilder):
    """Attention of one registry; its parameters are the attributes of the builder."""

    def __init__(self, registry: Registry) -> None:
        self._registry: Registry = registry
        self._parameters: dict[str, Any] = {}

    @property
    def available_attentions(self) -> list[str]:
        """Names that :meth:`get` takes."""
        return self._registry.keys

    def validate_attention_type(self, attention_type: str) -> bool:
        """Whether :meth:`get` knows every name in it."""
        return all(name in self._registry for names in _levels(attention_type) for name in names)

    def __setattr__(self, key: str, value: Any) -> None:
        if key in ("_registry", "_parameters"):
            object.__setattr__(self, key, value)
            return
        if key in PARAMETERS and self._registry is AttentionRegistry:  # kept, and used by nothing here
            self._parameters[key] = value
            return
        if not self._registry.contains_parameter(key):
            raise AttributeError(f"no attention known to {type(self).__name__} has a parameter {key!r}")
        self._parameters[key] = self._registry.validate_parameter(key, value)

    def __getattr__(self, key: str) -> Any:
        parameters: dict[str, Any] = self.__dict__.get("_parameters", {})
        if key not in parameters:
            raise AttributeError(f"parameter {key!r} of {type(self).__name__} was not set")
        return parameters[key]

    def __repr__(self) -> str:
        lines = "".join(f"\n    {name}={value!r}," for name, value in self._parameters.items())
        return f"{type(self).__name__}.from_kwargs({lines.removesuffix(',')}\n)"

    def get(self, attention_type: str) -> Any:
        """The attention of that name; in ``"outer:inner"`` and ``"outer:a,b"`` outer gets the others.

        Raises:
            ValueError: an unknown name, several attentions left, or a parameter that is missing.
        """
        made: list[Any] = []
        for names in reversed(_levels(attention_type)):
            made = [self._construct_attention(name, made) for name in names]
        if len(made) != 1:
            raise ValueError(
                f"attention_type must leave one attention outermost, got {attention_type!r} with {len(made)}"
            )
        return made[0]

    def _construct_attention(self, attention_type: str, decorated: list[Any]) -> Any:
        if attention_type not in self._registry:
            raise ValueError(unknown(attention_type, self))
        attention, parameters = self._registry[attention_type]
        values = {p: self._registry.validate_parameter(p, self._parameters.get(p)) for p in parameters}
        return attention(*decorated, **values)


class AttentionBuilder(BaseAttentionBuilder):
    """Attention to whole sequences."""

    def __init__(self) -> None:
        super().__init__(AttentionRegistry)


class RecurrentAttentionBuilder(BaseAttentionBuilder):
    """Attention one token at a time."""

    def __init__(self) -> None:
        super().__init__(RecurrentAttentionRegistry)


class RecurrentCrossAttentionBuilder(BaseAttentionBuilder):
    """Attention of one token to a memory."""

    def __init__(self) -> None:
        super().__init__(RecurrentCrossAttentionRegistry)


def unknown(attention_type: str, builder: BaseAttentionBuilder, what: str = "attention_type") -> str:
    """What to say of a name that ``builder`` does not know."""
    elsewhere = [name for names in _levels(attention_type) for name in names if name in NAMES]
    if elsewhere:
        return f"{what}={attention_type!r}: {refuse(elsewhere[0])}"
    return f"{what} must be made of {builder.available_attentions}, got {attention_type!r}"


def _levels(attention_type: str) -> list[list[str]]:
    return [names.split(",") for names in attention_type.split(":")]
