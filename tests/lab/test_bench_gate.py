"""No speed for a wrong result: the gate passes what is right, and catches every kind of wrong."""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib")

from reassoc.lab import InputError
from reassoc.lab.bench import DEFAULT_PROBLEMS, Problem, Settings, gate
from reassoc.lab.bench import peers as peers_module
from reassoc.lab.bench.contenders import Ready, UnsupportedError, ours, plain, softmax
from reassoc.lab.bench.inputs import make_inputs
from reassoc.lab.bench.yardstick import CHUNK, yardstick

SMALL = Settings(batch=2, heads=2, head_dim=8, value_dim=6, features=10, lengths=(70,))
SUM = DEFAULT_PROBLEMS[0]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(gate, "PIECE", 16)


def spoiled(contender, spoil):
    """The contender with another output; steps too."""

    def wrap(make):
        def prepare(inputs):
            ready = make(inputs)
            return ready._replace(run=lambda: spoil(ready.run()))

        return prepare

    return dataclasses.replace(
        contender, prepare=wrap(contender.prepare), step=contender.step and wrap(contender.step)
    )


PROBLEMS = (
    *DEFAULT_PROBLEMS,
    Problem("identity", "kda"),
    Problem("elu+1", "delta"),
    Problem("favor+", "decay"),
)


@pytest.mark.parametrize("direction", ["forward", "backward", "step"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.title)
def test_ours_is_right(problem, direction):
    verdict = gate.judge(ours(SMALL, problem, "auto"), SMALL, direction, 70)
    assert verdict.right and 0 < verdict.error < verdict.budget < 1e-3
    assert verdict.tokens == 70 and verdict.seconds > 0


@pytest.mark.parametrize("direction", ["forward", "backward", "step"])
def test_softmax_is_right(direction):
    assert gate.judge(softmax(SMALL), SMALL, direction, 70).right


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 3 * CHUNK + 5])
def test_yardstick_is_right(length, direction, causal):
    settings = dataclasses.replace(SMALL, causal=causal, dtype="float64")
    verdict = gate.judge(dataclasses.replace(plain(settings), exact=True), settings, direction, length)
    assert verdict.right and verdict.budget <= 3e-10


@pytest.mark.parametrize("causal", [True, False])
def test_yardstick_is_the_formula(causal):
    """By a double loop, not by this library."""
    q, k, v = (torch.randn(1, 1, 5, 3, dtype=torch.float64) for _ in range(3))
    got = yardstick(q, k, v, causal)

    def phi(x):
        return torch.where(x > 0, x + 1, x.exp())

    for i in range(5):
        seen = range(i + 1 if causal else 5)
        weights = [float((phi(q[0, 0, i]) * phi(k[0, 0, j])).sum()) for j in seen]
        want = sum(w * v[0, 0, j] for w, j in zip(weights, seen, strict=True)) / sum(weights)
        assert torch.allclose(got[0, 0, i], want, rtol=0, atol=1e-12)


def late(output):
    """Right but for the last token."""
    return torch.cat([output[:, :, :-1], output[:, :, -1:] * 1.001], dim=2)


WRONGS = {
    "scaled": lambda o: o * 1.0001,
    "late": late,
    "nan": lambda o: o * float("nan"),
    "infinite": lambda o: o / 0.0,
    "shape": lambda o: o[..., :-1],
    "shifted": lambda o: o.roll(1, dims=2),
    "one head": lambda o: torch.cat([o[:, :1], o[:, 1:] + 1e-3], dim=1),
}


@pytest.mark.parametrize("wrong", WRONGS)
@pytest.mark.parametrize("problem", [SUM, Problem("identity", "delta")], ids=lambda p: p.title)
def test_wrong_outputs_are_caught(problem, wrong):
    contender = spoiled(ours(SMALL, problem, "auto"), WRONGS[wrong])
    assert not gate.judge(contender, SMALL, "forward", 70).right


@pytest.mark.parametrize("wrong", ["scaled", "nan"])
def test_wrong_steps_and_softmax_are_caught(wrong):
    assert not gate.judge(spoiled(ours(SMALL, SUM, "auto"), WRONGS[wrong]), SMALL, "step", 20).right
    assert not gate.judge(spoiled(softmax(SMALL), WRONGS[wrong]), SMALL, "step", 20).right
    assert not gate.judge(spoiled(softmax(SMALL), WRONGS[wrong]), SMALL, "forward", 20).right


