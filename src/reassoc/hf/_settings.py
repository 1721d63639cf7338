"""What a conversion is: chosen by the caller, found in the model, and kept in its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .._errors import InputError

FORMAT = 1
RULES = ("sum", "decay", "delta", "gated-delta")


@dataclass(frozen=True)
class Site:
    """One attention layer as the model calls it.

    Attributes:
        heads, key_heads: H and G. dim, value_dim: sizes of keys and of values.
        scale: of the scores. causal: whether a query sees earlier keys only.
        span: number of positions that the model's own sliding window shows; ``None``: all.
    """

    heads: int
    key_heads: int
    dim: int
    value_dim: int
    scale: float
    causal: bool
    span: int | None = None


@dataclass(frozen=True)
class Conversion:
    """What :func:`reassoc.hf.convert` was asked for, and the layers it found.

    Attributes:
        feature_map: a name of :func:`reassoc.feature_maps.names`, or ``None``: window and sinks alone.
        map_options: for :func:`reassoc.feature_maps.make`.
        window, sinks: positions and first keys that stay exact; ``None``: no exact part.
        rule: ``"sum"``, ``"decay"``, ``"delta"`` or ``"gated-delta"``.
        sites: by module name, below the base model.
    """

    feature_map: str | None
    map_options: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    sinks: int = 0
    rule: str = "sum"
    sites: Mapping[str, Site] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `InputError` for what cannot be."""
        for name, value, least in (("window", self.window, 1), ("sinks", self.sinks, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InputError(f"{name} is {value!r}; expected a whole number, at least {least}")
        if self.window is None and (self.sinks or self.feature_map is None):
            raise InputError(
                f"sinks={self.sinks} and feature_map={self.feature_map!r} need a window: they say what "
                "is seen beside it"
            )
        try:
            kept = json.loads(json.dumps(dict(self.map_options))) == dict(self.map_options)
        except (TypeError, ValueError):
            kept = False
        if not kept:
            raise InputError(
                f"map_options are {sorted(self.map_options)}; expected numbers, names and lists only, which "
                "config.json can keep"
            )
        if self.rule not in RULES:
            raise InputError(f"rule is {self.rule!r}; expected one of {', '.join(RULES)}")
        if self.window is not None and "delta" in self.rule:
            raise InputError(
                f"rule={self.rule!r} cannot stand beside an exact window: what a delta rule reads are no "
                "weights that could share a denominator; use rule='sum' or 'decay', or window=None"
            )

    def to_dict(self) -> dict[str, Any]:
        """For ``config.json``."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Conversion:
        """What :meth:`to_dict` gave; `InputError` if it is not that."""
        try:
            if kept["format"] != FORMAT:
                raise ValueError(f"format {kept['format']!r}")
            rest = {k: v for k, v in kept.items() if k not in ("format", "sites")}
            sites = {name: Site(**site) for name, site in kept["sites"].items()}
            for name, site in sites.items():
                sizes = (site.heads, site.key_heads, site.dim, site.value_dim)
                if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes[0] % sizes[1]:
                    raise ValueError(f"{name} has heads and sizes {sizes}")
            found = cls(**rest, sites=sites)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"config.json: 'reassoc' is not what this version of reassoc writes ({error}); convert the "
                "original model again"
            ) from error
        found.check()
        return found
