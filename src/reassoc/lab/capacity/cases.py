"""What is compared: a feature map with a rule and a normalization, or softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._errors import InputError
from ...feature_maps import DPFP, FeatureMap, make
from ..recipes import Recipe, recipe

_LEARNED = ("hedgehog", "t2r", "codebook")
_TAKEN = "capacity takes MAP[:RULE][:NORMALIZATION][:features=N][:iid] with rules sum and delta"


@dataclass(frozen=True)
class Case:
    """One attention whose memory is tried.

    Attributes:
        name: canonical text, see :mod:`..recipes`. map: name of the feature map, ``"softmax"`` being softmax
            attention itself. rule: ``"sum"`` or ``"delta"``. normalize: what divides.
        options: of the map.
    """

    name: str
    map: str
    rule: str
    normalize: str
    options: tuple[tuple[str, Any], ...] = ()
    softmax: bool = False
    random: bool = False

    def build(self, dim: int, seed: int) -> FeatureMap:
        """The feature map for keys of size ``dim``.

        FAVOR+ is the one of Schlag et al. 2021: positive features of ``w`` and ``-w``, of the kernel
        ``exp(q . k)`` without a scale.
        """
        options = dict(self.options)
        if self.random:
            options["seed"] = seed
        if self.map == "favor+":
            options |= {"hyperbolic": True, "scale": 1.0}
            if "num_features" in options:
                options["num_features"] //= 2
        return make(self.map, dim, **options)


def case(text: str) -> Case:
    """Read one case.

    Raises:
        InputError: what :func:`..recipes.recipe` refuses; rules with decay, options of training, maps with
            weights of their own.
    """
    found: Recipe = recipe(text)
    attention = found.attention
    foreign = found.carried or found.learned or found.redraw is not None
    if foreign or attention.position != "none" or attention.convolution:
        raise InputError(f"--models: {text!r} has an option that means nothing here; {_TAKEN}")
    if found.softmax:
        return Case("softmax", "softmax", "sum", "attention", softmax=True)
    if attention.rule not in ("sum", "delta"):
        raise InputError(f"--models: {text!r} has a rule that forgets with time; {_TAKEN}")
    if attention.feature_map in _LEARNED:
        raise InputError(f"--models: {attention.feature_map} has weights that must be learned; {_TAKEN}")
    options = tuple(sorted(attention.map_options.items()))
    if attention.feature_map == "favor+" and dict(options).get("num_features", 0) % 2:
        raise InputError(f"--models: {text!r}: FAVOR+ has features in pairs here, exp(w.x) and exp(-w.x)")
    normalize = attention.normalize
    assert normalize is not None  # a recipe always says
    if normalize == "sum+attention":
        raise InputError(f"--models: {text!r}: normalize by attention or by sum; {_TAKEN}")
    return Case(found.name, attention.feature_map, attention.rule, normalize, options, random=found.random)


def capacity(phi: FeatureMap) -> int:
    """How many linearly independent feature vectors there can be: what a state can hold at most.

    The number r of features; for DPFP ``2 d min(nu, d - 1)``, as shift d gives zeros and later ones repeat.
    """
    if isinstance(phi, DPFP):
        return 2 * phi.dim * min(phi.nu, phi.dim - 1)
    return phi.feature_dim
