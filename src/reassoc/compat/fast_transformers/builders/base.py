"""Builders from keywords, dictionaries and command lines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, TypeVar

B = TypeVar("B", bound="BaseBuilder")


class BaseBuilder:
    """A builder whose parameters are its attributes."""

    @classmethod
    def from_kwargs(cls: type[B], **kwargs: Any) -> B:
        """As :meth:`from_dictionary`; ``strict`` is one of the keywords, True by default."""
        strict = kwargs.pop("strict", True)
        return cls.from_dictionary(kwargs, strict=strict)

    @classmethod
    def from_namespace(cls: type[B], args: Namespace, strict: bool = False) -> B:
        """As :meth:`from_dictionary`, of what argparse gave."""
        return cls.from_dictionary(vars(args), strict=strict)

    @classmethod
    def from_dictionary(cls: type[B], dictionary: Mapping[str, Any], strict: bool = True) -> B:
        """A builder with these parameters.

        Args:
            dictionary: parameters by name.
            strict: refuse names that are no parameters; otherwise they are left out.

        Raises:
            ValueError: an unknown name, or a value that its parameter does not take.
        """
        builder = cls()
        for name, value in dictionary.items():
            try:
                setattr(builder, name, value)
            except AttributeError as error:
                if strict:
                    raise ValueError(
                        f"{cls.__name__} has no parameter {name!r}; leave it out, or pass strict=False"
                    ) from error
        return builder
