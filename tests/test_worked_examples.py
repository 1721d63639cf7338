"""Every case of data/worked_examples.json: numbers recomputed by hand, independently of this library."""

import json
import math
import pathlib

import pytest
import torch

import oracle
import reassoc
from reassoc import feature_maps, rules

DATA = json.loads((pathlib.Path(__file__).parent / "data" / "worked_examples.json").read_text())
CASES = {case["name"]: case for case in DATA["cases"]}
HANDLED: dict[str, str] = {}
BACKENDS = ("reference", "torch")


def handles(*names):
    """Mark a test function as the one for these cases and parametrize it over them."""

    def mark(function):
        for name in names:
            HANDLED[name] = function.__name__
        return pytest.mark.parametrize("case", [CASES[n] for n in names], ids=list(names))(function)

    return mark


def rows(numbers) -> torch.Tensor:  # (1, 1, N, d)
    """A list of vectors (or of numbers, as vectors of one) as a float64 attention input."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    return (tensor[:, None] if tensor.dim() == 1 else tensor)[None, None]


def close(got, want):
    """Equal to twelve digits."""
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.double().reshape(want.shape), want, rtol=1e-12, atol=1e-12)


def attend(case, undefined="nan", **more):
    """The call that a case describes; a single q reads all keys."""
    inputs = case["inputs"]
    query = rows(inputs["Q"] if "Q" in inputs else [inputs["q"]])
    options = {
        "causal": inputs["causal"],
        "normalize": inputs.get("normalise"),
        "undefined": undefined,
    } | more
    return reassoc.linear_attention(
        query, rows(inputs["K"]), rows(inputs["V"]), inputs["feature_map"], return_state=True, **options
    )


@pytest.mark.parametrize("backend", BACKENDS)
@handles(
    "identity-q(1, 0)",
    "identity-q(0, 1)",
    "identity-q(1, 1)",
    "identity-q(2, -1)",
    "general-preset-prefix-1-elu",
    "all-negative-relu",
    "all-negative-elu",
)
def test_one_query(case, backend):
    inputs, expect = case["inputs"], case["expect"]
    dead = expect["output"] is None
    output, state = attend(case, backend=backend)
    close(state.z, expect["z"])
    if "S" in expect:
        close(state.S, expect["S"])
    phi = feature_maps.make(inputs["feature_map"], 2)
    for name, x in (("phi_q", inputs["q"]), ("phi_k", inputs["K"][0])):
        if name in expect:
            close(phi(torch.tensor(x, dtype=torch.float64)), expect[name])
    numerator, _ = attend(case, normalize="none", backend=backend)
    close(numerator, [expect["numerator"]])
    q = phi.query(torch.tensor(inputs["q"], dtype=torch.float64))
    close(q @ state.z[0, 0], expect["denominator"])
    if dead:
        assert output.isnan().all()
        zero, _ = attend(case, undefined="zero", backend=backend)
        assert zero.eq(0).all()
        with pytest.raises(ValueError, match="undefined"):
            attend(case, undefined="raise", backend=backend)
    else:
        close(output, [expect["output"]])
        for policy in ("zero", "raise"):
            close(attend(case, undefined=policy, backend=backend)[0], [expect["output"]])


@pytest.mark.parametrize("backend", BACKENDS)
@handles("fwp-identity-unnormalised-causal", "elu-causal-normalised", "elu-full-normalised")
def test_several_queries(case, backend):
    inputs, expect = case["inputs"], case["expect"]
    output, state = attend(case, backend=backend)
    close(output, expect["outputs"])
    if "final_S" in expect:
        close(state.S, expect["final_S"])
    phi = feature_maps.make(inputs["feature_map"], 2)
    for name, given in (("phi_Q", "Q"), ("phi_K", "K")):
        if name in expect:
            close(phi(rows(inputs[given])), expect[name])
    weights = reassoc.attention_matrix(
        rows(inputs["Q"]), rows(inputs["K"]), phi, causal=inputs["causal"], normalize=inputs.get("normalise")
    )
    close(weights @ rows(inputs["V"]), expect["outputs"])


@handles("softmax-causal")
def test_softmax(case):
    """Random features of the softmax kernel estimate these numbers; the oracle gives them exactly."""
    inputs = case["inputs"]
    q, k, v = (rows(inputs[name]) for name in "QKV")
    close(oracle.softmax_attention(q, k, v, inputs["scale"], inputs["causal"]), case["expect"]["outputs"])
    want = torch.tensor(case["expect"]["outputs"], dtype=torch.float64)
    for phi in (
        feature_maps.TrigonometricFeatures(2, 2**14, scale=inputs["scale"]),
        feature_maps.PositiveFeatures(2, 2**14, scale=inputs["scale"], hyperbolic=True),
        feature_maps.PositiveFeatures(2, 2**14),  # the default scale is dim**-0.5
    ):
        output = reassoc.linear_attention(q, k, v, phi.double(), causal=True)
        assert (output[0, 0] - want).abs().max() < 0.06


@handles("crosstalk")
def test_crosstalk(case):
    inputs, expect = case["inputs"], case["expect"]
    k, v = rows(inputs["K"]), rows(inputs["V"])
    query = torch.tensor(inputs["query_features"], dtype=torch.float64).log()[
        None, None, None
    ]  # ELU+1 of log 1, ...
    query = torch.where(query > 0, torch.tensor(inputs["query_features"], dtype=torch.float64) - 1, query)
    output, state = reassoc.linear_attention(query, k, v, "elu+1", normalize="none", return_state=True)
    close(state.S, expect["S"])
    close(output, [expect["output"]])
    normalized = reassoc.linear_attention(query, k, v, "elu+1")
    close(normalized, [expect["normalised"]])
    weights = reassoc.attention_matrix(query, k, "elu+1", normalize="none")
    close(weights, [[expect["signal"], expect["crosstalk"]]])


@handles("trig-one-frequency")
def test_trigonometric_features(case):
    inputs, expect = case["inputs"], case["expect"]
    phi = feature_maps.TrigonometricFeatures(
        2, 1, scale=1.0, projections=torch.tensor(inputs["omega"], dtype=torch.float64)
    ).double()
    x, y = (torch.tensor(inputs[name], dtype=torch.float64) for name in "xy")
    close(phi(x), expect["phi_x"])
    close(phi(y), expect["phi_y"])
    close(phi(x) @ phi(y), expect["estimate"])
    assert math.exp(x @ y) == pytest.approx(expect["true"])


@handles("positive-features-m4")
def test_positive_features(case):
    inputs, expect = case["inputs"], case["expect"]
    phi = feature_maps.PositiveFeatures(
        2, 4, scale=1.0, projections=torch.tensor(inputs["omega"], dtype=torch.float64)
    ).double()
    q, k1, k2 = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("q1", "k1", "k2"))
    close(phi(q), expect["phi_q1"])
    close(phi(k1), expect["phi_k1"])
    close(phi(q) @ phi(k1), expect["estimate_q1_k1"])
    close(phi(q) @ phi(k2), expect["estimate_q1_k2"])
    assert (math.exp(q @ k1), math.exp(q @ k2)) == pytest.approx((expect["true_q1_k1"], expect["true_q1_k2"]))
    matrix = reassoc.attention_matrix(
        q[None, None, None], torch.stack([k1, k2])[None, None], phi, normalize="none"
    )
    close(matrix, [expect["estimate_q1_k1"], expect["estimate_q1_k2"]])


@handles("orthogonalised-sqrt-d")
def test_orthogonalized_rows(case):
    inputs, expect = case["inputs"], case["expect"]
    matrix = feature_maps.orthogonalize(torch.tensor(inputs["omega"], dtype=torch.float64), norms="sqrt_dim")
    close(matrix, expect["omega_orthogonal"])
    phi = feature_maps.PositiveFeatures(2, 2, scale=1.0, projections=matrix).double()
    close(phi(torch.tensor(inputs["x"], dtype=torch.float64)), expect["phi_x"])


@pytest.mark.filterwarnings("ignore:DPFP")
@handles("dpfp-1", "dpfp-2")
def test_dpfp(case):
    inputs, expect = case["inputs"], case["expect"]
    keys = torch.tensor(inputs["keys"], dtype=torch.float64)
    want = torch.tensor(expect["phi"], dtype=torch.float64)
    close(feature_maps.DPFP(2, inputs["nu"])(keys), want)
    close(feature_maps.make(f"dpfp-{inputs['nu']}", 2)(keys), want)


@handles("sum-normalised")
def test_sum_normalized_features(case):
    """The weight without a division is the product of the normalized vectors; the state holds the key's."""
    inputs, expect = case["inputs"], case["expect"]
    q, k = rows([inputs["q"]]), rows([inputs["k"]])
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    output, state = reassoc.linear_attention(q, k, one, "elu+1", normalize="sum", return_state=True)
    close(output, expect["similarity"])
    close(state.S, expect["phi_k"])
    _, mirrored = reassoc.linear_attention(k, q, one, "elu+1", normalize="sum", return_state=True)
    close(mirrored.S, expect["phi_q"])
    close(reassoc.linear_attention(q, k, one, "elu+1", normalize="none"), expect["unnormalised_similarity"])


