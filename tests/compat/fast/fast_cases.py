"""Small models and inputs, built and run under either package of the same names: ours, or the original."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

OURS, ORIGINAL = "reassoc.compat.fast_transformers", "fast_transformers"
LENGTH, MEMORY, BATCH, HEADS, SIZE, VALUE = 12, 9, 3, 2, 8, 6
MODEL = HEADS * VALUE
# Of outputs and gradients, relative to the largest entry: what the two libraries' float32 sums may differ by.
RELATIVE = 1e-5
# A gradient that vanishes in exact arithmetic (a key's bias under softmax) is what rounding leaves of larger
# ones: one unit of float32 of the largest is allowed.
FLOOR = torch.finfo(torch.float32).eps / RELATIVE


@dataclass(frozen=True)
class Case:
    """A builder's name and parameters, a feature map, and which tokens are real."""

    builder: str
    options: dict[str, Any]
    map: tuple[str, dict[str, Any]] | None = None
    lengths: tuple[int, ...] | None = None
    causal: bool = False

    @property
    def recurrent(self) -> bool:
        return self.builder.startswith("Recurrent")

    @property
    def decoder(self) -> bool:
        return "Decoder" in self.builder


FIXED = {"deterministic_eval": True}
MAPS = {
    "elu": None,
    "favor": ("Favor", {"n_dims": 10, **FIXED}),
    "favor-stabilized": ("Favor", {"stabilize": True, **FIXED}),
    "fourier": ("RandomFourierFeatures", {"n_dims": 64, "softmax_temp": 0.1, **FIXED}),
    "smoothed": ("SmoothedRandomFourierFeatures", {"n_dims": 9, "orthogonal": True, **FIXED}),
    "relu": ("GeneralizedRandomFeatures", {"n_dims": 11, **FIXED}),
    "exp": (
        "GeneralizedRandomFeatures",
        {"kernel_fn": torch.exp, "softmax_temp": 0.25, "orthogonal": False, **FIXED},
    ),
}
# Signed features divide by what may be near zero, and the fewer keys the nearer.
LENGTHS = {"fourier": (12, 11, 12)}


def _cases() -> dict[str, Case]:
    cases = {}
    for name, phi in MAPS.items():
        lengths = LENGTHS.get(name, (12, 7, 1))
        for kind in ("linear", "causal-linear"):
            causal = kind != "linear"
            cases[f"{kind} {name}"] = Case(
                "TransformerEncoderBuilder", {"attention_type": kind}, phi, lengths, causal
            )
        both = {
            "self_attention_type": "causal-linear", "cross_attention_type": "linear", "activation": "gelu",
        }  # fmt: skip
        if name != "fourier":
            cases[f"recurrent {name}"] = Case("RecurrentEncoderBuilder", {"attention_type": "linear"}, phi)
            cases[f"decoder {name}"] = Case("TransformerDecoderBuilder", both, phi, (9, 5, 1), True)
            recurrent = both | {"self_attention_type": "linear"}
            cases[f"recurrent decoder {name}"] = Case("RecurrentDecoderBuilder", recurrent, phi, (9, 5, 1))
    full = {"attention_type": "full"}
    cases["full"] = Case("TransformerEncoderBuilder", full, None, (12, 7, 1))
    cases["full causal"] = Case("TransformerEncoderBuilder", full, None, (12, 7, 1), True)
    cases["recurrent full"] = Case("RecurrentEncoderBuilder", full)
    cases["decoder full"] = Case("TransformerDecoderBuilder", {}, None, (9, 5, 1), True)
    cases["recurrent decoder full"] = Case("RecurrentDecoderBuilder", {}, None, (9, 5, 1))
    for limit in (4, 64):
        options = {"attention_type": "conditional-full:linear", "length_limit": limit}
        cases[f"conditional {limit}"] = Case("TransformerEncoderBuilder", options, None, (12, 7, 1))
    return cases


CASES = _cases()
# Recorded: every map and every kind of model, not their product; less than 1 MB.
RECORDED = [
    name
    for name in CASES
    if name.endswith((" favor", "full", "causal")) or not name.startswith(("decoder", "recurrent d", "cond"))
]


def module(package: str, name: str) -> Any:
    """A submodule of either package."""
    return import_module(f"{package}.{name}")


def build(package: str, case: Case, **more: Any) -> torch.nn.Module:
    """The model in evaluation, with a random matrix wherever it has one; ours repeats the original."""
    options = {
        "n_layers": 2, "n_heads": HEADS, "query_dimensions": SIZE, "value_dimensions": VALUE,
        "feed_forward_dimensions": 14, "dropout": 0.0, "attention_dropout": 0.0,
        **case.options, **more,
    }  # fmt: skip
    if case.map is not None:
        kind, chosen = case.map
        options["feature_map"] = getattr(module(package, "feature_maps"), kind).factory(**chosen)
    if package == OURS:
        options.setdefault("legacy", "exact")
    torch.manual_seed(0)
    model = getattr(module(package, "builders"), case.builder).from_kwargs(**options).get().eval()
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("omega"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return model


def inputs(case: Case) -> dict[str, Tensor]:
    """``x``, and a memory for decoders; the same at every call."""
    generator = torch.Generator().manual_seed(2)
    given = {"x": torch.randn(BATCH, LENGTH, MODEL, generator=generator)}
    if case.decoder:
        given["memory"] = torch.randn(BATCH, MEMORY, MODEL, generator=generator)
    return given


def run(package: str, model: torch.nn.Module, case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output, final states of the first layer, and gradients of inputs and weights."""
    masking = module(package, "masking")
    given = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    lengths = None
    if case.lengths is not None:
        lengths = masking.LengthMask(torch.tensor(case.lengths), max_len=MEMORY if case.decoder else LENGTH)
    triangle = masking.TriangularCausalMask(LENGTH) if case.causal else None
    found: dict[str, Tensor] = {}
    if case.recurrent:
        steps, state = [], None
        extra = (given["memory"], lengths) if case.decoder else ()
        for token in given["x"].unbind(1):
            y, state = model(token, *extra, state=state)
            steps.append(y)
        output = torch.stack(steps, 1)
        first = [t for part in state[0] for t in part] if case.decoder else state[0]
        found |= {f"state {i}": tensor.detach() for i, tensor in enumerate(first)}
    elif case.decoder:
        output = model(given["x"], given["memory"], x_mask=triangle, memory_length_mask=lengths)
    else:
        output = model(given["x"], attn_mask=triangle, length_mask=lengths)
    found["output"] = output.detach()
    (output * torch.arange(output.numel()).reshape(output.shape).cos()).sum().backward()
    found |= {f"gradient {name}": t.grad for name, t in given.items()}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters()}
    return found


def assert_repeats(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Every tensor within RELATIVE of its largest entry."""
    assert got.keys() == want.keys()
    largest = max(t.abs().max() for name, t in want.items() if name.startswith("gradient"))
    for name, expected in want.items():
        size = expected.abs().max()
        if name.startswith("gradient"):
            size = torch.maximum(size, FLOOR * largest)
        assert got[name].shape == expected.shape, name
        error = (got[name] - expected).abs().max() / size
        assert error <= RELATIVE, f"{name}: {error:.2e} of the largest entry"
