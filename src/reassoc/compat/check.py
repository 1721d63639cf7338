"""What an old checkpoint relies on, and whether the clean operator may take the original's place."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._errors import InputError
from ._checkpoint import read_checkpoint
from ._compare import Gap, compare, compare_layers, relative
from ._feed import has_logits, read_batch, runner
from ._options import LOCAL_WINDOW, check_options, choices
from ._quirks import Quirk, quirks
from ._rebuild import rebuild
from ._recognize import FAST, GEOMETRIC, PERFORMER, Model, recognize

__all__ = ["Gap", "Quirk", "Report", "check"]

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Report:
    """What :func:`check` found of one model.

    Attributes:
        library, version, root: which library wrote the weights, and where in the checkpoint they begin.
        sizes: by the library's own names. assumed: what shapes do not tell and was taken so, in words.
        quirks: rows of (name, original, clean). gap: differences on the input, or ``None`` without one.
        safe: whether ``gap.end`` is within the tolerance, or ``None``. reason: why, in a sentence.
    """

    library: str
    version: str
    root: str
    sizes: dict[str, Any]
    assumed: tuple[str, ...]
    quirks: tuple[Quirk, ...]
    gap: Gap | None
    safe: bool | None
    reason: str


def check(
    checkpoint: str | os.PathLike[str],
    input: str | os.PathLike[str] | None = None,
    *,
    causal: bool = False,
    features: str | None = None,
    heads: int | None = None,
    activation: str | None = None,
    stabilize: bool = False,
    softmax_temp: float | None = None,
    cross_attend: bool = False,
    local_heads: int = 0,
    local_window: int = LOCAL_WINDOW,
    older: bool = False,
    root: str | None = None,
    tolerance: float = TOLERANCE,
) -> tuple[Report, ...]:
    """Describe the models of a checkpoint, and with ``input`` run one of them in both modes.

    Args:
        checkpoint: safetensors, or written by ``torch.save`` (loaded with ``weights_only=True``).
        input: safetensors with ``tokens`` integer ``(B, N)`` or ``x`` float ``(B, N, dim)``, what the first
            layer gets; perhaps ``mask`` bool ``(B, N)``, ``context`` float ``(B, M, dim)``, ``context_mask``.
        causal: whether queries see earlier keys only.
        features: performer-pytorch ``"favor"`` (default), ``"generalized"`` (ReLU) or ``"none"`` (no
            projection); fast-transformers ``"favor"`` (default where there is an omega), ``"fourier"``,
            ``"generalized"`` (ReLU; default with rotary layers, MoLFormer's) or ``"elu"`` (default without).
        heads, activation, stabilize, softmax_temp: of fast-transformers' layers. ``activation``: ``"relu"``
            (default) or ``"gelu"`` (default with rotary layers).
        cross_attend, local_heads, local_window: of performer-pytorch's.
        older: whether performer-pytorch's release was before 1.1.1, which stabilized otherwise
            (``FastAttention.older``); a file tells by itself only if it was before 1.0.9.
        root: which model, by what its names begin with, where a checkpoint holds several.
        tolerance: the largest relative difference of the last output that is called safe.

    Returns:
        A report for each model; only the one that was run has a gap.

    Raises:
        InputError: files or options that do not fit, in one line.
    """
    if not tolerance >= 0:
        raise InputError(f"tolerance must be at least 0, got {tolerance}")
    models = recognize(read_checkpoint(checkpoint))
    if root is not None:
        models = [model for model in models if model.root == root]
    if not models or (input is not None and len(models) > 1):
        roots = [model.root for model in models]
        raise InputError(f"name one model of the checkpoint by its root, of {roots}" if roots else
                         f"no model of the checkpoint has the root {root!r}")  # fmt: skip
    options = {
        "causal": causal, "features": features, "heads": heads, "activation": activation,
        "stabilize": stabilize, "softmax_temp": softmax_temp, "cross_attend": cross_attend,
        "local_heads": local_heads, "local_window": local_window, "older": older,
    }  # fmt: skip
    check_options(options, models)
    return tuple(_report(model, choices(model, options), input, tolerance) for model in models)


def _report(
    model: Model, options: dict[str, Any], input: str | os.PathLike[str] | None, tolerance: float
) -> Report:
    causal, features = options["causal"], options["features"]
    assumed = ["causal" if causal else "not causal", f"features: {features}"]
    if model.library == FAST:
        assumed += [f"activation: {options['activation']}"]
    gap, safe, reason = None, None, "no input was given, so nothing was run"
    if input is not None:
        gap = _gap(model, options, input)
        safe = gap.end <= tolerance
        reason = _reason(gap, tolerance, safe)
    if model.library == PERFORMER and not model.before_updater:
        assumed += ["release: before 1.1.1" if options["older"] else "release: 1.1.1 or later"]
    found = tuple(quirks(model, causal=causal, features=features, older=options["older"]))
    return Report(
        model.library, model.version, model.root, model.sizes, tuple(assumed), found, gap, safe, reason
    )


def _gap(model: Model, options: dict[str, Any], input: str | os.PathLike[str]) -> Gap:
    batch = read_batch(input, model)
    if batch.context is not None and not options["cross_attend"]:
        raise InputError("the input has a context, which only a model with cross_attend reads")
    undrawn = [name for name, matrix in model.matrices.items() if not bool(matrix.any())]
    if undrawn and options["features"] != "none":
        raise InputError(
            f"the projections of {undrawn[0]} are zeros: never drawn, so there is nothing to run"
        )
    exact, clean = (rebuild(model, legacy, options) for legacy in ("exact", None))
    if model.library == GEOMETRIC:
        names = [name.removesuffix(".") for name in model.sizes["layers"]]
        return compare_layers(exact, clean, names, batch.x, batch.mask)  # type: ignore[arg-type]
    run = runner(model, batch)
    try:
        gap = compare(exact, clean, run, batch.mask)
    except InputError:
        raise
    except (ValueError, RuntimeError) as error:  # shapes that only the layers know
        if "allocate" in str(error):  # the memory's fault, not the input's
            raise
        raise InputError(f"the model does not take this input: {error}") from error
    if not has_logits(model):
        gap = replace(gap, changed=None)
    if model.library == FAST and model.matrices:
        drawing = rebuild(model, "exact", options, redraw=True)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            gap = replace(gap, redraw=relative(run(drawing), run(drawing), batch.mask))
    return gap


def _reason(gap: Gap, tolerance: float, safe: bool) -> str:
    """Why switching is safe, or what makes it not."""
    words = f"the last output differs by {gap.end:.2g} of its size; the tolerance is {tolerance:g}"
    if gap.changed:
        words += f", and the largest logit is another one at {gap.changed:.1%} of positions"
    if gap.undefined:
        words += f"; {gap.undefined} rows of the original are not finite and were left out"
    if gap.redraw is not None:
        words += f" (two evaluations of the original, which draws each time, differ by {gap.redraw:.2g})"
    if safe:
        return words
    if gap.unmasked is not None and gap.end > 3 * gap.unmasked:
        return (
            f"{words}. Without the mask it would be {gap.unmasked:.2g}: masked keys that weigh are the cause"
        )
    worst = max(gap.layers, key=lambda layer: layer.alone)
    most = f"{worst.name}, which alone differs by {worst.alone:.2g}"
    return f"{words}. The epsilons and stabilizers of the original act most in {most}"