@handles("delta-sum-normalised-elu", "gated-delta-sum-normalised-elu")
def test_delta_rules_by_hand(case):
    """The printed rule applied to the library's own sum-normalized features gives the printed numbers."""
    inputs, expect = case["inputs"], case["expect"]
    k, q, v = (rows(inputs[name]) for name in "KQV")
    unit = torch.ones(1, 1, 1, 1, dtype=torch.float64)

    def normalized(x):
        _, state = reassoc.linear_attention(x, x, unit, "elu+1", normalize="sum", return_state=True)
        return state.S[0, 0, :, 0]

    S = torch.zeros(2, 2, dtype=torch.float64)
    outputs = []
    for t, (alpha, beta) in enumerate(zip(inputs["alpha"], inputs["beta"], strict=True)):
        phi_k, phi_q = normalized(k[:, :, t : t + 1]), normalized(q[:, :, t : t + 1])
        S = alpha * S
        S = S + beta * phi_k[:, None] * (v[0, 0, t] - S.T @ phi_k)[None]
        outputs.append(S.T @ phi_q)
    close(torch.stack(outputs), expect["outputs"])
    close(S, expect["final_S"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["delta-sum-normalised-elu", "gated-delta-sum-normalised-elu"])
def test_delta_rules(name, backend):
    case = CASES[name]
    inputs, expect = case["inputs"], case["expect"]
    beta, alpha = (torch.tensor(inputs[gate], dtype=torch.float64)[None, None] for gate in ("beta", "alpha"))
    rule = rules.Delta(beta) if name.startswith("delta") else rules.GatedDelta(beta, alpha.log())
    output, state = attend(case, rule=rule, normalize="sum", backend=backend)
    close(output, expect["outputs"])
    close(state.S, expect["final_S"])


@handles("estimator-variance-times-m")
def test_estimator_variances(case):
    """One draw with many projections that are independent: the sample variance of single estimates."""
    m = 2**21
    kinds = {
        "trig": feature_maps.TrigonometricFeatures(2, m, orthogonal=False, scale=1.0, seed=1),
        "positive": feature_maps.PositiveFeatures(2, m, orthogonal=False, scale=1.0, seed=2),
    }
    for (x, y), want in zip(case["inputs"]["pairs"], case["expect"]["values"], strict=True):
        x, y = torch.tensor([x], dtype=torch.float64), torch.tensor([y], dtype=torch.float64)
        for kind, phi in kinds.items():
            product = phi(x) * phi(y) * m  # (1, m) or (1, 2m)
            single = product.unflatten(-1, (2, m)).sum(-2) if kind == "trig" else product
            variance = single.var().item()
            assert variance == pytest.approx(want[kind], rel=0.1, abs=1e-9), (kind, x, y)


@handles("capacity-table")
def test_capacity_table(case):
    d = case["inputs"]["d_k"]
    table = case["expect"]["d_dot"]
    for name in ("elu+1", "dpfp-1", "dpfp-2", "dpfp-3"):
        assert feature_maps.make(name, d).feature_dim == table[name]
    m = case["expect"]["m_rule"]  # d ln d rounded down; the library's default rounds up
    assert feature_maps.PositiveFeatures(d, m).feature_dim == table["favor+ (m=266)"] == m
    assert feature_maps.PositiveFeatures(d).feature_dim == m + 1 == math.ceil(d * math.log(d))


@handles("state-arithmetic")
def test_state_arithmetic(case):
    inputs, expect = case["inputs"], case["expect"]
    n, r, e = inputs["N"], inputs["r"], inputs["d_v"]
    x = torch.ones(1, 1, n, r)
    output, state = reassoc.linear_attention(
        x, x, torch.ones(1, 1, n, e), "elu+1", causal=True, return_state=True
    )
    assert output.shape == (1, 1, n, e)
    assert state.S.numel() + state.z.numel() == expect["state_scalars"]
    assert reassoc.attention_matrix(x, x, "elu+1", causal=True).numel() == expect["quadratic_scores"]
    assert 2 * state.length.item() == expect["linear_passes"]


def test_every_case_has_a_test():
    assert len(DATA["cases"]) == len(CASES), "two cases share a name"
    assert set(HANDLED) == set(CASES)
