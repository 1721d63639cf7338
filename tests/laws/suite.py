"""The reusable part of the law suite: cases (map x rule x normalization x layout x backend) and their inputs.

A new feature map that `reassoc.feature_maps.names()` lists, a new rule in `RULES`, a new layout in `LAYOUTS`
or a new backend in `BACKENDS` inherits every law.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import oracle
import reassoc
from oracle import Features
from reassoc import feature_maps, rules

# Those this machine has. Where there is a compiler, tests/test_packaging.py insists on the native one.
BACKENDS = tuple(name for name, status in reassoc.backends().items() if status == "available")
NORMALIZATIONS = ("attention", "sum", "sum+attention", "none")
RULES = (
    "sum", "decay-head", "decay-token", "decay-feature",
    "delta", "gated-delta-head", "gated-delta-token", "gated-delta-feature",
)  # fmt: skip
ADDITIVE = RULES[:4]
DELTA = RULES[4:]
B, H, G, DIM, E = 2, 4, 2, 4, 3  # batch, query heads, key heads, query and key size, value size

# ---------------------------------------------------------------------------------------------------------
# Feature maps
# ---------------------------------------------------------------------------------------------------------


def _sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _calibrated(
    phi, heads: int, dim: int, size: float = 1.0, query_mean: float = 0.5, key_mean: float = -0.4
):
    """Calibrate on data with a mean and unequal spread, as real queries and keys have."""
    spread = torch.linspace(0.4, 1.6, dim, dtype=torch.float64)
    query = size * _sample(1, 2, 2 * heads, 50, dim) * spread + query_mean
    key = size * _sample(2, 2, heads, 60, dim) / spread + key_mean
    phi.calibrate_(query.float(), key.float())
    return phi


def _hedgehog(dim: int, heads: int):
    phi = feature_maps.Hedgehog(dim, heads=heads)
    with torch.no_grad():
        for i, parameter in enumerate(phi.parameters()):
            parameter.add_(0.3 * _sample(i, *parameter.shape).to(parameter.dtype))
    return phi


EXTRA_MAPS: dict[str, Callable[[int, int], Any]] = {
    "calibrated favor+": lambda dim, heads: _calibrated(
        feature_maps.PositiveFeatures(dim, 7, heads=heads, seed=3), heads, dim
    ),
    "calibrated favor++ pooled": lambda dim, heads: _calibrated(
        feature_maps.PositiveFeatures(dim, 6, optimal=True, seed=4), heads, dim
    ),
    "calibrated hyperbolic": lambda dim, heads: _calibrated(
        feature_maps.PositiveFeatures(dim, 5, hyperbolic=True, heads=heads, seed=5), heads, dim
    ),
    "trig gaussian": lambda dim, heads: feature_maps.TrigonometricFeatures(
        dim, 16, kernel="gaussian", heads=heads, seed=6
    ),
    "calibrated trig": lambda dim, heads: _calibrated(
        feature_maps.TrigonometricFeatures(dim, 16, heads=heads, seed=7), heads, dim, 0.3, 0.25, 0.15
    ),  # near the inputs that `draw` gives signed maps, so that their denominators stay away from zero
    "landmark": lambda dim, heads: _calibrated(
        feature_maps.LandmarkFeatures(dim, 10, landmarks=20, heads=heads, seed=8), heads, dim
    ),
    "codebook per head": lambda dim, heads: _calibrated(
        feature_maps.CodebookFeatures(dim, 6, heads=heads, seed=9), heads, dim
    ),
    "dpfp-3": lambda dim, heads: feature_maps.DPFP(dim, 3),
    "hedgehog per head": lambda dim, heads: _hedgehog(dim, heads),
    "t2r per head": lambda dim, heads: feature_maps.LearnedReLU(dim, 5, heads=heads),
}

MAPS = tuple(dict.fromkeys([*feature_maps.names(), *EXTRA_MAPS]))
CORE_MAPS = ("elu+1", "favor+", "identity", "trig")  # plain, exponential, signed, signed with a key weight
SIGNED_MAPS = ("identity", "trig", "calibrated trig", "trig gaussian", "taylor", "landmark")


@functools.cache
def _built(name: str, dim: int, heads: int):
    torch.manual_seed(11)
    if name in EXTRA_MAPS:
        return EXTRA_MAPS[name](dim, heads)
    return feature_maps.make(name, dim)


def make_map(name: str, dtype: torch.dtype = torch.float64, dim: int = DIM, heads: int = G):
    """A fresh module: a copy of one that is built once per process."""
    import copy

    phi = copy.deepcopy(_built(name, dim, heads))
    return phi.to(dtype) if dtype == torch.float64 else phi


OWN_FORMULA: dict[str, Callable[[Tensor], Features]] = {
    "identity": oracle.identity,
    "elu+1": oracle.elu1,
    "relu": oracle.relu,
    "relu^2": oracle.squared_relu,
    "exp": oracle.exp,
    "softmax": oracle.softmax,
    "taylor": oracle.taylor,
    **{f"dpfp-{nu}": functools.partial(oracle.dpfp, nu=nu) for nu in (1, 2, 3, 4)},
}


def features(name: str, phi, x: Tensor, role: str, heads: int = G) -> Features:
    """Features for the oracle: own formulas where the map is deterministic, else the map's values in float64.

    The factor of the query that a map drops is put back here: the oracle always sees the whole feature.
    """
    if name in OWN_FORMULA:
        return OWN_FORMULA[name](x)
    shape = x.shape
    x = x.reshape(shape[0], heads, -1, shape[-1])  # query heads of one key head side by side: axis -3 is G
    if hasattr(phi, f"log_{role}"):
        try:
            found = oracle.exponential(getattr(phi, f"log_{role}")(x))
        except (AttributeError, NotImplementedError, TypeError):
            found = oracle.plain(getattr(phi, role)(x))
    else:
        found = oracle.plain(getattr(phi, role)(x))
    if role == "query" and hasattr(phi, "log_query_factor"):
        found = found.scaled(log_query_factor(phi, x))
    return Features(*(part.reshape(*shape[:-1], part.shape[-1]) for part in found))


def log_query_factor(phi, x: Tensor) -> Tensor:
    """The factor of the query that the map leaves out, as a logarithm (...)."""
    factor = phi.log_query_factor(x)
    if factor is None:
        return x.new_zeros(x.shape[:-1])
    factor = torch.as_tensor(factor, dtype=x.dtype)
    return factor[..., 0] if factor.dim() == x.dim() else factor.expand(x.shape[:-1])


# ---------------------------------------------------------------------------------------------------------
# Layouts and cases
# ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which keys a query may see, and how many there are."""

    n: int
    m: int | None = None  # keys, when not n
    causal: bool = False
    window: int | None = None
    masked: bool = False
    cu_seqlens: tuple[int, ...] | None = None