@pytest.mark.parametrize("which", range(5))
def test_one_wrong_gradient_is_caught(which):
    """Outputs right, the gradient of one input a thousandth off."""
    problem = Problem("identity", "gated-delta")
    contender = ours(SMALL, problem, "auto")

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * 1.001

    def prepare(inputs):
        leaves = inputs.tensors
        if which >= 5:
            return contender.prepare(inputs)

        def run():
            moved = tuple(Off.apply(t) if i == which else t for i, t in enumerate(leaves))
            return contender.prepare(inputs.like(moved)).run()

        return Ready(run, leaves)

    spoilt = dataclasses.replace(contender, prepare=prepare)
    assert gate.judge(spoilt, SMALL, "forward", 20).right
    assert not gate.judge(spoilt, SMALL, "backward", 20).right


def test_other_libraries_are_not_held_to_our_budget_but_to_the_operator():
    loose = dataclasses.replace(ours(SMALL, SUM, "auto"), exact=False)
    assert gate.judge(spoiled(loose, lambda o: o * 1.0001), SMALL, "forward", 20).right
    assert not gate.judge(spoiled(loose, lambda o: o * 1.01), SMALL, "forward", 20).right


def test_layout_and_scale_of_a_contender_are_undone():
    base = ours(SMALL, SUM, "auto")

    def prepare(inputs):
        leaves = tuple(t.transpose(1, 2).contiguous() for t in inputs.tensors)

        def run():
            back = inputs.like(tuple(t.transpose(1, 2) for t in leaves))
            return 0.25 * base.prepare(back).run().transpose(1, 2)

        return Ready(run, leaves, transposed=True, scale=0.25)

    other = dataclasses.replace(base, prepare=prepare)
    for direction in ("forward", "backward"):
        assert gate.judge(other, SMALL, direction, 20).right


def test_a_reference_that_is_not_finite_judges_nobody():
    # Features of size 8 and up: a delta write with such a key overshoots ever further.
    settings = dataclasses.replace(SMALL, normalize="none", head_dim=32)
    contender = ours(settings, Problem("elu+1", "delta"), "auto")
    with pytest.raises(UnsupportedError, match="not finite"):
        gate.judge(contender, settings, "forward", 600)


def test_inputs_are_the_same_for_everyone_and_safe_for_delta_rules():
    one, two = (make_inputs(SMALL, Problem("identity", "gated-delta"), 9) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert torch.allclose(one.key.norm(dim=-1), torch.ones(2, 2, 9))
    assert (one.log_decay < 0).all() and (one.beta > 0).all() and (one.beta < 1).all()
    assert one.part(2, 5).beta.shape == (2, 2, 3)
    assert make_inputs(SMALL, Problem("identity", "kda"), 9).log_decay.shape == (2, 2, 9, 8)
    assert make_inputs(SMALL, SUM, 9).tensors.__len__() == 3


# ---------------------------------------------------------------------------------------------------------
# Peers: adapters against stand-ins with the conventions of the real packages
# ---------------------------------------------------------------------------------------------------------


def install(monkeypatch, peer, **functions):
    """A package of that name with these functions."""
    name = peer.modules[-1]
    for depth in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:depth])
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    vars(sys.modules[name]).update(functions)
    monkeypatch.setattr(peers_module.importlib.metadata, "version", lambda package: "1.2.3")


def named(name):
    return next(peer for peer in peers_module.PEERS if peer.name == name)


def recurrence(q, k, v, beta, decay):
    """(B, N, H, d): gated delta token by token, in the simplest words."""
    batch, length, heads, dim = q.shape
    state = q.new_zeros(batch, heads, dim, v.shape[-1])
    outputs = []
    for i in range(length):
        state = decay[:, i, :, None, None].exp() * state
        write = beta[:, i, :, None] * (v[:, i] - torch.einsum("bhde,bhd->bhe", state, k[:, i]))
        state = state + k[:, i, :, :, None] * write[:, :, None]
        outputs.append(torch.einsum("bhde,bhd->bhe", state, q[:, i]))
    return torch.stack(outputs, dim=1)


