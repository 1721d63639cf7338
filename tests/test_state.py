"""AttentionState as an object: what it shows, holds, copies and writes; and the examples in docstrings."""

import doctest
import errno
import importlib
import os
from pathlib import Path

import pytest
import torch

import reassoc
from reassoc import AttentionState, linear_attention, read, step, summarize
from reassoc.feature_maps import DPFP, ELU1, Exp, PositiveFeatures, TrigonometricFeatures
from reassoc.rules import Decay, Delta, GatedDelta, Sum

B, H, G, D, E = 2, 4, 2, 8, 3

# A linear map, an exponential one, and one that carries a logarithm beside signed features.
MAPS = {"elu+1": ELU1(D), "favor+": PositiveFeatures(D, 5), "trig": TrigonometricFeatures(D, 5)}
RULES = {"sum": Sum(), "decay": Decay(torch.tensor([-0.1, -1.0]))}
WINDOWS = [None, 1, 4]
KINDS = [(name, rule, window) for name in MAPS for rule in RULES for window in WINDOWS]
every_kind = pytest.mark.parametrize("name, rule, window", KINDS, ids=lambda part: str(part))


def tensors(n, *, seed=0, batch=B, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, H, n, D), (batch, G, n, D), (batch, G, n, E))
    return [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]


def carried(name="elu+1", rule="sum", window=None, n=6, **options):
    with torch.no_grad():
        return linear_attention(
            *tensors(n),
            MAPS[name],
            rule=RULES[rule],
            causal=True,
            window=window,
            return_state=True,
            **options,
        )[1]


def parts(state):
    """Every tensor of a state by name."""
    tail = {} if state.tail is None else {f"tail.{name}": part for name, part in vars(state.tail).items()}
    found = {"S": state.S, "z": state.z, "log_scale": state.log_scale, "length": state.length} | tail
    return {name: part for name, part in found.items() if part is not None}


def copied(state):
    return {name: part.clone() for name, part in parts(state).items()}


def assert_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, part in mine.items():
        assert part.dtype == theirs[name].dtype and torch.equal(part, theirs[name]), name


def advance(state, name, rule, window, *, seed=1, count=3, batch=B):
    """Step through ``count`` new tokens; the outputs."""
    q, k, v = tensors(count, seed=seed, batch=batch)
    options = {"rule": RULES[rule], "window": window}
    with torch.no_grad():
        outputs = [
            step(q[:, :, [t]], k[:, :, [t]], v[:, :, [t]], MAPS[name], state, **options) for t in range(count)
        ]
    return torch.cat(outputs, 2)


# ---------------------------------------------------------------------------------------------------------
# What it shows and holds
# ---------------------------------------------------------------------------------------------------------


def test_repr():
    assert repr(carried()) == (
        "AttentionState(S=(2, 2, 8, 3), z=(2, 2, 8), dtype=torch.float32, length=[6, 6], origin=Origin("
        "feature_map='elu+1(dim=8, feature_dim=8, heads=None)', rule='sum', "
        "normalize='attention', window=None))"
    )
    text = repr(carried("favor+", "decay", 4, normalize="none"))
    assert "z=None" in text and "rule='decay'" in text and "window=4" in text and "seed=0, draw=0" in text


@every_kind
def test_shapes(name, rule, window):
    state, r = carried(name, rule, window), MAPS[name].feature_dim
    assert state.S.shape == (B, G, r, E)
    assert state.z.shape == (B, G, r) and state.has_z
    assert (state.log_scale is None) == (name == "elu+1")
    assert state.log_scale is None or state.log_scale.shape == (B, G, r)
    assert state.length.dtype == torch.int64 and state.length.tolist() == [6, 6]
    assert (state.tail is None) == (window is None)
    if window is not None:
        assert state.tail.value.shape == (B, G, window - 1, E + 1)
        assert state.tail.mask.shape == (B, window - 1)
        assert not state.S.any()
    assert (state.origin.rule, state.origin.normalize, state.origin.window) == (rule, "attention", window)


