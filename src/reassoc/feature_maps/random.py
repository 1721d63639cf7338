"""What all random maps share: projections, draws, scale, and calibration in front of them."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from .base import FeatureMap
from .calibration import Calibration, Calibrator, identity_calibration
from .projections import NORMS, draw


class RandomFeatures(FeatureMap):
    """Base of random maps: ``m`` projections ``w`` of a scaled, perhaps calibrated input.

    Args:
        dim: d.
        num_features: number m of projections; default ``ceil(d ln d)``.
        per_projection: features per projection.
        orthogonal: rows orthogonal in blocks of d (lower variance, same expectation).
        norms: ``"chi"`` (unbiased) or ``"sqrt_dim"`` (the regularised kernel SMREG instead).
        scale: of the dot product in the kernel; each side gets its square root. Default
            ``dim ** -0.5``, softmax attention's.
        seed: with the draw count, all that the projections depend on.
        projections: ``(m, d)`` or ``(heads, m, d)`` instead of a draw.
        heads: separate projections and calibration for each of G key heads.

    Raises:
        ValueError: sizes, scale or shapes that cannot be.
    """

    def __init__(
        self,
        dim: int,
        num_features: int | None,
        *,
        per_projection: int,
        orthogonal: bool,
        norms: str,
        scale: float | None,
        seed: int,
        projections: Tensor | None,
        heads: int | None,
    ) -> None:
        lead = () if heads is None else (heads,)
        if projections is not None:
            count = projections.shape[-2] if projections.ndim >= 2 else 0
            if (
                tuple(projections.shape) != (*lead, count, dim)
                or num_features not in (None, count)
                or not count
            ):
                expected = "(num_features, dim)" if heads is None else "(heads, num_features, dim)"
                raise ValueError(
                    f"projections must have shape {expected} = {(*lead, num_features or 'm', dim)}, "
                    f"got {tuple(projections.shape)}"
                )
            num_features = count
        elif num_features is None:
            num_features = default_projections(dim)
        if not isinstance(num_features, int) or num_features < 1:
            raise ValueError(f"num_features must be a positive integer, got {num_features!r}")
        super().__init__(dim, per_projection * num_features, heads)
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
            raise ValueError(f"seed must be an integer of 64 bits, got {seed!r}")
        if norms not in NORMS:
            raise ValueError(f"norms must be one of {NORMS}, got {norms!r}")
        self.num_features, self.orthogonal, self.norms = num_features, orthogonal, norms
        self.scale = dim**-0.5 if scale is None else float(scale)
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale must be positive and finite, got {scale!r}")
        given = projections is not None
        if projections is None:
            projections = draw((*lead, num_features, dim), orthogonal, norms, seed, 0)
        self.register_buffer("projections", projections.detach().clone())
        # Seed, number of redraws, whether calibrated, whether projections were given: as a tensor, so
        # that a checkpoint of tensors alone brings back the same map.
        state = [seed, 0, False, given]
        self.register_buffer("draw", torch.tensor(state, dtype=torch.int64, device="cpu"))
        for name, start in identity_calibration(dim, heads)._asdict().items():
            self.register_buffer(name, start)
        self.register_load_state_dict_post_hook(_remember)  # type: ignore[no-untyped-call]
        self._remember()

    projections: Tensor
    draw: Tensor
    query_center: Tensor
    key_center: Tensor
    query_map: Tensor
    key_map: Tensor
    mean_square: Tensor

    @property
    def seed(self) -> int:
        """The seed that projections are drawn from."""
        return self._current()._seed

    @property
    def draws(self) -> int:
        """How often :meth:`redraw_` was called."""
        return self._current()._draws

    @property
    def calibrated(self) -> bool:
        """Whether :meth:`calibrate_` has set the identities of calibration.py."""
        return self._current()._calibrated

    @property
    def symmetric(self) -> bool:
        """Until calibrated."""
        return not self.calibrated

    @property
    def fingerprint(self) -> str:
        """Seed, draw and calibration included: another draw is another kernel."""
        return self._current()._fingerprint

    def _options(self) -> str:
        """What distinguishes maps of one class beside their numbers."""
        return ""

    def _current(self) -> RandomFeatures:
        # Some loaders put other tensors in the place of buffers, past load_state_dict and its hooks.
        if self._source is not self.draw:
            self._remember()
        return self

    def _remember(self) -> None:
        # Read back once, when something changes: tracing and fast calls never wait for a device.
        self._source = self.draw
        self._seed, self._draws, calibrated, given = (int(n) for n in self.draw.tolist())
        self._calibrated, self._given = bool(calibrated), bool(given)
        source = f"seed={self._seed}, draw={self._draws}"
        if self._given:
            source = f"projections={digest(self.projections)}"
        learned = ""
        if self._calibrated:
            learned = f", calibration={digest(*(getattr(self, n) for n in Calibration._fields))}"
        self._fingerprint = (
            f"{self.name}(dim={self.dim}, num_features={self.num_features}, heads={self.heads}, "
            f"scale={self.scale:.17g}, orthogonal={self.orthogonal}, norms={self.norms}{self._options()}, "
            f"{source}{learned})"
        )

    def redraw_(self) -> RandomFeatures:
        """Move to the next draw of (seed, draw count), in place; calibration is kept.

        Raises:
            ValueError: the projections were given, so there is nothing to draw from.
        """
        if self._current()._given:
            raise ValueError("redraw_: the projections were given by the caller; make a new map instead")
        shape = tuple(self.projections.shape)
        fresh = draw(shape, self.orthogonal, self.norms, self._seed, self._draws + 1)
        with torch.no_grad():
            self.projections.copy_(fresh)
            self.draw[1] += 1
        self._remember()
        return self

    def calibrator(self) -> Calibrator:
        """A streaming calibrator: ``update(query, key)`` over many batches, then ``finish()``."""
        return Calibrator(self.dim, self.heads, self.scale, self._set_calibration)

    def calibrate_(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> RandomFeatures:
        """Learn exact identities of the kernel from data, in place: lower variance, same expectation.

        Args:
            query: ``(B, H, N, d)``. key: ``(B, G, M, d)``; per key head where the map has ``heads``,
                moments pooled over the query heads that read it, otherwise pooled over all.
            mask: bool ``(B, N)``, True = real; needs N == M.

        Returns:
            The map itself.
        """
        self.calibrator().update(query, key, mask).finish()
        return self

    def _set_calibration(self, calibration: Calibration) -> None:
        with torch.no_grad():
            for name, number in calibration._asdict().items():
                getattr(self, name).copy_(number)
            self.draw[2] = 1
        self._remember()

    def log_query_factor(self, x: Tensor) -> Tensor | None:
        """``q . k0``: what centring the keys at k0 leaves behind, ``(...,)``; ``None`` uncalibrated."""
        if not self.calibrated:
            return None
        return (x * math.sqrt(self.scale) * self.key_center.to(x.dtype)).sum(-1)

    def _queries(self, x: Tensor) -> Tensor:
        """Scaled and calibrated queries, ``(..., d)``."""
        x = x * math.sqrt(self.scale)
        if not self.calibrated:
            return x
        return (x - self.query_center.to(x.dtype)) @ self.query_map.mT.to(x.dtype)

    def _keys(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scaled and calibrated keys ``(..., d)``, and the logarithm ``(..., 1)`` of a weight each."""
        x = x * math.sqrt(self.scale)
        if not self.calibrated:
            return x, None
        x = x - self.key_center.to(x.dtype)
        weight = (x * self.query_center.to(x.dtype)).sum(-1, keepdim=True)
        return x @ self.key_map.mT.to(x.dtype), weight

    def _project(self, x: Tensor) -> Tensor:
        """``(..., d) -> (..., m)``."""
        return x @ self.projections.mT.to(x.dtype)


def _remember(module: RandomFeatures, _: object) -> None:
    module._remember()


def default_projections(dim: int) -> int:
    """``ceil(d ln d)``, what uniform convergence asks for (Choromanski et al. 2021, theorem 4)."""
    return max(1, math.ceil(dim * math.log(dim)))


def digest(*tensors: Tensor) -> str:
    """A short name for numbers, the same on every machine that holds the same ones."""
    digest = hashlib.sha256()
    for tensor in tensors:
        numbers = tensor.detach().cpu().to(torch.float64).flatten().tolist()
        digest.update(",".join(f"{number:.9g}" for number in numbers).encode())
    return digest.hexdigest()[:16]
