"""Every refusal names the argument, says what was expected and what came, and changes nothing."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from reassoc import (
    AttentionState,
    attention_matrix,
    backends,
    citation,
    compose,
    feature_maps,
    hybrid_attention,
    hybrid_step,
    linear_attention,
    read,
    step,
    summarize,
)
from reassoc.feature_maps import ELU1, LearnedReLU, PositiveFeatures
from reassoc.rules import Decay, Delta, GatedDelta, Sum

B, H, G, N, D, E = 2, 4, 2, 5, 8, 3


def tensors(n=N, m=None, *, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    m = n if m is None else m
    sizes = ((B, H, n, D), (B, G, m, D), (B, G, m, E))
    return [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]


def carried(feature_map="elu+1", n=N, **options):
    options.setdefault("causal", True)
    return linear_attention(*tensors(n), feature_map, return_state=True, **options)[1]


def snapshot(state):
    """Every number of a state, copied."""
    parts = [state._memory, state._scale, state._length]
    parts += [] if state.tail is None else list(vars(state.tail).values())
    return [None if part is None else part.clone() for part in parts]


def equal(mine, theirs):
    pairs = list(zip(mine, theirs, strict=True))
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


# ---------------------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------------------

INPUTS = {
    "query rank": (lambda q, k, v: (q[0], k, v), ValueError, r"query .* \(B, H, N, d\), got \(4, 5, 8\)"),
    "query type": (lambda q, k, v: (q.tolist(), k, v), TypeError, "query must be a tensor, got list"),
    "query int": (
        lambda q, k, v: (q.long(), k, v),
        TypeError,
        "query must be floating point, got torch.int64",
    ),
    "query bool": (lambda q, k, v: (q > 0, k, v), TypeError, "query must be floating point, got torch.bool"),
    "query complex": (
        lambda q, k, v: (q + 0j, k, v),
        TypeError,
        "query .* floating point, got torch.complex64",
    ),
    "key rank": (
        lambda q, k, v: (q, k[None], v),
        ValueError,
        r"key .* \(2, G, M, 8\), got \(1, 2, 2, 5, 8\)",
    ),
    "key batch": (lambda q, k, v: (q, k[:1], v), ValueError, r"key .* \(2, G, M, 8\), got \(1, 2, 5, 8\)"),
    "key size": (
        lambda q, k, v: (q, k[..., :7], v),
        ValueError,
        r"key .* \(2, G, M, 8\), got \(2, 2, 5, 7\)",
    ),
    "key int": (lambda q, k, v: (q, k.int(), v), TypeError, "key must be floating point, got torch.int32"),
    "key dtype": (
        lambda q, k, v: (q, k.double(), v),
        TypeError,
        r"key .* \(torch.float32, cpu\), got .*float64",
    ),
    "value rank": (
        lambda q, k, v: (q, k, v[..., 0]),
        ValueError,
        r"value .* \(2, 2, 5, e\), got \(2, 2, 5\)",
    ),
    "value length": (
        lambda q, k, v: (q, k, v[:, :, :4]),
        ValueError,
        r"value .* \(2, 2, 5, e\), got \(2, 2, 4, 3\)",
    ),
    "value heads": (
        lambda q, k, v: (q, k, v[:, :1]),
        ValueError,
        r"value .* \(2, 2, 5, e\), got \(2, 1, 5, 3\)",
    ),
    "value dtype": (
        lambda q, k, v: (q, k, v.half()),
        TypeError,
        r"value .* \(torch.float32, cpu\), got .*float16",
    ),
    "value type": (lambda q, k, v: (q, k, None), TypeError, "value must be a tensor, got NoneType"),
    "3 heads of 2": (
        lambda q, k, v: (q[:, :3], k, v),
        ValueError,
        "query heads must be a multiple of key heads, got 3 and 2",
    ),
    "1 head of 2": (lambda q, k, v: (q[:, :1], k, v), ValueError, "multiple of key heads, got 1 and 2"),
    "no key heads": (
        lambda q, k, v: (q, k[:, :0], v[:, :0]),
        ValueError,
        "multiple of key heads, got 4 and 0",
    ),
}


@pytest.mark.parametrize("change, error, match", INPUTS.values(), ids=INPUTS)
def test_inputs(change, error, match):
    with pytest.raises(error, match=match):
        linear_attention(*change(*tensors()))


@pytest.mark.parametrize("name", [n for n in INPUTS if "value" not in n])
def test_inputs_of_attention_matrix(name):
    change, error, match = INPUTS[name]
    q, k, _ = change(*tensors())
    with pytest.raises(error, match=match):
        attention_matrix(q, k)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda k, v: (k[0], v), r"key must have shape \(B, G, M, d\), got \(2, 5, 8\)"),
        (lambda k, v: (k, v[:, :, :4]), r"value must have shape \(2, 2, 5, e\), got \(2, 2, 4, 3\)"),
        (lambda k, v: (k.long(), v), "key must be floating point, got torch.int64"),
        (lambda k, v: (k, v.double()), "value must have the .* dtype and device .*float32.* got .*float64"),
        (lambda k, v: (k[:, :0], v[:, :0]), "multiple of key heads, got 0 and 0"),
    ],
    ids=["key rank", "value length", "int", "mixed", "no heads"],
)
def test_inputs_of_summarize(change, match):
    with pytest.raises((TypeError, ValueError), match=match):
        summarize(*change(*tensors()[1:]), "elu+1")


# ---------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------

MASK = torch.ones(B, N, dtype=torch.bool)
BETA = torch.full((B, G, N), 0.5)
NORMALIZE = "normalize must be one of .*attention.*sum.*sum.attention.*none.*, got"
OPTIONS = {
    "window 0": ({"causal": True, "window": 0}, ValueError, "window must be a positive number .*, got 0"),
    "window -3": ({"causal": True, "window": -3}, ValueError, "window must be a positive number .*, got -3"),
    "window bool": ({"causal": True, "window": True}, ValueError, "window must be .*, got True"),
    "window 2.0": ({"causal": True, "window": 2.0}, ValueError, "window must be .*, got 2.0"),
    "window": ({"window": 2}, ValueError, "window needs causal=True"),
    "eps none": ({"eps": 1e-6, "normalize": "none"}, ValueError, "eps .*normalize='none' has none"),
    "eps sum": ({"eps": 1e-6, "normalize": "sum"}, ValueError, "eps .*normalize='sum' has none"),
    "eps inf": ({"eps": float("inf")}, ValueError, "eps must be finite, got inf"),
    "eps nan": ({"eps": float("nan")}, ValueError, "eps must be finite, got nan"),
    "normalize": ({"normalize": "softmax"}, ValueError, f"{NORMALIZE} 'softmax'"),
    "normalize False": ({"normalize": False}, ValueError, f"{NORMALIZE} False"),
    "undefined": (
        {"undefined": "error"},
        ValueError,
        "undefined must be one of .*nan.*zero.*raise.*, got 'error'",
    ),
    "undefined 0": ({"undefined": 0}, ValueError, "undefined must be one of .*nan.*zero.*raise.*, got 0"),
    "backend": (
        {"backend": "cuda"},
        ValueError,
        "backend must be one of 'auto', 'reference', 'torch', 'native'; got 'cuda'",
    ),
    "rule name": (
        {"rule": "decay"},
        TypeError,
        r"rule must be rules.Sum\(\), .* or rules.GatedDelta\(.*\), got 'decay'",
    ),
    "rule class": ({"rule": Sum}, TypeError, r"rule must be rules.Sum\(\), .*, got <class"),
    "mask dtype": (
        {"key_mask": MASK.float()},
        TypeError,
        r"key_mask must be a bool .* torch.float32; use mask.bool",
    ),
    "mask list": ({"key_mask": MASK.tolist()}, TypeError, "key_mask must be a bool tensor.* got list"),
    "mask rank": (
        {"key_mask": MASK[0]},
        ValueError,
        r"key_mask must have shape \(B, M\) = \(2, 5\), got \(5,\)",
    ),
    "mask size": ({"key_mask": MASK[:, :4]}, ValueError, r"key_mask .* \(2, 5\), got \(2, 4\)$"),
    "mask pairs": (
        {"key_mask": torch.ones(B, 1, N, N, dtype=torch.bool)},
        ValueError,
        r"key_mask .* got \(2, 1, 5, 5\); a mask over pairs of positions .* no summary .*key_mask=",
    ),
    "gate of 3 heads": (
        {"rule": Decay(-torch.ones(3))},
        ValueError,
        r"log_decay must have shape \(G,\) = \(2,\),.* got \(3,\)",
    ),
    "gate of 4 tokens": (
        {"rule": Decay(-torch.ones(B, G, 4))},
        ValueError,
        r"log_decay .*\(B, G, M\) = \(2, 2, 5\).* got \(2, 2, 4\)",
    ),
    "gate of 7 features": (
        {"rule": Decay(-torch.ones(B, G, N, 7))},
        ValueError,
        r"log_decay .*\(B, G, M, r\) = \(2, 2, 5, 8\), got \(2, 2, 5, 7\)",
    ),
    "beta of 4 tokens": (
        {"rule": Delta(BETA[..., :4]), "normalize": "sum", "causal": True},
        ValueError,
        r"beta must have shape \(B, G, M\) = \(2, 2, 5\), got \(2, 2, 4\)",
    ),
    "beta of query heads": (
        {"rule": Delta(BETA.repeat_interleave(2, 1)), "normalize": "sum", "causal": True},
        ValueError,
        r"beta must have shape .* got \(2, 4, 5\)",
    ),
    "delta gate of 7 features": (
        {"rule": GatedDelta(BETA, -torch.ones(B, G, N, 7)), "normalize": "sum", "causal": True},
        ValueError,
        r"log_decay .*\(B, G, M, r\) = \(2, 2, 5, 8\), got \(2, 2, 5, 7\)",
    ),
    "delta not causal": (
        {"rule": Delta(BETA), "normalize": "sum"},
        ValueError,
        r"rule Delta needs causal=True: .*read\(query, feature_map, state\)",
    ),
    "delta window": (
        {"rule": GatedDelta(BETA, -BETA), "normalize": "sum", "causal": True, "window": 3},
        ValueError,
        r"window cannot be used with rule GatedDelta: .*Use rules.GatedDelta\(beta, log_decay\) to forget",
    ),
    "delta unnamed": (
        {"rule": Delta(BETA), "causal": True},
        ValueError,
        "normalize must be named for rule Delta: 'sum' .* 'none' .*'attention' shrinks outputs",
    ),
    "gate of query heads": (
        {"rule": Decay(-torch.ones(B, H, N))},
        ValueError,
        r"log_decay .* got \(2, 4, 5\)",
    ),
}


@pytest.mark.parametrize("options, error, match", OPTIONS.values(), ids=OPTIONS)
def test_options(options, error, match):
    with pytest.raises(error, match=match):
        linear_attention(*tensors(), **options)


@pytest.mark.parametrize("name", [n for n in OPTIONS if n != "backend"])
def test_options_of_attention_matrix(name):
    options, error, match = OPTIONS[name]
    with pytest.raises(error, match=match):
        attention_matrix(*tensors()[:2], **options)


@pytest.mark.parametrize(
    "name",
    [n for n in OPTIONS if n.startswith(("rule", "mask", "gate", "norm", "back", "nat", "beta", "delta u"))],
)
def test_options_of_summarize(name):
    options, error, match = OPTIONS[name]
    options = {option: value for option, value in options.items() if option != "causal"}
    with pytest.raises(error, match=match):
        summarize(*tensors()[1:], "elu+1", **options)


@pytest.mark.parametrize("name", [n for n in OPTIONS if n.startswith(("eps", "norm", "undefined"))])
def test_options_of_read(name):
    options, error, match = OPTIONS[name]
    state = carried(normalize=options.get("normalize") if name.startswith("eps") else None)
    with pytest.raises(error, match=match):
        read(tensors()[0], "elu+1", state, **options)


@pytest.mark.parametrize("call", [linear_attention, lambda q, k, v, **o: attention_matrix(q, k, **o)])
def test_causal_needs_as_many_queries_as_keys(call):
    with pytest.raises(ValueError, match=r"causal.* needs .*N=?.*5.* and .*3|causal needs N == M .*5, 3"):
        call(*tensors(5, 3), causal=True)


@pytest.mark.parametrize("eps", ["small", None, torch.ones(2)], ids=["text", "None", "tensor"])
def test_eps_that_is_no_number_is_named(eps):
    with pytest.raises((TypeError, ValueError), match="eps"):
        linear_attention(*tensors(), eps=eps)


CU = {
    "list": ([0, 5], TypeError, "cu_seqlens must be an int32 or int64 tensor, got list"),
    "float": (torch.tensor([0.0, 5.0]), TypeError, "cu_seqlens must be an int32 .* got torch.float32"),
    "bool": (torch.tensor([False, True]), TypeError, "cu_seqlens must be an int32 .* got torch.bool"),
    "rank": (torch.tensor([[0, 5]]), ValueError, r"cu_seqlens must have shape \(n \+ 1,\), got \(1, 2\)"),
    "empty": (torch.tensor([], dtype=torch.int64), ValueError, r"cu_seqlens must have shape .*, got \(0,\)"),
    "start": (torch.tensor([1, 5]), ValueError, "cu_seqlens must start with 0, got 1"),
    "end": (torch.tensor([0, 4]), ValueError, "cu_seqlens must end with .* 5, got 4"),
    "beyond": (torch.tensor([0, 6]), ValueError, "cu_seqlens must end with .* 5, got 6"),
    "decreasing": (
        torch.tensor([0, 4, 2, 5]),
        ValueError,
        "cu_seqlens must not decrease, got 4 then 2 at index 2",
    ),
}


@pytest.mark.parametrize("bounds, error, match", CU.values(), ids=CU)
def test_cu_seqlens(bounds, error, match):
    q, k, v = (t[:1] for t in tensors())
    with pytest.raises(error, match=match):
        linear_attention(q, k, v, causal=True, cu_seqlens=bounds)


def test_cu_seqlens_needs_one_row_and_equal_lengths():
    bounds = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match=r"cu_seqlens needs B == 1 .*, got B=2, N=5, M=5"):
        linear_attention(*tensors(), cu_seqlens=bounds)
    q, k, v = (t[:1] for t in tensors(5, 3))
    with pytest.raises(ValueError, match=r"cu_seqlens needs .*, got B=1, N=5, M=3"):
        linear_attention(q, k, v, cu_seqlens=bounds)


def test_a_packed_state_has_one_row_for_each_sequence():
    q, k, v = (t[:1] for t in tensors())
    state = linear_attention(q, k, v, causal=True, return_state=True)[1]
    with pytest.raises(
        ValueError, match=r"state was made for .*\(1, 2, 8, 4\), this call has \(2, .*sequences"
    ):
        linear_attention(q, k, v, causal=True, cu_seqlens=torch.tensor([0, 2, 5]), state=state)


@pytest.mark.parametrize(
    "gate, error, match",
    [
        (
            torch.tensor([0.0, 0.25, 0.5]),
            ValueError,
            "log_decay must be <= 0 .* got an entry of 0.5; .*logsigmoid",
        ),
        (
            torch.tensor([1, 2]),
            TypeError,
            "log_decay must be a floating point tensor, got torch.int64 tensor",
        ),
        (-0.5, TypeError, "log_decay must be a floating point tensor, got float"),
        (torch.tensor(-0.5), ValueError, r"log_decay must have shape \(G,\), .*, got \(\)"),
        (-torch.ones(2, 5), ValueError, r"log_decay must have shape .*\(B, G, M\).*, got \(2, 5\)"),
        (-torch.ones(1, 1, 1, 1, 1), ValueError, r"log_decay must have shape .*, got \(1, 1, 1, 1, 1\)"),
    ],
    ids=["positive", "int", "float", "rank 0", "rank 2", "rank 5"],
)
def test_log_decay(gate, error, match):
    with pytest.raises(error, match=match):
        Decay(gate)


@pytest.mark.parametrize(
    "beta, error, match",
    [
        (
            torch.ones(B, G, N, dtype=torch.int64),
            TypeError,
            "beta must be a floating point tensor, got torch.int",
        ),
        (0.5, TypeError, "beta must be a floating point tensor, got float"),
        (torch.ones(G), ValueError, r"beta must have shape \(B, G, M\), got \(2,\)"),
    ],
    ids=["int", "float", "rank 1"],
)
def test_beta(beta, error, match):
    for make in (Delta, lambda b: GatedDelta(b, -torch.ones(G))):
        with pytest.raises(error, match=match):
            make(beta)


def test_the_gates_of_a_gated_delta_are_those_of_a_decay():
    with pytest.raises(ValueError, match=r"log_decay must be <= 0 .* got an entry of 0\.5"):
        GatedDelta(BETA, torch.tensor([0.0, 0.5]))
    with pytest.raises(TypeError, match="log_decay must be a floating point tensor, got NoneType"):
        GatedDelta(BETA, None)


# ---------------------------------------------------------------------------------------------------------
# Feature maps
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["trig", "favor+", "favor++", "generalized-relu", "landmark", "hedgehog", "t2r"]
)
def test_random_and_learned_maps_are_not_named(name):
    match = rf"feature map '{name}' is random, fitted or learned .*make\('{name}', dim=8\)".replace(
        "+", r"\+"
    )
    with pytest.raises(ValueError, match=match):
        linear_attention(*tensors(), name)


@pytest.mark.parametrize("name", ["elu", "", "dpfp", "dpfp-0", "dpfp--1", "dpfp-x", "ELU+1"])
def test_unknown_maps_list_the_known_ones(name):
    with pytest.raises(ValueError) as caught:
        linear_attention(*tensors(), name)
    assert repr(name) in str(caught.value)
    for known in feature_maps.names():
        assert known in str(caught.value)


@pytest.mark.parametrize(
    "thing", [None, torch.relu, ELU1, torch.nn.ReLU()], ids=["None", "function", "class", "module"]
)
def test_other_things_are_no_maps(thing):
    with pytest.raises(
        TypeError, match=r"feature_map must be a name or a .*FeatureMap, got .*; derive a class"
    ):
        linear_attention(*tensors(), thing)


CALLS = {
    "linear_attention": lambda phi: linear_attention(*tensors(), phi),
    "attention_matrix": lambda phi: attention_matrix(*tensors()[:2], phi),
    "summarize": lambda phi: summarize(*tensors()[1:], phi),
    "step": lambda phi: step(*tensors(1), phi, carried()),
    "read": lambda phi: read(tensors()[0], phi, carried()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_maps_of_another_size(call):
    with pytest.raises(ValueError, match="feature_map has dim=6, queries and keys have size 8"):
        call(ELU1(6))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_maps_of_other_heads(call):
    with pytest.raises(ValueError, match="feature_map has heads=4, the keys have 2 heads"):
        call(LearnedReLU(D, heads=4))


def test_names_to_map_but_not_dimensions_that_cannot_be():
    with pytest.raises(ValueError, match=r"nu must be an integer from 1 to 2 . dim - 1 = 15, got 16"):
        linear_attention(*tensors(), "dpfp-16")


# ---------------------------------------------------------------------------------------------------------
# States
# ---------------------------------------------------------------------------------------------------------


def positive(*, seed=0, calibrated=False, draws=0):
    phi = PositiveFeatures(D, 4, seed=seed)
    for _ in range(draws):
        phi.redraw_()
    return phi.calibrate_(*tensors()[:2]) if calibrated else phi


GATE = Decay(-torch.ones(G))
OTHERS = {
    "map": ("elu+1", {}, "relu", {}, r"feature_map='elu\+1\(.*', this call has 'relu\("),
    "size of map": ("dpfp-1", {}, "dpfp-2", {}, "feature_map='dpfp.*, this call has 'dpfp"),
    "seed": (positive(), {}, positive(seed=1), {}, "feature_map=.*seed=0, draw=0.* has .*seed=1, draw=0"),
    "draw": (positive(), {}, positive(draws=1), {}, "feature_map=.*seed=0, draw=0.* has .*seed=0, draw=1"),
    "calibration": (
        positive(calibrated=True),
        {},
        positive(),
        {},
        "feature_map=.*calibration=.* this call has",
    ),
    "rule": ("elu+1", {}, "elu+1", {"rule": GATE}, "rule='sum', this call has 'decay'"),
    "other rule": ("elu+1", {"rule": GATE}, "elu+1", {"rule": Sum()}, "rule='decay', this call has 'sum'"),
    "normalize": ("elu+1", {}, "elu+1", {"normalize": "none"}, "normalize='attention', this call has 'none'"),
    "normalize too": (
        "elu+1",
        {},
        "elu+1",
        {"normalize": "sum+attention"},
        r"normalize='attention', this call has 'sum\+attention'",
    ),
    "delta": (
        "elu+1",
        {"rule": Delta(BETA), "normalize": "sum"},
        "elu+1",
        {"normalize": "sum"},
        "rule='delta', this call has 'sum'",
    ),
    "window": ("elu+1", {"window": 3}, "elu+1", {"window": 4}, "window=3, this call has 4"),
    "no window": ("elu+1", {"window": 3}, "elu+1", {}, "window=3, this call has None"),
    "a window": ("elu+1", {}, "elu+1", {"window": 3}, "window=None, this call has 3"),
}


@pytest.mark.parametrize("mine, made, yours, used, match", OTHERS.values(), ids=OTHERS)
def test_states_of_another_origin(mine, made, yours, used, match):
    state = carried(mine, **made)
    kept = snapshot(state)
    with pytest.raises(ValueError, match=f"state: the state was made with {match}.*start from a new state"):
        linear_attention(*tensors(), yours, causal=True, state=state, **used)
    with pytest.raises(ValueError, match=match):
        step(*tensors(1), yours, state, **used)
    if not {"window", "rule"} & {*made, *used}:  # a read has neither
        with pytest.raises(ValueError, match=match):
            read(tensors()[0], yours, state, **used)
    assert equal(snapshot(state), kept)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[:1], k[:1], v[:1]),
        lambda q, k, v: (q, k[:, :1], v[:, :1]),
        lambda q, k, v: (q, k, v[..., :2]),
    ],
    ids=["batch", "heads", "value size"],
)
def test_states_of_another_shape(change):
    state = carried()
    kept = snapshot(state)
    match = r"state was made for .* = \(2, 2, 8, 4\), this call has \(\d, \d, 8, \d\)"
    with pytest.raises(ValueError, match=match):
        linear_attention(*change(*tensors()), causal=True, state=state)
    with pytest.raises(ValueError, match=match):
        step(*change(*tensors(1)), "elu+1", state)
    assert equal(snapshot(state), kept)


@pytest.mark.parametrize("thing", [torch.zeros(B, G, D, E), None, (1, 2)], ids=["tensor", "None", "tuple"])
def test_other_things_are_no_states(thing):
    match = f"state must be an AttentionState, got {type(thing).__name__}"
    if thing is not None:
        with pytest.raises(TypeError, match=match):
            linear_attention(*tensors(), state=thing)
    with pytest.raises(TypeError, match=match):
        step(*tensors(1), "elu+1", thing)
    with pytest.raises(TypeError, match=match):
        read(tensors()[0], "elu+1", thing)


def test_read_refuses_a_windowed_state():
    with pytest.raises(ValueError, match=r"read: the state has window=3; .*step and linear_attention"):
        read(tensors()[0], "elu+1", carried(window=3))


def test_merge_is_for_sums_without_a_window():
    delta = {"rule": GatedDelta(BETA, -BETA), "normalize": "sum"}
    for options, match in (
        ({"rule": GATE}, "rule='decay'"),
        (delta, "rule='gated delta'"),
        ({"window": 3}, "window=3"),
    ):
        state = carried(**options)
        with pytest.raises(ValueError, match=f"merge needs the rule Sum and no window, .*{match}.*apply"):
            state.merge(state.clone())
    with pytest.raises(ValueError, match="merge: the state was made with feature_map="):
        carried("relu").merge(carried())


@pytest.mark.parametrize(
    "phi, options, match",
    [
        ("relu", {}, "feature_map="),
        ("elu+1", {"rule": GATE}, "rule='sum'.* 'decay'"),
        ("elu+1", {"normalize": "none"}, "normalize="),
    ],
    ids=["map", "rule", "normalize"],
)
def test_apply_and_compose_want_one_origin(phi, options, match):
    mine, theirs = summarize(*tensors()[1:], "elu+1"), summarize(*tensors()[1:], phi, **options)
    with pytest.raises(ValueError, match=f"apply: the state was made with {match}"):
        carried().apply(theirs)
    with pytest.raises(ValueError, match=f"compose: the state was made with {match}"):
        compose(mine, theirs)


def test_apply_refuses_a_windowed_state():
    with pytest.raises(ValueError, match="apply: the state was made with window=3"):
        carried(window=3).apply(summarize(*tensors()[1:], "elu+1"))


@pytest.mark.parametrize("part", [slice(None), slice(1)], ids=["heads", "batch"])
@pytest.mark.parametrize("operation", ["apply", "merge", "compose"])
def test_runs_of_another_shape_are_refused(operation, part):
    q, k, v = tensors()
    heads = slice(1) if part == slice(None) else slice(None)
    q, k, v = q[part, heads], k[part, heads], v[part, heads]
    run = summarize(k, v, "elu+1")
    with pytest.raises(ValueError, match=operation):
        if operation == "apply":
            carried().apply(run)
        elif operation == "merge":
            carried().merge(linear_attention(q, k, v, causal=True, return_state=True)[1])
        else:
            compose(summarize(*tensors()[1:], "elu+1"), run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_states_keep_their_precision(dtype):
    state = carried()
    with pytest.raises(
        TypeError, match=f"a state is float32 or float64, got {dtype}; states do not fit half"
    ):
        state.to(dtype)
    with pytest.raises(TypeError, match=f"a state is float32 or float64, got {dtype}"):
        AttentionState.zeros(ELU1(D), B, G, E, dtype=dtype)


def test_zeros():
    with pytest.raises(
        TypeError, match=r"AttentionState.zeros needs a FeatureMap object; .*feature_maps.make"
    ):
        AttentionState.zeros("elu+1", B, G, E)
    with pytest.raises(ValueError, match="feature_map has heads=4, the keys have 2 heads"):
        AttentionState.zeros(LearnedReLU(D, heads=4), B, G, E)
    with pytest.raises(ValueError, match=f"{NORMALIZE} 'l2'"):
        AttentionState.zeros(ELU1(D), B, G, E, normalize="l2")
    with pytest.raises(ValueError, match="window must be a positive number of positions, got 0"):
        AttentionState.zeros(ELU1(D), B, G, E, window=0)
    with pytest.raises(ValueError, match="normalize must be named for rule Delta"):
        AttentionState.zeros(ELU1(D), B, G, E, rule=Delta(BETA))
    with pytest.raises(ValueError, match="window cannot be used with rule Delta"):
        AttentionState.zeros(ELU1(D), B, G, E, rule=Delta(BETA), normalize="sum", window=3)
    with pytest.raises(TypeError, match=r"rule must be .*, got 'sum'"):
        AttentionState.zeros(ELU1(D), B, G, E, rule="sum")


def test_load_refuses_what_save_did_not_write(tmp_path):
    path = tmp_path / "state.safetensors"
    numbers = {"memory": torch.zeros(1, 1, 2, 2), "length": torch.zeros(1, dtype=torch.int64)}
    origin = json.dumps({"feature_map": "x", "rule": "sum", "normalize": "attention", "window": None})
    contents = {
        "garbage": lambda: path.write_bytes(b"not a state at all"),
        "nothing": lambda: path.write_bytes(b""),
        "other tensors": lambda: save_file({"weight": torch.zeros(2)}, path),
        "other format": lambda: save_file(numbers, path, {"format": "pt"}),
        "no origin": lambda: save_file(numbers, path, {"format": "reassoc-state-1"}),
        "origin no JSON": lambda: save_file(numbers, path, {"format": "reassoc-state-1", "origin": "{"}),
        "origin a list": lambda: save_file(numbers, path, {"format": "reassoc-state-1", "origin": "[]"}),
        "no memory": lambda: save_file(
            {"length": numbers["length"]}, path, {"format": "reassoc-state-1", "origin": origin}
        ),
        "no length": lambda: save_file(
            {"memory": numbers["memory"]}, path, {"format": "reassoc-state-1", "origin": origin}
        ),
    }
    for write in contents.values():
        write()
        with pytest.raises(
            ValueError, match=r"state.safetensors is not a state written by AttentionState.save"
        ):
            AttentionState.load(path)
    # The same with everything in place loads, so each refusal above is of its own defect.
    save_file(numbers, path, {"format": "reassoc-state-1", "origin": origin})
    assert AttentionState.load(path).origin.rule == "sum"


def test_load_cut_short(tmp_path):
    path = tmp_path / "state.safetensors"
    carried().save(path)
    whole = path.read_bytes()
    for size in (4, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"is not a state written by AttentionState.save"):
            AttentionState.load(path)


# What is damaged: the window of the state, and how.
DAMAGES = {
    "scale short": (None, lambda t: {"log_scale": t["log_scale"][:, :, :2]}),
    "scale in double precision": (None, lambda t: {"log_scale": t["log_scale"].double()}),
    "memory in half precision": (None, lambda t: {"memory": t["memory"].half()}),
    "memory of whole numbers": (None, lambda t: {"memory": t["memory"].long()}),
    "memory flat": (None, lambda t: {"memory": t["memory"].flatten(1)}),
    "length short": (None, lambda t: {"length": t["length"][:1]}),
    "length of floats": (None, lambda t: {"length": t["length"].float()}),
    "length of two axes": (None, lambda t: {"length": t["length"][:, None]}),
    "tail short": (3, lambda t: {"tail.value": t["tail.value"][:, :, :1]}),
    "tail narrow": (3, lambda t: {"tail.log": t["tail.log"][..., :2]}),
    "mask of floats": (3, lambda t: {"tail.mask": t["tail.mask"].float()}),
    "no mask": (3, lambda t: {"tail.mask": None}),
    "no features in the tail": (3, lambda t: {"tail.log": None}),
    "no tail": (3, lambda t: {name: None for name in t if name.startswith("tail.")}),
}


def positive_state(window):
    """A map, its call, and a state with a scale and, with a window, a tail."""
    torch.manual_seed(0)
    phi = PositiveFeatures(6, 5)
    inputs = [torch.randn(2, 3, 7, 6) for _ in range(3)]
    _, state = linear_attention(*inputs, phi, causal=True, window=window, return_state=True)
    return phi, inputs, state


def rewrite(path, change):
    """Save a safetensors file again with some tensors changed; those that are None are left out."""
    with safe_open(path, framework="pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors |= change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, path, about)


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_of_parts_that_do_not_fit(tmp_path, damage):
    window, change = DAMAGES[damage]
    path = tmp_path / "state.safetensors"
    positive_state(window)[2].save(path)
    rewrite(path, lambda tensors: {})
    assert AttentionState.load(path).origin.window == window
    rewrite(path, change)
    with pytest.raises(ValueError, match=r"is not a state written by AttentionState.save"):
        AttentionState.load(path)


@pytest.mark.parametrize("backend", [name for name, status in backends().items() if status == "available"])
def test_a_state_that_lost_its_scale_is_refused(tmp_path, backend):
    # Which maps need one only the call knows; without the check a kernel reads where nothing is.
    path = tmp_path / "state.safetensors"
    phi, inputs, state = positive_state(None)
    state.save(path)
    rewrite(path, lambda tensors: {"log_scale": None})
    token = [x[:, :, :1] for x in inputs]
    for call in (
        lambda state: linear_attention(*inputs, phi, causal=True, state=state, backend=backend),
        lambda state: step(*token, phi, state, backend=backend),
    ):
        call(state.clone())
        with pytest.raises(ValueError, match=r"without log_scale, .* it is damaged"):
            call(AttentionState.load(path))


def test_load_of_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors"):
        AttentionState.load(tmp_path / "missing.safetensors")


@pytest.mark.parametrize("thing", [3, "favor+", torch.nn.ReLU(), None], ids=["int", "name", "module", "None"])
def test_citation_of_something_unknown(thing):
    with pytest.raises(TypeError, match=f"citation knows .*, got {type(thing).__name__}"):
        citation(ELU1(D), thing)


# ---------------------------------------------------------------------------------------------------------
# A step that raises
# ---------------------------------------------------------------------------------------------------------

STEPS = {
    "query of two tokens": (lambda t: t | {"query": tensors(2)[0]}, "query must have shape"),
    "key of another size": (lambda t: t | {"key": t["key"][..., :7]}, "key must have shape"),
    "value of another dtype": (lambda t: t | {"value": t["value"].double()}, "value must have"),
    "mask of two tokens": (
        lambda t: t | {"key_mask": MASK[:, :2]},
        r"key_mask must have shape .*\(2, 1\), got \(2, 2\)",
    ),
    "gate of two tokens": (lambda t: t | {"rule": Decay(-torch.ones(B, G, 2))}, "log_decay must have shape"),
    "undefined row": (
        lambda t: t | {"query": -t["query"].abs(), "undefined": "raise"},
        "undefined result at batch 0, head 0, position 0",
    ),
    "normalize": (lambda t: t | {"normalize": "l2"}, "normalize must be"),
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("owned", [False, True], ids=["fresh", "after a step"])
@pytest.mark.parametrize("change, match", STEPS.values(), ids=STEPS)
def test_a_step_that_raises_leaves_the_state(change, match, owned, window):
    good = dict(zip(("query", "key", "value"), tensors(1), strict=True)) | {"rule": GATE, "window": window}
    state = carried("relu", rule=GATE, window=window)
    if owned:  # from now on steps write in place
        step(feature_map="relu", state=state, **good)
    kept = snapshot(state)
    with pytest.raises((TypeError, ValueError), match=match):
        step(feature_map="relu", state=state, **change(good))
    assert equal(snapshot(state), kept)
    step(feature_map="relu", state=state, **good)
    assert not equal(snapshot(state), kept)


# ---------------------------------------------------------------------------------------------------------
# Hybrid attention
# ---------------------------------------------------------------------------------------------------------


def hybrid(change=lambda t: t, feature_map="elu+1", n=N, **options):
    q, k, v = change(tensors(n))
    return hybrid_attention(q, k, v, feature_map, **{"window": 2, "sinks": 1, **options})


HYBRID = {
    "query rank": (
        {"change": lambda t: [t[0][0], *t[1:]]},
        ValueError,
        r"query must have shape \(B, H, N, d\)",
    ),
    "key length": (
        {"change": lambda t: [t[0], t[1][:, :, :4], t[2]]},
        ValueError,
        r"key .* \(2, G, 5, 8\), got",
    ),
    "key dtype": (
        {"change": lambda t: [t[0], t[1].double(), t[2]]},
        TypeError,
        "key must have the query's dtype",
    ),
    "value heads": (
        {"change": lambda t: [*t[:2], t[2][:, :1]]},
        ValueError,
        r"value must have shape \(2, 2, 5, e\)",
    ),
    "3 heads of 2": (
        {"change": lambda t: [t[0][:, :3], *t[1:]]},
        ValueError,
        "multiple of key heads, got 3 and 2",
    ),
    "no key heads": (
        {"change": lambda t: [t[0], t[1][:, :0], t[2][:, :0]], "feature_map": None},
        ValueError,
        "multiple of key heads, got 4 and 0",
    ),
    "map": ({"feature_map": 3}, TypeError, "feature_map must be a name or .*FeatureMap, got int"),
    "map of another size": ({"feature_map": ELU1(7)}, ValueError, "feature_map has dim=7, queries .* size 8"),
    "map of 3 heads": (
        {"feature_map": LearnedReLU(D, 5, heads=3)},
        ValueError,
        "feature_map has heads=3, .* 2",
    ),
    "random map by name": ({"feature_map": "favor+"}, ValueError, "must be kept by its owner"),
    "window 0": ({"window": 0}, ValueError, "window must be a whole number, at least 1, got 0"),
    "window bool": ({"window": True}, ValueError, "window must be .*, got True"),
    "window 2.0": ({"window": 2.0}, ValueError, "window must be .*, got 2.0"),
    "sinks -1": ({"sinks": -1}, ValueError, "sinks must be a whole number, at least 0, got -1"),
    "sinks None": ({"sinks": None}, ValueError, "sinks must be a whole number, at least 0, got None"),
    "span in window": (
        {"span": 2, "sinks": 0},
        ValueError,
        "span must be larger than window=2 .* got span=2",
    ),
    "span and sinks": ({"span": 4}, ValueError, "span .* goes with sinks=0, got span=4, sinks=1"),
    "span 0": ({"span": 0, "sinks": 0}, ValueError, "span must be a whole number, at least 1, got 0"),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "scale text": ({"scale": "1"}, TypeError, "scale must be a number, got str"),
    "weight size": (
        {"log_weight": torch.zeros(G)},
        ValueError,
        r"log_weight must have shape \(4\), got \(2,\)",
    ),
    "weight number": ({"log_weight": 0.5}, TypeError, "log_weight must be a tensor, got float"),
    "delta": (
        {"rule": Delta(BETA)},
        ValueError,
        "takes rule Sum, or Decay with one log_decay for each key head",
    ),
    "gate per token": (
        {"rule": Decay(-BETA)},
        ValueError,
        r"takes rule Sum, .* got Decay with log_decay \(2, 2, 5\)$",
    ),
    "gate of 3 heads": (
        {"rule": Decay(-torch.ones(3))},
        ValueError,
        r"log_decay must have shape \(G,\) = \(2,\).* got \(3,\)",
    ),
    "mask dtype": ({"key_mask": MASK.float()}, TypeError, "key_mask must be a bool tensor"),
    "mask size": ({"key_mask": MASK[:, :4]}, ValueError, r"key_mask .* \(2, 5\), got \(2, 4\)"),
    "undefined": ({"undefined": "error"}, ValueError, "undefined must be one of"),
    "backend": ({"backend": "cuda"}, ValueError, "backend must be one of"),
    "state": ({"state": 3}, TypeError, "state must be a HybridState, got int; start with return_state=True"),
}


@pytest.mark.parametrize("arguments, error, match", HYBRID.values(), ids=HYBRID)
def test_hybrid_attention(arguments, error, match):
    with pytest.raises(error, match=match) as caught:
        hybrid(**arguments)
    assert "\n" not in str(caught.value)


def hybrid_snapshot(state):
    parts = [t.clone() for t in state._tensors().values()]
    return parts + ([] if state.memory is None else snapshot(state.memory))


OTHER_HYBRID = {
    "window": ({"window": 3}, "made with window=2, this call has 3"),
    "sinks": ({"sinks": 2}, "made with sinks=1, this call has 2"),
    "span": ({"sinks": 0, "span": 4}, "made with sinks=1, this call has 0"),
    "scale": ({"scale": 0.5}, "made with scale=.*, this call has 0.5"),
    "map": ({"feature_map": "relu"}, "state was made with"),
    "no map": ({"feature_map": None}, "one with a feature map serves calls with that map"),
    "rule": ({"rule": Decay(-torch.ones(G))}, "state was made with"),
    "batch": (
        {"change": lambda t: [x[:1] for x in t]},
        r"state holds keys \(2, 2, 2, 8\) .* needs \(1, 2, 2, 8\)",
    ),
    "dtype": (
        {"change": lambda t: [x.double() for x in t]},
        "state holds keys .* torch.float32 .* torch.float64",
    ),
    "value size": (
        {"change": lambda t: [*t[:2], t[2][..., :2]]},
        r"state holds values .* needs \(2, 2, 2, 2\)",
    ),
}


@pytest.mark.parametrize("arguments, match", OTHER_HYBRID.values(), ids=OTHER_HYBRID)
def test_a_hybrid_state_serves_only_calls_like_its_own(arguments, match):
    _, state = hybrid(return_state=True)
    kept = hybrid_snapshot(state)
    with pytest.raises(ValueError, match=match):
        hybrid(state=state, **arguments)
    assert equal(hybrid_snapshot(state), kept)


HYBRID_STEPS = {
    "two tokens": (
        lambda t: t | dict(zip(("query", "key", "value"), tensors(2), strict=True)),
        "query must have",
    ),
    "two keys": (lambda t: t | {"key": tensors(2)[1]}, "key must have shape"),
    "another map": (lambda t: t | {"feature_map": "elu+1"}, "state was made with"),
    "another rule": (lambda t: t | {"rule": Sum()}, "state was made with"),
    "no state": (lambda t: t | {"state": carried()}, "state must be a HybridState, got AttentionState"),
    "mask of two tokens": (lambda t: t | {"key_mask": MASK[:, :2]}, r"key_mask .* \(2, 1\), got \(2, 2\)"),
    "gate of 3 heads": (lambda t: t | {"rule": Decay(-torch.ones(3))}, "log_decay must have shape"),
    "weight": (lambda t: t | {"log_weight": torch.zeros(3)}, "log_weight must have shape"),
    "hidden row": (
        lambda t: t | {"key_mask": torch.zeros(B, 1, dtype=torch.bool), "undefined": "raise"},
        "undefined result at batch 0, head 0, position 0",
    ),
}


@pytest.mark.parametrize("owned", [False, True], ids=["fresh", "after a step"])
@pytest.mark.parametrize("change, match", HYBRID_STEPS.values(), ids=HYBRID_STEPS)
def test_a_hybrid_step_that_raises_leaves_the_state(change, match, owned):
    decay = Decay(-torch.ones(G))
    # Nothing real was seen so far: with a hidden key, a step has a row that sees nothing.
    _, state = hybrid(feature_map="relu", rule=decay, key_mask=~MASK, return_state=True)
    good = dict(zip(("query", "key", "value"), tensors(1), strict=True))
    good |= {"feature_map": "relu", "rule": decay, "state": state}
    if owned:
        hybrid_step(**good | {"key_mask": torch.zeros(B, 1, dtype=torch.bool)})
    kept = hybrid_snapshot(state)
    with pytest.raises((TypeError, ValueError), match=match):
        hybrid_step(**change(good))
    assert equal(hybrid_snapshot(state), kept)
    hybrid_step(**good)
    assert not equal(hybrid_snapshot(state), kept)


def test_reorder_of_a_hybrid_state_takes_sequence_numbers():
    for feature_map in ("elu+1", None):
        _, state = hybrid(feature_map=feature_map, return_state=True)
        for index in ([0, 1], torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]])):
            with pytest.raises(TypeError, match="reorder takes a one-dimensional int32 or int64 tensor"):
                state.reorder(index)