LAYOUTS: dict[str, Layout] = {
    "full": Layout(65),
    "cross": Layout(7, 70),
    "causal": Layout(131, causal=True),
    "window": Layout(67, causal=True, window=10),
    "long-window": Layout(140, causal=True, window=66),
    "padded": Layout(9, 66, masked=True),
    "padded-causal": Layout(67, causal=True, masked=True),
    "padded-window": Layout(67, causal=True, window=5, masked=True),
    "packed": Layout(70, cu_seqlens=(0, 5, 5, 69, 70)),
    "packed-causal": Layout(70, causal=True, cu_seqlens=(0, 0, 1, 66, 70, 70)),
    "packed-window": Layout(70, causal=True, window=4, cu_seqlens=(0, 2, 67, 67, 70)),
}


def fits(rule: str, layout: str | Layout) -> bool:
    """Whether a rule has a meaning in a layout: delta rules are causal and have no window."""
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    return rule in ADDITIVE or (layout.causal and layout.window is None)


def rule_for(index: int, layout: str | Layout, rules: tuple[str, ...] = RULES) -> str:
    """One of the rules that fit a layout, in turn: for tests that spread the rules over their cases."""
    fitting = [rule for rule in rules if fits(rule, layout)]
    return fitting[index % len(fitting)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the product."""

    map: str
    rule: str
    normalize: str
    layout: str
    backend: str

    def __str__(self) -> str:
        return "/".join(dataclasses.astuple(self))


def _cover(maps: tuple[str, ...]) -> list[Case]:
    """The whole product of what makes sense, without a choice of what matters."""
    product = itertools.product(maps, RULES, NORMALIZATIONS, LAYOUTS, BACKENDS)
    return [case for case in (Case(*parts) for parts in product) if fits(case.rule, case.layout)]


CASES = _cover(MAPS)


@dataclasses.dataclass
class Inputs:
    """Tensors of one call and the options that go with them."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor | None
    key_mask: Tensor | None
    layout: Layout
    beta: Tensor | None = None

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable tensors."""
        found = {"query": self.query, "key": self.key, "value": self.value}
        if self.log_decay is not None:
            found["log_decay"] = self.log_decay
        if self.beta is not None:
            found["beta"] = self.beta
        return found

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers rounded to another dtype (gates stay at least float32)."""
        gates = torch.promote_types(dtype, torch.float32)
        kinds = {"query": dtype, "key": dtype, "value": dtype, "log_decay": gates, "beta": gates}
        return dataclasses.replace(self, **{name: t.to(kinds[name]) for name, t in self.leaves().items()})

    def requires_grad(self, only: tuple[str, ...] | None = None) -> Inputs:
        """Leaves that ask for gradients."""
        fresh = {
            name: tensor.detach().clone().requires_grad_(only is None or name in only)
            for name, tensor in self.leaves().items()
        }
        return dataclasses.replace(self, **fresh)

    def rows(self, start: int, stop: int) -> Inputs:
        """The tokens start..stop of a causal call (or of its keys)."""
        gate = self.log_decay
        if gate is not None and gate.dim() > 1:
            gate = gate[:, :, start:stop]
        return dataclasses.replace(
            self,
            query=self.query[:, :, start:stop],
            key=self.key[:, :, start:stop],
            value=self.value[:, :, start:stop],
            log_decay=gate,
            key_mask=None if self.key_mask is None else self.key_mask[:, start:stop],
            beta=None if self.beta is None else self.beta[:, :, start:stop],
        )

    def heads(self, query: slice, key: slice, batch: slice = slice(None)) -> Inputs:
        """Some heads of some sequences."""
        gate, mask = self.log_decay, self.key_mask
        if gate is not None:
            gate = gate[key] if gate.dim() == 1 else gate[batch, key]
        return dataclasses.replace(
            self,
            query=self.query[batch, query],
            key=self.key[batch, key],
            value=self.value[batch, key],
            log_decay=gate,
            key_mask=None if mask is None else mask[batch],
            beta=None if self.beta is None else self.beta[batch, key],
        )

    def normalize(self, named: str | None) -> str | None:
        """The normalization of a call: delta rules have no default, tests take "sum" for one."""
        return "sum" if named is None and self.beta is not None else named

    def rule(self):
        """The rule object of the library."""
        if self.beta is not None:
            gate = self.log_decay
            return rules.Delta(self.beta) if gate is None else rules.GatedDelta(self.beta, gate)
        return rules.Sum() if self.log_decay is None else rules.Decay(self.log_decay)

    def options(self) -> dict[str, Any]:
        """Layout options of `linear_attention`."""
        found: dict[str, Any] = {"causal": self.layout.causal, "window": self.layout.window}
        found["key_mask"] = self.key_mask
        if self.layout.cu_seqlens is not None:
            found["cu_seqlens"] = torch.tensor(self.layout.cu_seqlens)
        return found


def away_from_zero(x: Tensor, gap: float = 0.05) -> Tensor:
    """Move numbers off the kinks of ReLU-like maps."""
    return torch.where(x.abs() < gap, torch.where(x < 0, -gap, gap).to(x.dtype), x)


def draw_decay(rule: str, batch: int, heads: int, m: int, r: int, seed: int) -> Tensor | None:
    """A log_decay of the rule's shape: mostly mild, some strong, some tokens that reset."""
    if rule in ("sum", "delta"):
        return None
    generator = torch.Generator().manual_seed(seed)
    per = rule.rpartition("-")[2]
    shape = {"head": (heads,), "token": (batch, heads, m), "feature": (batch, heads, m, r)}[per]
    gate = torch.rand(*shape, generator=generator, dtype=torch.float64)
    if per == "head":
        return -0.01 - 0.1 * gate
    gate = torch.where(gate < 0.03, torch.full_like(gate, -math.inf), -0.3 * gate.square())
    gate[:, :, -1:] = -0.1  # a reset at the end would leave reads that are not causal with one key
    return gate


def draw_beta(case_map: str, key: Tensor, normalize: str, seed: int) -> Tensor:
    """Writing strengths with beta |phi(k)|^2 in (0, 1): where a delta rule forgets and does not blow up."""
    generator = torch.Generator().manual_seed(seed)
    strength = 0.05 + 0.9 * torch.rand(*key.shape[:3], generator=generator, dtype=torch.float64)
    phi = make_map(case_map, heads=key.shape[1])
    with torch.no_grad():
        found = features(case_map, phi, key, "key", key.shape[1])
        if "sum" in normalize:
            found, _, _ = oracle.sum_normalized(found, "zero")
    return strength / found.value().square().sum(-1).clamp_min(1.0)


def draw(
    case_map: str, rule: str, layout: str | Layout, *, seed: int = 0, norm: float = 1.0, r: int | None = None,
    normalize: str | None = None,
) -> Inputs:  # fmt: skip
    """Inputs of one case in float64. Signed maps get inputs that keep their denominators away from zero.

    Delta rules need ``normalize``, the one of the call (None: "sum"), to have a beta that suits it.
    """
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    batch = 1 if layout.cu_seqlens is not None else B
    m = layout.n if layout.m is None else layout.m
    generator = torch.Generator().manual_seed(1000 + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = away_from_zero(norm * normal(batch, H, layout.n, DIM))
    key = away_from_zero(norm * normal(batch, G, m, DIM))
    if case_map == "identity":
        query, key = query.abs() + 0.1, key.abs() + 0.1
    elif case_map in SIGNED_MAPS:
        query, key = 0.3 * query + 0.2, 0.3 * key + 0.2
    elif case_map.startswith(("relu", "dpfp", "generalized", "t2r")):
        query, key = query + 0.6, key + 0.6  # some vectors stay all zero or nearly so: rows without weight
        query, key = away_from_zero(query), away_from_zero(key)
    value = normal(batch, G, m, E)
    if rule.endswith("feature") and r is None:
        r = make_map(case_map).feature_dim
    gate = draw_decay(rule, batch, G, m, r or 1, 2000 + seed)
    mask = None
    if layout.masked:
        mask = torch.rand(batch, m, generator=generator) < 0.7
        mask[-1, : m // 3] = False  # left padding: the first queries of that row see no key
    beta = draw_beta(case_map, key, normalize or "sum", 3000 + seed) if rule in DELTA else None
    return Inputs(query, key, value, gate, mask, layout, beta)


def call(phi, inputs: Inputs, *, normalize: str | None = None, backend: str = "auto", **more):
    """`reassoc.linear_attention` on `inputs`."""
    options = {**inputs.options(), **more}
    return reassoc.linear_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        phi,
        rule=inputs.rule(),
        normalize=inputs.normalize(normalize),
        backend=backend,
        **options,
    )


def expect(
    name: str, phi, inputs: Inputs, *, normalize: str | None = None, heads: int = G, **more
) -> oracle.Result:
    """The oracle on `inputs`, in float64; `phi` must be float64."""
    key = inputs.key.double()
    if inputs.key_mask is not None:
        key = key.masked_fill(~inputs.key_mask[:, None, :, None], 0.5)  # masked keys may hold anything
    options: dict[str, Any] = {"causal": inputs.layout.causal, "window": inputs.layout.window}
    if inputs.layout.cu_seqlens is not None:
        options["cu_seqlens"] = list(inputs.layout.cu_seqlens)
    return oracle.attend(
        features(name, phi, inputs.query.double(), "query", heads),
        features(name, phi, key, "key", heads),
        inputs.value.double(),
        log_decay=None if inputs.log_decay is None else inputs.log_decay.double(),
        beta=None if inputs.beta is None else inputs.beta.double(),
        normalize=inputs.normalize(normalize) or "attention",
        key_mask=inputs.key_mask,
        **options,
        **more,
    )


def largest_log(name: str, phi, inputs: Inputs) -> float:
    """max |log phi| over the inputs of an exponential map, 0 for others."""
    if not hasattr(phi, "log_query") and name not in ("exp", "softmax"):
        return 0.0  # not an exponential map
    with torch.no_grad():
        query = features(name, phi, inputs.query.detach().double(), "query")
        key = features(name, phi, inputs.key.detach().double(), "key")
    return max(float(query.log.abs().max()), float(key.log.abs().max()))


def cotangent(output: Tensor, undefined: Tensor, seed: int = 5) -> Tensor:
    """A random incoming gradient that is zero at undefined rows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return weight.masked_fill(undefined[..., None], 0.0)


def gradients(
    output: Tensor, weight: Tensor, wanted: dict[str, Tensor], retain: bool = False
) -> dict[str, Tensor]:
    """Gradients of the weighted output with respect to named tensors (zeros where unused)."""
    found = torch.autograd.grad(
        output, list(wanted.values()), weight.to(output.dtype), allow_unused=True, retain_graph=retain
    )
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(wanted.items(), found, strict=True)
    }


def assert_gradients_equal_the_oracle(
    output: Tensor,
    result: oracle.Result,
    wanted: dict[str, Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    logs: float = 0.0,
    stretch: float = 1.0,
    spread: float | None = None,
    truth: dict[str, Tensor] | None = None,
) -> None:
    """Gradients of a random weighting of `output` against those of the oracle's output.

    A gradient of a query is a difference of terms as large as the row's scale times the incoming gradient
    times the slope of log phi (`stretch`); where they cancel, that size is what the budget is relative to.
    ``truth``: the oracle's gradients, where they are already known.
    """
    from laws.budgets import assert_gradients_close

    weight = cotangent(result.output.detach(), result.undefined).to(dtype).double()
    truth = gradients(result.output, weight, wanted) if truth is None else truth
    floor = float((result.scale * weight.abs()).sum(-1).max()) * stretch
    spread = max(1.0, float(result.spread.max())) if spread is None else spread
    for name, gradient in gradients(output, weight, wanted, retain=True).items():
        assert gradient.dtype == wanted[name].dtype
        assert_gradients_close(gradient, truth[name], dtype, logs, spread, name, floor)


def assert_gradients_same(
    got: Tensor, want: Tensor, leaves: dict[str, Tensor], dtype: torch.dtype = torch.float64
) -> None:
    """Two ways through the library send back the same gradients of one random weighting."""
    from laws.budgets import assert_gradients_close

    weight = cotangent(want, want[..., 0].isnan())
    truth = gradients(want, weight, leaves)
    for leaf, gradient in gradients(got, weight, leaves).items():
        assert_gradients_close(gradient, truth[leaf], dtype, what=leaf)


def step_through(
    phi, inputs: Inputs, *, state=None, normalize: str | None = None, backend: str = "auto", **more
):
    """Every token of a causal call through `reassoc.step`. Returns the outputs (B, H, N, e) and the state."""
    if state is None:
        state = fresh_state(phi, inputs, normalize=normalize)
    outputs = []
    for t in range(inputs.query.shape[2]):
        now = inputs.rows(t, t + 1)
        outputs.append(
            reassoc.step(
                now.query,
                now.key,
                now.value,
                phi,
                state,
                rule=now.rule(),
                normalize=inputs.normalize(normalize),
                window=inputs.layout.window,
                key_mask=now.key_mask,
                backend=backend,
                **more,
            )
        )
    return torch.cat(outputs, 2), state


def fresh_state(phi, inputs: Inputs, *, normalize: str | None = None):
    """An empty state for these inputs."""
    dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    return reassoc.AttentionState.zeros(
        phi,
        inputs.query.shape[0],
        inputs.key.shape[1],
        inputs.value.shape[-1],
        rule=inputs.rule(),
        normalize=inputs.normalize(normalize),
        window=inputs.layout.window,
        dtype=dtype,
    )


def true_sums(state) -> tuple[Tensor, Tensor | None]:
    """S and z of a state at their true scale, in float64."""
    S = state.S.double()
    z = None if state.z is None else state.z.double()
    if state.log_scale is not None:
        factor = state.log_scale.double().exp()
        S = S * factor[..., None]
        z = None if z is None else z * factor
    return S, z


def assert_states_same(got, want, factor: float = 1.0, dtype: torch.dtype = torch.float64):
    """Two states hold the same sums and lengths, whatever their internal scale."""
    from laws.budgets import assert_same

    for a, b, what in zip(true_sums(got), true_sums(want), ("S", "z"), strict=True):
        assert (a is None) == (b is None), f"one state has {what}, the other does not"
        if a is not None:
            assert_same(a, b, dtype, factor, f"state {what}")
    assert torch.equal(got.length, want.length)


def state_bytes(state) -> int:
    """Bytes of memory that a state keeps alive: whole storages, not the visible part of a view."""
    seen = {}
    for value in vars_of(state):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(seen.values())


def vars_of(thing) -> list[Tensor]:
    """Every tensor reachable through attributes, slots, dicts and sequences."""
    found: list[Tensor] = []
    stack, seen = [thing], set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif type(item).__module__.startswith("reassoc") and not isinstance(item, torch.nn.Module):
            stack.extend(getattr(item, "__dict__", {}).values())
            for kind in type(item).__mro__:
                for slot in getattr(kind, "__slots__", ()):
                    if hasattr(item, slot):
                        stack.append(getattr(item, slot))
    return found
