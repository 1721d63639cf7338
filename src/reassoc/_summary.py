"""The summary of a run of tokens, its composition, and the state.

A run of tokens acts on the state as an affine map ``S -> M S + B``. For the additive rules ``M`` is
a diagonal, kept as a logarithm per feature, and ``B`` is what the run itself wrote. Chunking,
streaming, windows, packing and machines in a row are this one composition used five ways.

Exponential features keep ``S = exp(log_scale) * scaled`` with one ``log_scale`` per feature, the
running maximum of the logarithms written, so that no input norm overflows or drowns the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor


def advance(
    S: Tensor,  # (..., r, c) what was written before, scaled by exp(-scale)
    scale: Tensor | None,  # (..., r) or None
    log_decay: Tensor | None,  # (..., r) or (..., 1): M of the run that follows, as a logarithm
    written: Tensor,  # (..., r, c) what that run writes, scaled by exp(-written_scale)
    written_scale: Tensor | None,  # (..., r) or None
) -> tuple[Tensor, Tensor | None]:
    """``M S + B``, the one place where two runs meet. Scales carry no gradient: the product does."""
    if scale is None or written_scale is None:
        if log_decay is not None:
            S = S * log_decay.exp()[..., None]
        return S + written, None
    kept = scale if log_decay is None else scale + log_decay
    new_scale = torch.maximum(kept.detach(), written_scale)
    origin = torch.where(new_scale == -torch.inf, 0.0, new_scale)
    S = S * (kept - origin).exp()[..., None] + written * (written_scale - origin).exp()[..., None]
    return S, new_scale


def add_decays(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Logarithm of the product of two diagonals, ``None`` meaning one."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


@dataclass(frozen=True)
class Origin:
    """What made a state: mixing states of different origin is an error, never a number."""

    feature_map: str
    rule: str
    normalize: str
    window: int | None = None

    def require(self, other: Origin, what: str) -> None:
        """Raise ``ValueError`` naming the first difference."""
        for name in ("feature_map", "rule", "normalize", "window"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(
                    f"{what}: the state was made with {name}={mine!r}, this call has {theirs!r}; "
                    "use the same settings throughout, or start from a new state"
                )


@dataclass(frozen=True)
class Tail:
    """The last ``window - 1`` positions of every sequence, which a window still needs.

    Attributes:
        mantissa, log: key features as in :class:`reassoc._features.Features`, ``(B, G, T, r)``
            (``log`` may be ``(B, G, T, 1)``).
        value: ``(B, G, T, c)``, the constant column of the normalizer included.
        log_decay: ``(B, G, T, 1 or r)`` or ``None``.
        mask: bool ``(B, T)``; positions before the start of the sequence are False.
    """

    mantissa: Tensor | None
    log: Tensor | None
    value: Tensor
    log_decay: Tensor | None
    mask: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Tail:
        """Apply a function of one tensor to every part."""
        parts = {name: None if part is None else function(part) for name, part in vars(self).items()}
        return Tail(**parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Summary:
    """The affine map of a run of tokens, as :func:`reassoc.summarize` makes it.

    Attributes:
        memory: ``(B, G, r, c)``: S, and z as a last column where the normalization keeps one.
        log_scale: ``(B, G, r)``, or ``None`` where features are not exponential.
        log_decay: ``(B, G, r or 1)``: the diagonal M as a logarithm, ``None`` for the identity.
        length: int64 ``(B,)``: how many real keys the run holds.
        origin: which map, rule and normalization made it.
    """

    memory: Tensor
    log_scale: Tensor | None
    log_decay: Tensor | None
    length: Tensor
    origin: Origin


def compose(first: Summary, second: Summary) -> Summary:
    """The summary of ``first`` followed by ``second``. Associative; not commutative under a decay.

    Raises:
        ValueError: the two were made by different maps, rules or normalizations.
    """
    first.origin.require(second.origin, "compose")
    memory, log_scale = advance(
        first.memory, first.log_scale, second.log_decay, second.memory, second.log_scale
    )
    log_decay = add_decays(first.log_decay, second.log_decay)
    return Summary(memory, log_scale, log_decay, first.length + second.length, first.origin)


class AttentionState:
    """Everything that later queries need of the keys and values seen so far: constant size.

    Made by a call with ``return_state=True`` or by :meth:`zeros`. Only :func:`reassoc.step` ever
    changes one; everything else returns a new state, so a kept state is a snapshot, and
    :meth:`clone` keeps one across steps.

    Attributes:
        S: ``(B, G, r, e)``; float32, or float64 for float64 inputs. The true sum is
            ``exp(log_scale) * S`` where ``log_scale`` is not ``None``.
        z: ``(B, G, r)`` in the same scale, or ``None`` where the normalization needs none.
        log_scale: ``(B, G, r)`` or ``None``: per-feature running maximum of the logarithms written.
        length: int64 ``(B,)``: real keys seen.
        tail: with a window, the last ``window - 1`` positions; S and z then sum over nothing.
    """

    __slots__ = ("_length", "_memory", "_origin", "_owned", "_scale", "_tail")

    def __init__(
        self,
        memory: Tensor,
        log_scale: Tensor | None,
        length: Tensor,
        origin: Origin,
        tail: Tail | None = None,
    ) -> None:
        self._memory, self._scale, self._length = memory, log_scale, length
        self._origin, self._tail = origin, tail
        self._owned = False  # whether `step` may write into the tensors: nobody else holds them

    @property
    def has_z(self) -> bool:
        """Whether a normalizer is kept."""
        return "attention" in self._origin.normalize

    @property
    def S(self) -> Tensor:
        """``(B, G, r, e)``."""
        return self._memory[..., :-1] if self.has_z else self._memory

    @property
    def z(self) -> Tensor | None:
        """``(B, G, r)`` or ``None``."""
        return self._memory[..., -1] if self.has_z else None

    @property
    def log_scale(self) -> Tensor | None:
        """``(B, G, r)`` or ``None``."""
        return self._scale

    @property
    def length(self) -> Tensor:
        """int64 ``(B,)``."""
        return self._length

    @property
    def tail(self) -> Tail | None:
        """The positions a window still needs, or ``None``."""
        return self._tail

    @property
    def origin(self) -> Origin:
        """Which map, rule, normalization and window made it."""
        return self._origin

    @property
    def nbytes(self) -> int:
        """Bytes held: does not grow with the number of tokens seen."""
        tail = [] if self._tail is None else [t for t in vars(self._tail).values() if t is not None]
        kept = [self._memory, self._length, *tail]
        return sum(
            t.numel() * t.element_size() for t in kept + ([] if self._scale is None else [self._scale])
        )

    def __repr__(self) -> str:
        return (
            f"AttentionState(S={tuple(self.S.shape)}, z={None if self.z is None else tuple(self.z.shape)}, "
            f"dtype={self._memory.dtype}, length={self._length.tolist()}, origin={self._origin})"
        )

    @classmethod
    def zeros(
        cls,
        feature_map: Any,
        batch: int,
        key_heads: int,
        value_dim: int,
        *,
        rule: Any = None,
        normalize: str | None = None,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> AttentionState:
        """The state before any token.

        Args:
            feature_map: a :class:`reassoc.feature_maps.FeatureMap` (a name does not know its size).
            batch: number of sequences B. key_heads: G. value_dim: e.
            rule, normalize, window: as in the calls that will use it.
            dtype: float32 (also for half-precision inputs) or float64.
            device: where to put it.
        """
        from ._prepare import empty_state

        return empty_state(feature_map, batch, key_heads, value_dim, rule, normalize, window, dtype, device)

    def _map(self, function: Callable[[Tensor], Tensor]) -> AttentionState:
        scale = None if self._scale is None else function(self._scale)
        tail = None if self._tail is None else self._tail.map(function)
        return AttentionState(function(self._memory), scale, function(self._length), self._origin, tail)

    def clone(self) -> AttentionState:
        """A copy that later steps on either do not touch."""
        return self._map(torch.clone)

    def detach(self) -> AttentionState:
        """The same numbers, cut off from the gradient: carries context between training segments."""
        self._owned = False
        return self._map(torch.Tensor.detach)

    def to(self, *args: Any, **kwargs: Any) -> AttentionState:
        """Move to a device, or to float32/float64; masks and lengths keep their type.

        Raises:
            TypeError: a dtype other than float32 or float64 (a state does not fit half precision).
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype not in (None, torch.float32, torch.float64):
            raise TypeError(f"a state is float32 or float64, got {dtype}; states do not fit half precision")
        self._owned = False
        return self._map(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None))

    def reorder(self, index: Tensor) -> AttentionState:
        """Pick sequences, ``index`` int64 ``(B',)``: beam search, or dropping finished sequences."""
        return self._map(lambda t: t.index_select(0, index.to(t.device)))

    def apply(self, summary: Summary) -> AttentionState:
        """The state after the run that ``summary`` describes.

        Raises:
            ValueError: different origin, or a state with a window (its tail needs the keys themselves).
        """
        self._origin.require(summary.origin, "apply")
        memory, scale = advance(
            self._memory, self._scale, summary.log_decay, summary.memory, summary.log_scale
        )
        return AttentionState(memory, scale, self._length + summary.length, self._origin)

    def merge(self, other: AttentionState) -> AttentionState:
        """The state of two runs read in parallel; for the rule Sum, where order does not matter.

        Raises:
            ValueError: another rule, a window, or different origins.
        """
        self._origin.require(other._origin, "merge")
        if self._origin.rule != "sum" or self._origin.window is not None:
            raise ValueError(
                f"merge needs the rule Sum and no window, the state has {self._origin}; order matters "
                "here: use apply(summarize(...)) in order"
            )
        memory, scale = advance(self._memory, self._scale, None, other._memory, other._scale)
        return AttentionState(memory, scale, self._length + other._length, self._origin)

    def save(self, path: str | PathLike[str]) -> None:
        """Write to a safetensors file: all of it, or none.

        Raises:
            OSError: the folder is missing, read-only or full; an earlier file then stays.
        """
        from safetensors.torch import save_file

        from ._files import atomic_write

        parts = {"memory": self._memory, "log_scale": self._scale, "length": self._length}
        parts |= {} if self._tail is None else {f"tail.{k}": v for k, v in vars(self._tail).items()}
        tensors = {k: v.detach().contiguous() for k, v in parts.items() if v is not None}
        about = {"format": "reassoc-state-1", "origin": json.dumps(vars(self._origin))}
        with atomic_write(path) as temporary:
            save_file(tensors, temporary, about)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> AttentionState:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: the file is no such state.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about.get("format") != "reassoc-state-1":
                raise ValueError(f"format {about.get('format')!r}")
            origin = Origin(**json.loads(about["origin"]))
            tail_names = ("mantissa", "log", "value", "log_decay", "mask")
            tail = {name: tensors.get(f"tail.{name}") for name in tail_names}
            kept = Tail(**tail) if tail["value"] is not None else None  # type: ignore[arg-type]
            return cls(tensors["memory"], tensors.get("log_scale"), tensors["length"], origin, kept)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a state written by AttentionState.save: {error}") from error

    def _replace(
        self, memory: Tensor, scale: Tensor | None, length: Tensor, tail: Tail | None, owned: bool
    ) -> None:
        """Advance in place: only :func:`reassoc.step` calls this."""
        self._memory, self._scale, self._length, self._tail = memory, scale, length, tail
        self._owned = owned