@pytest.mark.parametrize("normalize", ["none", "sum"])
def test_no_normalizer_where_none_divides(normalize):
    state = carried(normalize=normalize)
    assert state.z is None and not state.has_z
    assert state.S.shape == (B, G, D, E)


@every_kind
def test_bytes_do_not_grow(name, rule, window):
    state = carried(name, rule, window)
    held = state.nbytes
    assert held == sum(part.numel() * part.element_size() for part in parts(state).values())
    assert held == carried(name, rule, window, n=40).nbytes
    advance(state, name, rule, window, count=1)
    stepping = state.nbytes  # with what rounding took from each number, where there is a running sum
    assert stepping <= 2 * held
    advance(state, name, rule, window, count=8)
    assert state.nbytes == stepping
    assert state.length.tolist() == [15, 15]


@every_kind
def test_zeros_is_what_a_call_without_tokens_returns(name, rule, window):
    fresh = AttentionState.zeros(MAPS[name], B, G, E, rule=RULES[rule], window=window)
    assert_equal(parts(fresh), parts(carried(name, rule, window, n=0)))
    assert fresh.origin == carried(name, rule, window, n=0).origin
    # And continues like one.
    whole = linear_attention(*tensors(3, seed=1), MAPS[name], rule=RULES[rule], causal=True, window=window)
    # float32, some sums in another order.
    assert torch.allclose(advance(fresh, name, rule, window), whole, rtol=1e-4, atol=1e-5)


def test_zeros_takes_dtype_and_device():
    state = AttentionState.zeros(DPFP(D, 1), 3, G, E, dtype=torch.float64, device="cpu")
    assert state.S.dtype == torch.float64 and state.S.shape == (3, G, 2 * D, E)
    assert state.length.tolist() == [0, 0, 0]


def test_length_counts_real_keys():
    mask = torch.tensor([[True, False, True, True], [False, False, False, True]])
    q, k, v = tensors(4)
    state = linear_attention(q, k, v, causal=True, key_mask=mask, return_state=True)[1]
    assert state.length.tolist() == [3, 1]
    assert summarize(k, v, "elu+1", key_mask=mask).length.tolist() == [3, 1]
    one = [t[:, :, :1] for t in (q, k, v)]
    step(*one, "elu+1", state, key_mask=torch.tensor([[False], [True]]))
    assert state.length.tolist() == [3, 2]
    step(*one, "elu+1", state)
    assert state.length.tolist() == [4, 3]
    packed = [t.transpose(0, 1).flatten(1, 2)[None] for t in (q, k, v)]
    options = {"causal": True, "key_mask": mask.flatten()[None], "return_state": True}
    bounds = torch.tensor([0, 4, 4, 8])
    state = linear_attention(*packed, cu_seqlens=bounds, **options)[1]
    assert state.length.tolist() == [3, 0, 1]
    state = linear_attention(*packed, cu_seqlens=bounds, state=state, **options)[1]
    assert state.length.tolist() == [6, 0, 2]


# ---------------------------------------------------------------------------------------------------------
# Copies
# ---------------------------------------------------------------------------------------------------------


