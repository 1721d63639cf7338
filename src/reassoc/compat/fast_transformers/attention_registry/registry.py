"""Attention classes by name, and the parameters that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .spec import Spec


class Registry:
    """Attention classes by name. A parameter name means the same for all of them."""

    def __init__(self) -> None:
        self._classes: dict[str, Any] = {}
        self._class_params: dict[str, list[str]] = {}
        self._parameters: dict[str, Spec] = {}

    def register(self, key: str, class_object: Any, parameter_tuples: Sequence[tuple[str, Spec]]) -> None:
        """Make a class known to the builders.

        Args:
            key: its name. class_object: called with the parameters as keywords.
            parameter_tuples: names and specs of the parameters; ``("legacy", LEGACY)`` is one.

        Raises:
            ValueError: the name is taken, or a parameter has another spec already.
        """
        if key in self._classes:
            raise ValueError(f"attention {key!r} is already registered; choose another name")
        for parameter, spec in parameter_tuples:
            known = self._parameters.get(parameter, spec)
            if known != spec:
                raise ValueError(
                    f"parameter {parameter!r} of attention {key!r} must have the spec {known!r} that it "
                    f"was registered with, got {spec!r}; use that spec or another name"
                )
        self._classes[key] = class_object
        self._parameters.update(parameter_tuples)
        self._class_params[key] = [parameter for parameter, _ in parameter_tuples]

    def __contains__(self, key: object) -> bool:
        return key in self._classes

    def __getitem__(self, key: str) -> tuple[Any, list[str]]:
        return self._classes[key], self._class_params[key]

    @property
    def keys(self) -> list[str]:
        """All names."""
        return list(self._classes)

    def contains_parameter(self, key: str) -> bool:
        """Whether any class has a parameter of that name."""
        return key in self._parameters

    def validate_parameter(self, key: str, value: Any) -> Any:
        """The value to use.

        Raises:
            ValueError: the spec does not take it.
        """
        spec = self._parameters[key]
        try:
            return spec.get(value)
        except Exception as error:
            raise ValueError(f"parameter {key!r} must be {spec!r}, got {value!r}: {error}") from error


AttentionRegistry = Registry()
RecurrentAttentionRegistry = Registry()
RecurrentCrossAttentionRegistry = Registry()
