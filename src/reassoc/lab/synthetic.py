"""Random inputs of chosen norm and length: how errors depend on the two."""

from __future__ import annotations

import hashlib
import json

import torch

from .._errors import InputError
from ._sites import Site
from .activations import Activations

NORMS = (0.5, 1.0, 2.0, 4.0)
LENGTHS = (64, 256, 1024)


def synthetic(
    norms: list[float] | None = None, lengths: list[int] | None = None, *, dim: int = 32, seed: int = 0
) -> Activations:
    """Gaussian queries and keys of given expected norm, Gaussian values: one site per norm and length.

    Args:
        norms: root mean square norm of a scaled query and key, ``|x| d^-1/4``: what errors depend on.
        lengths: tokens per sequence; two sequences each, one to calibrate and one to judge.
        dim: head size. seed: of the data.

    Returns:
        Activations of model "synthetic"; ``provenance["axes"]`` gives each site's norm and length.

    Raises:
        InputError: a norm or length that is not positive.
    """
    norms = list(dict.fromkeys(NORMS if norms is None else norms))
    lengths = list(dict.fromkeys(LENGTHS if lengths is None else lengths))
    if (
        any(not 0 < norm < 1e3 for norm in norms)
        or any(length < 1 for length in lengths)
        or not norms
        or not lengths
    ):
        raise InputError(
            f"synthetic norms must be in (0, 1000) and lengths at least 1, got {norms} and {lengths}"
        )
    generator = torch.Generator().manual_seed(seed)
    sites, axes = [], {}
    for norm in norms:
        for length in lengths:
            name = f"norm {norm:g}, length {length}"
            axes[name] = {"norm": norm, "length": length}
            query, key, value = (torch.randn(2, 2 * length, dim, generator=generator) for _ in range(3))
            # |x| d^-1/4 = norm for a standard normal x times norm d^-1/4.
            factor = norm * dim**-0.25
            bounds = torch.tensor([0, length, 2 * length], dtype=torch.int32)
            sites.append(
                Site(
                    name, query * factor, key * factor, value, bounds, False, dim**-0.5, "synthetic", None,
                    (0, 1), (0, 1),
                )
            )  # fmt: skip
    about = {"kind": "synthetic", "axes": axes, "dim": dim, "seed": seed}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return Activations(tuple(sites), about, digest)