@every_kind
def test_reorder_duplicates_and_drops(name, rule, window):
    state = carried(name, rule, window)
    kept = copied(state)
    index = torch.tensor([1, 1, 0, 1])
    beams = state.reorder(index)
    assert_equal(parts(beams), {part: t[index] for part, t in kept.items()})
    assert_equal(parts(state.reorder(torch.tensor([1]))), {part: t[1:] for part, t in kept.items()})
    assert parts(state.reorder(torch.tensor([], dtype=torch.int64)))["S"].shape[0] == 0
    # Duplicates go separate ways, and the original stays.
    advance(beams, name, rule, window, batch=4)
    assert_equal(parts(state), kept)
    assert not torch.equal(parts(beams)["length"], kept["length"][index])
    held = "S" if window is None else "length" if window == 1 else "tail.value"
    assert not torch.equal(parts(beams)[held][0], kept[held][1])


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_state_is_the_same_bit_for_bit(name, rule, window, dtype, tmp_path):
    state = carried(name, rule, window).to(dtype)
    state.save(tmp_path / "state.safetensors")
    loaded = AttentionState.load(tmp_path / "state.safetensors")
    assert_equal(parts(loaded), parts(state))
    assert loaded.origin == state.origin and repr(loaded) == repr(state)
    # Steps write into what they own: neither the file nor the other state may notice.
    first = advance(loaded, name, rule, window)
    assert torch.equal(first, advance(state, name, rule, window))
    again = AttentionState.load(str(tmp_path / "state.safetensors"))
    assert torch.equal(first, advance(again, name, rule, window))


def test_a_save_that_fails_keeps_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    state = carried()
    state.save(path)
    before = path.read_bytes()
    advance(state, "elu+1", "sum", None)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            state.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        state.save(tmp_path / "missing" / "state.safetensors")
    state.save(path)
    assert_equal(parts(AttentionState.load(path)), parts(state))


def test_save_cuts_the_graph_and_takes_expanded_tensors(tmp_path):
    q, k, v = tensors(4)
    state = linear_attention(q, k.requires_grad_(), v, causal=True, return_state=True)[1]
    wide = state.reorder(torch.tensor([0])).reorder(torch.tensor([0, 0]))
    wide.save(tmp_path / "state")
    loaded = AttentionState.load(tmp_path / "state")
    assert not loaded.S.requires_grad and torch.equal(loaded.S, wide.S)


@every_kind
def test_to_float64(name, rule, window):
    state = carried(name, rule, window)
    kept = copied(state)
    wide = state.to(torch.float64)
    for part, t in parts(wide).items():
        assert t.dtype == (torch.float64 if kept[part].is_floating_point() else kept[part].dtype), part
    # Widening is exact, so the way back is too.
    assert_equal(parts(wide.to(torch.float32)), kept)
    assert_equal(parts(state.to("cpu")), kept)
    advance(state.to("cpu"), name, rule, window)
    assert_equal(parts(state), kept)
    # float64 tokens continue a widened state in float64, as the whole in float64 but for the first part.
    q, k, v = tensors(3, seed=1, dtype=torch.float64)
    options = {"rule": RULES[rule], "causal": True, "window": window}
    output, after = linear_attention(q, k, v, MAPS[name], state=wide, return_state=True, **options)
    assert output.dtype == after.S.dtype == torch.float64
    narrow = linear_attention(q.float(), k.float(), v.float(), MAPS[name], state=state, **options)
    assert torch.allclose(output.float(), narrow, rtol=1e-4, atol=1e-5)  # float32 sums of a few tokens


def test_detach_cuts_the_gradient():
    q, k, v = (t.requires_grad_() for t in tensors(4))
    state = linear_attention(q, k, v, causal=True, return_state=True)[1]
    assert state.S.requires_grad and state.z.requires_grad
    cut = state.detach()
    assert not cut.S.requires_grad and not cut.z.requires_grad and torch.equal(cut.S, state.S)
    later = [t.requires_grad_() for t in tensors(2, seed=1)]
    linear_attention(*later, causal=True, state=cut).sum().backward()
    assert k.grad is None and later[1].grad.any()
    linear_attention(*later, causal=True, state=state).sum().backward()
    assert k.grad.any()


@every_kind
def test_clone_is_a_snapshot_and_the_given_state_stays(name, rule, window):
    state = carried(name, rule, window)
    advance(state, name, rule, window, seed=2)  # from here on steps write in place
    before = state.clone()
    kept = copied(state)
    outputs = advance(state, name, rule, window)
    assert_equal(parts(before), kept)
    options = {"rule": RULES[rule], "causal": True, "window": window, "state": before}
    with torch.no_grad():
        whole = linear_attention(*tensors(3, seed=1), MAPS[name], return_state=True, **options)[0]
    assert torch.allclose(whole, outputs, rtol=1e-4, atol=1e-5)  # float32, another order of sums
    assert_equal(parts(before), kept)
    assert torch.equal(advance(before, name, rule, window), outputs)
    assert_equal(parts(before), parts(state))