def test_gated_delta_adapters_follow_each_package(monkeypatch):
    chosen = dataclasses.replace(SMALL, peers=("fla-gated-delta", "transformers", "opengdn"))

    def fla(q, k, v, g, beta, chunk_size=64, scale=None):
        assert scale == 1.0
        return recurrence(q, k, v, beta, g), None

    def transformers(query, key, value, g, beta, chunk_size=64):
        return recurrence(query * query.shape[-1] ** -0.5, key, value, beta, g), None

    def gpu(*_, **__):
        raise RuntimeError("0 active drivers")

    gpu.__wrapped__ = transformers
    install(monkeypatch, named("fla-gated-delta"), naive_chunk_gated_delta_rule=fla)
    install(monkeypatch, named("transformers"), torch_chunk_gated_delta_rule=gpu)
    install(
        monkeypatch, named("opengdn"),
        gated_delta_chunkwise=lambda q, k, v, alpha, beta: (recurrence(q, k, v, beta, alpha.log()), None),
    )  # fmt: skip
    found, about = peers_module.peers(chosen)
    assert [c.name for c in found] == list(chosen.peers) and "fla-core 1.2.3" in about.values()
    for contender in found:
        for direction in ("forward", "backward"):
            verdict = gate.judge(contender, SMALL, direction, 20)
            assert verdict.error < 1e-5, (contender.name, direction, verdict)


def test_delta_adapter_wants_heads_first_and_whole_chunks(monkeypatch):
    def delta(q, k, v, beta, chunk_size=32):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        beta = beta.transpose(1, 2)
        return recurrence(q * q.shape[-1] ** -0.5, k, v, beta, torch.zeros_like(beta)).transpose(1, 2), None

    install(monkeypatch, named("fla-delta"), delta_rule_chunkwise=delta)
    (found,), _ = peers_module.peers(dataclasses.replace(SMALL, peers=("fla-delta",)))
    assert gate.judge(found, SMALL, "backward", 32).error < 1e-5
    with pytest.raises(UnsupportedError, match="multiples of 32"):
        gate.judge(found, SMALL, "forward", 20)


def test_a_performer_is_judged_by_its_own_kernel(monkeypatch):
    eps = 0.1  # an epsilon that no budget would forgive

    def softmax_kernel(data, *, projection_matrix, is_query):
        return (data @ projection_matrix.T.to(data)).exp() + eps

    class FastAttention:
        def __init__(self, dim, nb_features, causal):
            print("unable to import cuda code")
            self.projection_matrix = torch.randn(nb_features, dim) / dim

        def __call__(self, q, k, v):
            q, k = (
                softmax_kernel(x, projection_matrix=self.projection_matrix, is_query=True) for x in (q, k)
            )
            weights = (q @ k.transpose(-1, -2)).tril()
            return weights @ v / weights.sum(-1, keepdim=True)

    install(
        monkeypatch, named("performer-pytorch"), softmax_kernel=softmax_kernel, FastAttention=FastAttention
    )
    (found,), _ = peers_module.peers(dataclasses.replace(SMALL, peers=("performer-pytorch",)))
    assert gate.judge(found, SMALL, "forward", 20).error < 1e-4
    assert not gate.judge(spoiled(found, lambda o: o * 1.01), SMALL, "forward", 20).right


def test_missing_peers_are_told_and_named_ones_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opengdn", None)  # importing it raises
    monkeypatch.setattr(peers_module, "PEERS", (named("opengdn"),))
    found, about = peers_module.peers(SMALL)
    assert found == [] and "pip install opengdn" in about["opengdn"]
    with pytest.raises(InputError, match=r"opengdn is not installed .*pip install opengdn"):
        peers_module.peers(dataclasses.replace(SMALL, peers=("opengdn",)))
    with pytest.raises(InputError, match="expected names of opengdn, or none; got 'flash'"):
        peers_module.peers(dataclasses.replace(SMALL, peers=("flash",)))
    assert peers_module.peers(dataclasses.replace(SMALL, peers=())) == ([], {})


def test_a_package_that_breaks_on_import_stops_nobody(monkeypatch):
    def broken(name):
        raise RuntimeError("no driver")

    monkeypatch.setattr(peers_module, "importlib", SimpleNamespace(import_module=broken))
    found, about = peers_module.peers(SMALL)
    assert found == [] and about and all("RuntimeError: no driver" in why for why in about.values())
    peers_module.load_peers()
