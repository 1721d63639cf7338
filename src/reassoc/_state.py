"""The state: everything that later queries need of the keys and values seen so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from ._affine import advance
from ._checks import check_map_heads
from ._files import atomic_write
from ._prepare import settings
from ._summary import Origin, Summary, Tail, act, require_same_shape
from .feature_maps import FeatureMap
from .rules import Rule


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

    __slots__ = ("_again", "_length", "_lost", "_memory", "_origin", "_owned", "_scale", "_tail")

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
        self._lost: Tensor | None = None  # rounding lost by steps, below the last digit of memory
        self._again: Any = None  # how the next step can be taken quickly (see _decode.py)
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
        """int64 ``(B,)``: a copy, which later steps do not touch."""
        return self._length.clone()

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
        """Bytes held: does not grow with the number of tokens seen.

        Steps keep what rounding took from each number of the state, once more its size.
        """
        tail = [] if self._tail is None else [t for t in vars(self._tail).values() if t is not None]
        kept = [self._memory, self._length, *tail]
        kept += [part for part in (self._scale, self._lost) if part is not None]
        return sum(part.numel() * part.element_size() for part in kept)

    def __repr__(self) -> str:
        return (
            f"AttentionState(S={tuple(self.S.shape)}, z={None if self.z is None else tuple(self.z.shape)}, "
            f"dtype={self._memory.dtype}, length={self._length.tolist()}, origin={self._origin})"
        )

    @classmethod
    def zeros(
        cls,
        feature_map: FeatureMap,
        batch: int,
        key_heads: int,
        value_dim: int,
        *,
        rule: Rule | None = None,
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
        if not isinstance(feature_map, FeatureMap):
            raise TypeError(
                "AttentionState.zeros needs a FeatureMap object; make one with reassoc.feature_maps.make"
            )
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"a state is float32 or float64, got {dtype}")
        for name, number in (("batch", batch), ("key_heads", key_heads), ("value_dim", value_dim)):
            least = 1 if name == "key_heads" else 0
            if not isinstance(number, int) or number < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, got {number!r}")
        check_map_heads(key_heads, feature_map)
        s = settings(feature_map, feature_map.dim, rule=rule, normalize=normalize, window=window)
        example = torch.zeros(1, key_heads, 1, feature_map.dim, dtype=dtype, device=device)
        with torch.no_grad():
            gates = None if rule is None else rule.log_decay
            per_feature = gates is not None and gates.ndim == 4
            width = feature_map.feature_dim if per_feature else 1
            gate = None if gates is None else example.new_zeros(1, key_heads, 1, width)
            features = feature_map.key_features(example)
        memory = example.new_zeros(batch, key_heads, feature_map.feature_dim, value_dim + s.has_z)
        scale = None
        if features.log is not None and s.rule.family == "additive":
            scale = example.new_full((batch, key_heads, feature_map.feature_dim), -torch.inf)
        length = torch.zeros(batch, dtype=torch.int64, device=device)
        tail = None
        if window is not None:
            one = example.new_zeros(1, key_heads, 1, memory.shape[-1])
            mask = torch.ones(1, 1, dtype=torch.bool, device=device)
            tail = empty_tail(Tail(*features, one, gate, mask), batch, window - 1)
        return AttentionState(memory, scale, length, s.origin, tail)

    def _map(self, function: Callable[[Tensor], Tensor]) -> AttentionState:
        scale = None if self._scale is None else function(self._scale)
        tail = None if self._tail is None else self._tail.map(function)
        other = AttentionState(function(self._memory), scale, function(self._length), self._origin, tail)
        other._lost = None if self._lost is None else function(self._lost)
        return other

    def clone(self) -> AttentionState:
        """A copy that later steps on either do not touch."""
        return self._map(torch.clone)

    __copy__ = clone

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
        """Pick sequences, ``index`` int32 or int64 ``(B',)``: beam search, or dropping finished sequences."""
        check_order(index)
        return self._map(lambda t: t.index_select(0, index.to(t.device)))

    def apply(self, summary: Summary) -> AttentionState:
        """The state after the run that ``summary`` describes: ``M S + B``.

        Raises:
            ValueError: different origin, or a state with a window (its tail needs the keys themselves).
        """
        if not isinstance(summary, Summary):
            raise TypeError(f"apply takes a Summary, got {type(summary).__name__}; make one with summarize")
        self._origin.require(summary.origin, "apply")
        require_same_shape("apply", self._memory, summary.memory)
        memory, scale = act(summary, self._memory, self._scale)
        return AttentionState(memory, scale, self._length + summary.length, self._origin)

    def merge(self, other: AttentionState) -> AttentionState:
        """The state of two runs read in parallel; for the rule Sum, where order does not matter.

        Raises:
            ValueError: another rule, a window, or different origins.
        """
        if not isinstance(other, AttentionState):
            raise TypeError(f"merge takes an AttentionState, got {type(other).__name__}")
        self._origin.require(other._origin, "merge")
        if self._origin.rule != "sum" or self._origin.window is not None:
            raise ValueError(
                f"merge needs the rule Sum and no window, the state has {self._origin}; order matters "
                "here: use apply(summarize(...)) in order"
            )
        require_same_shape("merge", self._memory, other._memory)
        memory, scale = advance(self._memory, self._scale, None, other._memory, other._scale)
        return AttentionState(memory, scale, self._length + other._length, self._origin)

    def save(self, path: str | PathLike[str]) -> None:
        """Write to a safetensors file: all of it, or none.

        Raises:
            OSError: the folder is missing, read-only or full; an earlier file then stays.
        """
        from safetensors.torch import save_file

        tensors, origin = self._pack()
        about = {"format": "reassoc-state-1", "origin": origin}
        with atomic_write(path) as temporary:
            save_file({name: t.contiguous() for name, t in tensors.items()}, temporary, about)

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
            return cls._unpack(tensors, about["origin"])
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a state written by AttentionState.save: {error}") from error

    def _pack(self) -> tuple[dict[str, Tensor], str]:
        """All numbers by name, and the origin as JSON; what rounding took from steps is left out."""
        parts = {"memory": self._memory, "log_scale": self._scale, "length": self._length}
        parts |= {} if self._tail is None else {f"tail.{k}": v for k, v in vars(self._tail).items()}
        tensors = {k: v.detach() for k, v in parts.items() if v is not None}
        return tensors, json.dumps(vars(self._origin))

    @classmethod
    def _unpack(cls, tensors: Mapping[str, Tensor], origin: str) -> AttentionState:
        """What :meth:`_pack` gave; ``KeyError``, ``TypeError`` or ``ValueError`` if it is not that."""
        tail_names = ("mantissa", "log", "value", "log_decay", "mask")
        tail = {name: tensors.get(f"tail.{name}") for name in tail_names}
        kept = Tail(**tail) if tail["value"] is not None else None  # type: ignore[arg-type]
        source = Origin(**json.loads(origin))
        state = cls(tensors["memory"], tensors.get("log_scale"), tensors["length"], source, kept)
        state._require_whole()
        return state

    def _require_whole(self) -> None:
        """``ValueError`` unless the parts fit each other: kernels take addresses and trust the sizes."""
        memory, tail, window = self._memory, self._tail, self._origin.window
        if memory.ndim != 4 or memory.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"memory is {memory.dtype} {tuple(memory.shape)}, not a float32 or float64 state"
            )
        batch, groups, features, columns = memory.shape
        kept = memory.dtype
        parts: dict[str, tuple[Tensor | None, torch.dtype, list[tuple[int, ...]]]] = {
            "log_scale": (self._scale, kept, [(batch, groups, features)]),
            "length": (self._length, torch.int64, [(batch,)]),
        }
        if (tail is None) != (window is None):
            there = "there" if window is None else "missing"
            raise ValueError(f"window={window}, and the positions that it needs are {there}")
        if tail is not None and window is not None:
            past = (batch, groups, window - 1)
            wide: list[tuple[int, ...]] = [(*past, features), (*past, 1)]
            parts |= {
                "mantissa": (tail.mantissa, kept, wide), "log": (tail.log, kept, wide),
                "value": (tail.value, kept, [(*past, columns)]), "log_decay": (tail.log_decay, kept, wide),
                "mask": (tail.mask, torch.bool, [(batch, window - 1)]),
            }  # fmt: skip
            if tail.mask is None or (tail.mantissa is None and tail.log is None):
                raise ValueError("the positions of the window have no features or no mask")
        for name, (part, dtype, shapes) in parts.items():
            if part is not None and (tuple(part.shape) not in shapes or part.dtype != dtype):
                raise ValueError(f"{name} is {part.dtype} {tuple(part.shape)}, expected {dtype} {shapes[0]}")

    def _parts(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Memory ``(B, G, r, c)`` and its scale, for a kernel."""
        return self._memory.to(dtype), None if self._scale is None else self._scale.to(dtype)

    def _replace(
        self,
        memory: Tensor,
        scale: Tensor | None,
        length: Tensor,
        tail: Tail | None,
        lost: Tensor | None,
        owned: bool,
    ) -> None:
        """Advance in place: only :func:`reassoc.step` calls this."""
        self._memory, self._scale, self._length, self._tail = memory, scale, length, tail
        self._lost, self._owned = lost, owned


def check_order(index: Tensor) -> None:
    """What ``reorder`` takes."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64) or index.ndim != 1:
        raise TypeError("reorder takes a one-dimensional int32 or int64 tensor of sequence numbers")


def check_state(
    state: AttentionState,
    origin: Origin,
    shape: tuple[int, int, int, int],  # sequences, key heads, features, value columns
    device: torch.device,
) -> None:
    """The state belongs to this call."""
    if not isinstance(state, AttentionState):
        raise TypeError(
            f"state must be an AttentionState, got {type(state).__name__}; a bare tensor would lose z, "
            "the scale and the origin. Start with AttentionState.zeros or return_state=True"
        )
    state.origin.require(origin, "state")
    got = tuple(state._memory.shape)
    if got != shape:
        raise ValueError(
            f"state was made for (batch, key heads, features, value columns) = {got}, this call has {shape}"
            " (value columns count z; with cu_seqlens the batch is the number of sequences)"
        )
    if state._memory.device != device:
        raise TypeError(f"state must be on {device}, got {state._memory.device}; use state.to(...)")


def require_scale(exponential: bool, scale: Tensor | None) -> None:
    """A state of exponential features has a scale, and no other has: a kernel would read where nothing is."""
    if exponential != (scale is not None):
        there = "without" if exponential else "with"
        raise ValueError(f"state came {there} log_scale, which does not fit its feature map: it is damaged")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a state is kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_tail(like: Tail, batch: int, length: int) -> Tail:
    """Positions before any sequence: hidden."""

    def blank(t: Tensor | None, fill: float = 0.0) -> Tensor | None:
        return None if t is None else t.new_full((batch, t.shape[1], length, t.shape[3]), fill)

    value = blank(like.value)
    assert value is not None
    mask = like.mask.new_zeros(batch, length)
    return Tail(blank(like.mantissa), blank(like.log, -torch.inf), value, blank(like.log_decay), mask)