def test_read_and_summaries_leave_the_state():
    state = carried()
    advance(state, "elu+1", "sum", None)
    kept = copied(state)
    read(tensors(3)[0], "elu+1", state)
    state.apply(summarize(*tensors(3)[1:], "elu+1"))
    state.merge(state)
    assert_equal(parts(state), kept)


# ---------------------------------------------------------------------------------------------------------
# Steps in place
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_steps_write_in_place_once_the_state_is_theirs(rule):
    state = carried("elu+1", rule)
    kept = state.S
    old = kept.clone()
    advance(state, "elu+1", rule, None, count=1)
    assert torch.equal(kept, old)  # the state a call returned may have other holders
    place = state.S.data_ptr()
    advance(state, "elu+1", rule, None, count=5)
    assert state.S.data_ptr() == place
    copy = state.clone()
    advance(copy, "elu+1", rule, None, count=1)
    assert copy.S.data_ptr() != place
    shared = state.detach()  # the same memory: whoever steps first moves away
    kept = copied(shared)
    advance(state, "elu+1", rule, None, count=2)
    assert_equal(parts(shared), kept)


@pytest.mark.parametrize("name", MAPS)
def test_a_call_without_tokens_shares_nothing_with_a_stepped_state(name):
    state = carried(name)
    advance(state, name, "sum", None, count=1)
    with torch.no_grad():
        after = linear_attention(*tensors(0), MAPS[name], causal=True, state=state, return_state=True)[1]
    kept = copied(after)
    advance(state, name, "sum", None, count=2)
    assert_equal(parts(after), kept)


def test_steps_with_raise_or_gradients_do_not_write_in_place():
    state = carried()
    advance(state, "elu+1", "sum", None, count=1)
    one = tensors(1, seed=3)
    place = state.S.data_ptr()
    step(*one, "elu+1", state, undefined="raise")
    assert state.S.data_ptr() != place
    place, held = state.S.data_ptr(), state.S
    old = held.clone()
    step(one[0], one[1].clone().requires_grad_(), one[2], "elu+1", state)
    assert state.S.data_ptr() != place and torch.equal(held, old)
    assert state.S.requires_grad


