"""Agreement with implementations that share no code with this one: transformers and flash-linear-attention.

Both are checked in values, final states and gradients, with the queries scaled as they scale them, keys of
length one, no normalization. The reference forms of flash-linear-attention are loaded from their files: its
package needs Triton, they need torch and einops.
"""

import importlib.metadata
import importlib.util
import inspect

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

import reassoc
from laws.budgets import assert_gradients_close, assert_same
from reassoc import rules
from reassoc.kernels import _library

B, G, N, D, E = 2, 3, 256, 16, 24  # N: a multiple of every chunk that a peer cannot do without
CUT = 128  # where a state is handed over
MISSING = pytest.mark.skipif(_library.library() is None, reason=f"native library: {_library.reason()}")
each_backend = pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=MISSING)])


def fla(family):
    """The module ``fla/ops/<family>/naive.py``."""
    wanted = f"fla/ops/{family}/naive.py"
    [file] = [f for f in importlib.metadata.files("fla-core") if f.as_posix() == wanted]
    spec = importlib.util.spec_from_file_location(f"fla_{family}_naive", file.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def qwen3_next(name):
    """One of the two forms in transformers, without what a decorator may put in its place."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    return inspect.unwrap(getattr(modeling_qwen3_next, name))


def swapped(*tensors):
    """(B, H, N, ...) <-> (B, N, H, ...)."""
    return [t.transpose(1, 2) for t in tensors]


# Each peer: its shapes and argument names -> output (B, H, N, e) and final state, or None where it has none.


def transformers_gated_delta(name):
    def run(q, k, v, beta, gate, state):
        q, k, v, beta, gate = swapped(q, k, v, beta, gate)
        output, after = qwen3_next(name)(
            q, k, v, g=gate, beta=beta, initial_state=state, output_final_state=True
        )
        return output.transpose(1, 2), after

    return run


def fla_delta(form):
    def run(q, k, v, beta, gate, state):
        more = {} if state is None else {"initial_state": state}
        output, after = getattr(fla("delta_rule"), form)(q, k, v, beta, **more)
        return output, None if form == "delta_rule_parallel" else after

    return run


def fla_by_position(family, form, *, beta=False, gate="g", final=True):
    def run(q, k, v, strength, decay, state):
        options = {gate: decay.transpose(1, 2)}
        if beta:
            options["beta"] = strength.transpose(1, 2)
        if final:
            options |= {"initial_state": state, "output_final_state": True}
        output, after = getattr(fla(family), form)(*swapped(q, k, v), **options)
        return output.transpose(1, 2), after if final else None

    return run


PEERS = {
    # name: (peer, beta?, gate, dtype, takes a state?)
    "transformers chunk": (
        transformers_gated_delta("torch_chunk_gated_delta_rule"), True, "token", torch.float32, True,
    ),
    "transformers recurrent": (
        transformers_gated_delta("torch_recurrent_gated_delta_rule"), True, "token", torch.float32, True,
    ),
    "fla delta recurrence": (fla_delta("delta_rule_recurrence"), True, None, torch.float32, True),
    "fla delta chunkwise": (fla_delta("delta_rule_chunkwise"), True, None, torch.float64, False),
    "fla delta parallel": (fla_delta("delta_rule_parallel"), True, None, torch.float64, False),
    "fla gated delta recurrent": (
        fla_by_position("gated_delta_rule", "naive_recurrent_gated_delta_rule", beta=True),
        True, "token", torch.float32, True,
    ),
    "fla gated delta chunk": (
        fla_by_position("gated_delta_rule", "naive_chunk_gated_delta_rule", beta=True),
        True, "token", torch.float32, True,
    ),
    "fla kda recurrent": (
        fla_by_position("kda", "naive_recurrent_kda", beta=True), True, "feature", torch.float32, True,
    ),
    "fla kda chunk": (
        fla_by_position("kda", "naive_chunk_kda", beta=True), True, "feature", torch.float32, True,
    ),
    "fla simple gla recurrent": (
        fla_by_position("simple_gla", "naive_recurrent_simple_gla"), False, "token", torch.float32, True,
    ),
    "fla simple gla chunk": (
        fla_by_position("simple_gla", "naive_chunk_simple_gla"), False, "token", torch.float32, True,
    ),
    "fla simple gla parallel": (
        fla_by_position("simple_gla", "naive_parallel_simple_gla", final=False),
        False, "token", torch.float32, False,
    ),
    "fla gla recurrent": (
        fla_by_position("gla", "naive_recurrent_gla", gate="gk"), False, "feature", torch.float32, True,
    ),
}  # fmt: skip


def inputs(beta, gate, dtype, heads=G):
    """Leaves of a call: q and k with so many heads, v and gates with G."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = {"q": normal(B, heads, N, D), "k": normal(B, heads, N, D), "v": normal(B, G, N, E)}
    if beta:
        leaves["beta"] = normal(B, G, N).sigmoid()
    if gate is not None:
        leaves["gate"] = logsigmoid(2 + 2 * normal(*((B, G, N) if gate == "token" else (B, G, N, D))))
    return {name: t.to(dtype).requires_grad_() for name, t in leaves.items()}


def rule_of(beta, gate):
    if beta is None:
        return rules.Decay(gate)
    return rules.Delta(beta) if gate is None else rules.GatedDelta(beta, gate)


def ours(backend, leaves, start, stop, state):
    """Tokens start..stop through the library."""
    q, k, v, beta, gate = (leaves.get(name) for name in ("q", "k", "v", "beta", "gate"))
    q, k = (t.expand(-1, G, -1, -1) for t in (q * D**-0.5, normalize(k, dim=-1)))
    q, k, v, beta, gate = (None if t is None else t[:, :, start:stop] for t in (q, k, v, beta, gate))
    return reassoc.linear_attention(
        q, k, v, "identity", rule=rule_of(beta, gate), normalize="none", causal=True, state=state,
        return_state=True, backend=backend,
    )  # fmt: skip


def theirs(peer, leaves, start, stop, state):
    q, k, v = leaves["q"], normalize(leaves["k"], dim=-1), leaves["v"]
    tensors = (q, k, v, leaves.get("beta"), leaves.get("gate"))
    return peer(*(None if t is None else t[:, :, start:stop] for t in tensors), state)


def assert_agree(backend, peer, leaves, dtype, in_two):
    """Output, final state, and the gradients of a random weighting of both."""
    if in_two:
        first, state = ours(backend, leaves, 0, CUT, None)
        second, state = ours(backend, leaves, CUT, N, state)
        got = torch.cat([first, second], 2)
        first, memory = theirs(peer, leaves, 0, CUT, None)
        second, memory = theirs(peer, leaves, CUT, N, memory)
        want = torch.cat([first, second], 2)
    else:
        got, state = ours(backend, leaves, 0, N, None)
        want, memory = theirs(peer, leaves, 0, N, None)
    assert_same(got, want, dtype, what="output")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(want.shape, generator=generator, dtype=torch.float64).to(dtype)
    mine, yours = (got * weight).sum(), (want * weight).sum()
    if memory is not None:
        assert_same(state.S, memory, dtype, what="final state")
        weight = torch.randn(memory.shape, generator=generator, dtype=torch.float64).to(dtype)
        mine, yours = mine + (state.S * weight).sum(), yours + (memory * weight).sum()
    truth = torch.autograd.grad(yours, list(leaves.values()))
    for name, a, b in zip(leaves, torch.autograd.grad(mine, list(leaves.values())), truth, strict=True):
        assert_gradients_close(a, b, dtype, what=name)


@each_backend
@pytest.mark.parametrize("name", PEERS)
def test_values_states_and_gradients(name, backend):
    peer, beta, gate, dtype, takes_state = PEERS[name]
    assert_agree(backend, peer, inputs(beta, gate, dtype), dtype, in_two=takes_state)


@each_backend
@pytest.mark.parametrize(
    ("name", "gate"), [("transformers chunk", "token"), ("fla kda recurrent", "feature")]
)
def test_values_grouped_under_one_key(name, gate, backend):
    """Several value heads of one key and query head: here that head, repeated without a copy."""
    leaves = inputs(True, gate, torch.float32, heads=1)
    assert_agree(backend, PEERS[name][0], leaves, torch.float32, in_two=False)
