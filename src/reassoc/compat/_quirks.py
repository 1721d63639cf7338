"""What a checkpoint's weights may rely on, and what the clean operator does in its place."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._recognize import FAST, PERFORMER, Model


class Quirk(NamedTuple):
    """One row: what it is, what the file and the original say, what the clean operator does."""

    name: str
    original: str
    clean: str


def quirks(model: Model, *, causal: bool, features: str, older: bool = False) -> list[Quirk]:
    """Those of ``model``, in the order of a call: projections, features, masks, denominators, draws, file.

    Args:
        model: of the checkpoint.
        causal, features, older: see :func:`reassoc.compat.check.check`.
    """
    found = []
    if model.matrices and features != "none":
        found += [_norms(model.matrices), _signs(model.matrices)]
    if model.library == PERFORMER:
        return found + _performer(model, causal, features, older)
    return found + (_fast(model, features) if model.library == FAST else _geometric())


def _performer(model: Model, causal: bool, features: str, older: bool) -> list[Quirk]:
    counter = model.weights.get("proj_updater.calls_since_last_redraw")
    calls = "" if counter is None or counter.numel() != 1 else f" ({int(counter)} calls since the last)"
    rows = {
        "favor": Quirk("feature epsilon", "1e-4 in every feature", "none: logarithms"),
        "generalized": Quirk("feature epsilon", "1e-3 in every feature", "none"),
        "none": Quirk("feature epsilon", "none: softmax of queries and keys", "none"),
    }
    found = [rows[features]]
    if features == "favor":
        of = "call, all heads and sequences together (FastAttention.older)" if older else "head's sequence"
        leak = ", so later keys change earlier outputs" if causal else ""
        found.append(
            Quirk("stabilizer of keys", f"largest of a {of}{leak}", "a running maximum, per feature")
        )
    found.append(Quirk("mask", "empties values; masked keys stay in the denominator", "hides keys"))
    found.append(
        Quirk(
            "denominator epsilon", "1e-6, times the sum of the query's features" if causal else "none", "none"
        )
    )
    found.append(Quirk("redraw", f"in training, every 1,000 calls by default{calls}", "the same"))
    return [*found, _duplicates(model)]


def _fast(model: Model, features: str) -> list[Quirk]:
    found = [
        Quirk("mask", "hides keys", "hides keys"),
        Quirk("denominator epsilon", "1e-6", "none"),
    ]
    if features == "elu":
        found.insert(0, Quirk("features", "elu(x) + 1, zero below about -17", "elu + 1 with its tail"))
    else:
        drawn = all(bool(matrix.any()) for matrix in model.matrices.values())
        held = "" if drawn else "; the file holds zeros, it was never drawn"
        found.append(
            Quirk(
                "redraw",
                f"at every call, in evaluation too, unless deterministic_eval{held}",
                "in training only",
            )
        )
    if features == "favor":
        found.insert(
            0, Quirk("stabilizer", "if stabilize: largest norm over axis 1", "a running maximum, per feature")
        )
    return found


def _geometric() -> list[Quirk]:
    return [
        Quirk("feature epsilon", "1e-3 in every feature", "none"),
        Quirk("mask", "empties values; masked nodes stay in the denominator", "hides keys"),
        Quirk("denominator epsilon", "none", "none"),
    ]


def _norms(matrices: dict[str, Tensor]) -> Quirk:
    """Whether rows have the norms of Gaussian vectors, or all the same."""
    rows = torch.cat([matrix.double().norm(dim=1) for matrix in matrices.values()])
    d = next(iter(matrices.values())).shape[1]
    clean = "the file's rows"
    mean, spread = float(rows.mean()), float(rows.std(unbiased=False))
    if not math.isfinite(mean):
        return Quirk("row norms", "not finite", clean)
    if mean == 0:
        return Quirk("row norms", "0: never drawn", clean)
    if spread < 1e-3 * mean:
        known = {1.0: "1: another kernel than softmax's, unless features only scale (ReLU)",
                 math.sqrt(d): "sqrt(d): the kernel SMREG, not softmax"}  # fmt: skip
        for value, words in known.items():
            if abs(mean - value) < 1e-3 * value:
                return Quirk("row norms", f"all {words}", clean)
        return Quirk("row norms", f"all {mean:.3g}: neither 1 nor sqrt(d)", clean)
    # Mean and deviation of the norm of d Gaussian numbers; five standard errors for the rows there are.
    expected = math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
    deviation = math.sqrt(max(d - expected**2, 0.0))
    likely = abs(mean - expected) < 5 * deviation / math.sqrt(len(rows))
    words = (
        "of Gaussian vectors, as softmax needs"
        if likely
        else f"not of Gaussian vectors (these: {expected:.3g})"
    )
    return Quirk("row norms", f"{mean:.3g} on average, {words}", clean)


def _signs(matrices: dict[str, Tensor]) -> Quirk:
    """LAPACK makes the first entry of a QR's first column negative; a uniform direction has no such habit."""
    firsts = [block[0, 0] for matrix in matrices.values() for block in matrix.split(matrix.shape[1])]
    negative = sum(bool(first < 0) for first in firsts)
    count = f"{negative} of {len(firsts)} blocks begin below zero"
    if negative == len(firsts) and len(firsts) > 4:  # fair coins: 1 in 32 or less
        return Quirk("directions", f"{count}: without the sign fix, estimates are biased", "the file's rows")
    return Quirk("directions", count, "the file's rows")


def _duplicates(model: Model) -> Quirk:
    prefix = "proj_updater.instance."
    copies = [name for name in model.weights if name.startswith(prefix)]
    if not copies:
        return Quirk("second copy of layers", "none in this file", "none needed")
    size = sum(model.weights[name].numel() * model.weights[name].element_size() for name in copies)
    differ = [
        name for name in copies
        if (own := model.weights.get(name.replace(prefix, "net.", 1))) is None
        or own.shape != model.weights[name].shape
        or not torch.equal(own, model.weights[name])
    ]  # fmt: skip
    words = f"{len(copies)} tensors, {size / 1e6:.3g} MB"
    if differ:
        words += f"; {len(differ)} differ from the first copy, {differ[0]} for one"
    return Quirk("second copy of layers", words, "kept, so that names agree")