@pytest.mark.parametrize("window", [None, 4])  # a window of 1 gives the value itself: no gradient to compare
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("only", [(0, 1, 2), (1,), (2,)], ids=["all", "key", "value"])
def test_gradients_through_steps_equal_those_of_the_whole(name, rule, window, only):
    options = {"rule": RULES[rule], "window": window}
    found = []
    for stepped in (True, False):
        inputs = tensors(5, dtype=torch.float64)
        leaves = [inputs[i].requires_grad_() for i in only]
        if stepped:
            state = AttentionState.zeros(MAPS[name], B, G, E, dtype=torch.float64, **options)
            rows = []
            for t in range(5):
                rows.append(step(*(x[:, :, t : t + 1] for x in inputs), MAPS[name], state, **options))
            output = torch.cat(rows, 2)
        else:
            output = linear_attention(*inputs, MAPS[name], causal=True, **options)
        weight = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        found.append([output.detach(), *torch.autograd.grad((output * weight).sum(), leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert mine.abs().max() > 1e-3
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-11)  # float64


def test_steps_after_gradients_write_in_place_again():
    state = carried()
    q, k, v = tensors(1)
    step(q, k.clone().requires_grad_(), v, "elu+1", state)
    state = state.detach()
    advance(state, "elu+1", "sum", None, count=1)
    place = state.S.data_ptr()
    advance(state, "elu+1", "sum", None, count=1)
    assert state.S.data_ptr() == place


def test_exponential_states_do_not_share_memory_with_their_snapshots():
    phi, one = Exp(D), tensors(1)
    state = AttentionState.zeros(phi, B, G, E)
    with torch.no_grad():
        step(*one, phi, state)
        before, kept = state.clone(), copied(state)
        step(one[0], one[1] + 50, one[2], phi, state)  # moves every running maximum
    assert_equal(parts(before), kept)
    assert (state.log_scale > before.log_scale + 40).all()


# ---------------------------------------------------------------------------------------------------------
# Examples in docstrings
# ---------------------------------------------------------------------------------------------------------

ROOT = Path(reassoc.__file__).parent


def with_examples():
    for path in sorted(ROOT.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            name = ".".join(("reassoc", *path.relative_to(ROOT).with_suffix("").parts))
            yield name.removesuffix(".__init__")


EXAMPLES = tuple(with_examples())


def test_examples_are_found():
    expected = {
        "reassoc._attention", "reassoc._citation", "reassoc.feature_maps", "reassoc.feature_maps.calibration",
        "reassoc.kernels",
    }  # fmt: skip
    assert expected <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    module = importlib.import_module(name)
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("normalize", ["sum", "attention", "none"])
@pytest.mark.parametrize("name", MAPS)
def test_the_state_of_a_delta_rule_is_at_true_scale(name, normalize, tmp_path):
    """No scale beside it, even of an exponential map; otherwise a state like any other."""
    q, k, v = tensors(6)
    rule = GatedDelta(torch.full((B, G, 6), 0.1), torch.tensor([-0.1, -1.0]))
    options = {"rule": rule, "normalize": normalize, "causal": True, "return_state": True}
    with torch.no_grad():
        want, state = linear_attention(q, k, v, MAPS[name], **options)
        fresh = AttentionState.zeros(MAPS[name], B, G, E, rule=rule, normalize=normalize)
        assert fresh.log_scale is None and state.log_scale is None
        assert parts(fresh).keys() == parts(state).keys()
        got, after = linear_attention(q, k, v, MAPS[name], state=fresh, **options)
        assert torch.equal(got, want)
        assert_equal(parts(after), parts(state))
        state.save(tmp_path / "state")
        assert_equal(parts(AttentionState.load(tmp_path / "state")), parts(state))
        picked = state.reorder(torch.tensor([1]))
        assert torch.equal(picked.S, state.S[1:])
        moved = state.to(torch.float64)
        assert torch.equal(moved.S, state.S.double())


def test_a_summary_of_a_delta_rule_holds_the_matrix_that_acts_on_s():
    """M S + B by hand, with z acted on by the decay alone."""
    _, k, v = tensors(6, dtype=torch.float64)
    beta, gate = torch.full((B, G, 6), 0.1).double(), torch.tensor([-0.1, -1.0]).double()
    for normalize in ("sum", "sum+attention"):
        options = {"normalize": normalize}
        run = summarize(k, v, "elu+1", GatedDelta(beta, gate), **options)
        assert run.transition.shape == (B, G, D, D)
        whole, half = (
            summarize(k[:, :, :n], v[:, :, :n], "elu+1", Delta(beta[..., :n]), **options) for n in (6, 3)
        )
        rest = summarize(k[:, :, 3:], v[:, :, 3:], "elu+1", Delta(beta[..., 3:]), **options)
        assert whole.log_decay is None
        torch.testing.assert_close(rest.transition @ half.transition, whole.transition)
        start = AttentionState.zeros(
            MAPS["elu+1"], B, G, E, rule=GatedDelta(beta, gate), dtype=torch.float64, **options
        )
        once = start.apply(run)
        twice = once.apply(run)
        torch.testing.assert_close(twice.S, run.transition @ once.S + once.S)
        if twice.z is not None:
            torch.testing.assert_close(twice.z, run.log_decay.exp() * once.z + once.z)
