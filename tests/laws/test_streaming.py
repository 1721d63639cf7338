"""A million tokens in pieces, thousands by step: against float64, in constant memory."""

import dataclasses

import pytest
import torch

import reassoc
from laws.budgets import STREAMED_FLOAT32, assert_outputs_close
from laws.suite import (
    Layout,
    call,
    draw,
    expect,
    features,
    fresh_state,
    make_map,
    state_bytes,
    step_through,
    vars_of,
)
from reassoc import rules

PIECE = 16_384
MILLION = 1_000_000


def reference_read(q, S, z):
    return q @ S / (q @ z[..., None])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "log_decay"), [("elu+1", None), ("favor+", None), ("elu+1", -1e-5)])
def test_a_million_tokens_in_pieces(name, log_decay):
    """The last row of every piece against float64 sums that are kept beside it."""
    phi, exact = make_map(name, torch.float32), make_map(name)
    generator = torch.Generator().manual_seed(0)
    rule = rules.Sum() if log_decay is None else rules.Decay(torch.tensor([log_decay]))
    state = reassoc.AttentionState.zeros(phi, 1, 1, 4, rule=rule)
    S = torch.zeros(phi.feature_dim, 4, dtype=torch.float64)
    z = torch.zeros(phi.feature_dim, dtype=torch.float64)
    size = None
    for start in range(0, MILLION, PIECE):
        n = min(PIECE, MILLION - start)
        q, k, v = (torch.randn(1, 1, n, 4, generator=generator) for _ in range(3))
        v = v + 0.1
        with torch.no_grad():
            output, state = reassoc.linear_attention(
                q, k, v, phi, rule=rule, causal=True, state=state, return_state=True
            )
            kf = features(name, exact, k.double(), "key", heads=1).value()[0, 0]
            qf = features(name, exact, q[:, :, -1:].double(), "query", heads=1).value()[0, 0]
        if log_decay is not None:
            age = torch.arange(n - 1, -1, -1, dtype=torch.float64)
            step = float(torch.tensor(log_decay))  # as float32 holds it
            kf = kf * (age * step).exp()[:, None]
            S, z = S * torch.tensor(n * step).double().exp(), z * torch.tensor(n * step).double().exp()
        S, z = S + kf.T @ v[0, 0].double(), z + kf.sum(0)
        weight = (qf @ z).abs()
        unit = (qf @ (kf.abs().T @ v[0, 0].double().abs())) / weight + reference_read(qf, S, z).abs()
        error = (output[0, 0, -1:].double() - reference_read(qf, S, z)).abs()
        assert (error <= STREAMED_FLOAT32 * unit).all(), f"at {start + n}: {(error / unit).max():.2g}"
        size = state_bytes(state) if size is None else size
        assert state_bytes(state) == size, "the state's memory depends on the piece"
    assert state.length.item() == MILLION
    assert len(vars_of(state)) >= 2, "state_bytes found no tensors to count"


@pytest.mark.slow
def test_a_million_tokens_of_one_kind():
    """Equal keys: a float32 counter would stop at 2^24 and drift long before; the mean must stay the mean."""
    q = torch.ones(1, 1, PIECE, 1)
    v = torch.linspace(0, 1, PIECE).view(1, 1, PIECE, 1)
    state, output = None, None
    with torch.no_grad():
        for _ in range(61):
            output, state = reassoc.linear_attention(
                q, q, v, "relu", causal=True, state=state, return_state=True
            )
    assert abs(output[0, 0, -1, 0].item() - 0.5) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule", "window"),
    [("elu+1", "decay-token", None), ("favor+", "sum", None), ("favor+", "sum", 16)],
)
def test_thousands_of_steps(name, rule, window):
    """Steps in float32 follow the float64 call; the state keeps its size and its file."""
    n = 2000
    phi, exact = make_map(name, torch.float32), make_map(name)
    inputs = draw(name, rule, Layout(n, causal=True, window=window))
    inputs = dataclasses.replace(
        inputs, query=inputs.query[:1, :2], key=inputs.key[:1], value=inputs.value[:1],
        log_decay=None if inputs.log_decay is None else inputs.log_decay[:1],
    ).to(torch.float32)  # fmt: skip
    state = fresh_state(phi, inputs)
    sizes, outputs = set(), []
    with torch.no_grad():
        for start in range(0, n, 500):
            output, state = step_through(phi, inputs.rows(start, start + 500), state=state)
            outputs.append(output)
            sizes.add(state_bytes(state))
        want = call(exact, inputs.to(torch.float64))
    assert len(sizes) == 1, f"state memory grew: {sizes}"
    output = torch.cat(outputs, 2).double()
    assert (output - want).abs().max() <= STREAMED_FLOAT32 * want.abs().max()


@pytest.mark.parametrize("window", [None, 8])
def test_a_state_does_not_keep_its_piece_alive(window, tmp_path):
    """No view into the piece's tensors, in memory or on disk."""
    sizes = []
    for n in (100, 5000):
        inputs = draw("favor+", "sum", Layout(n, causal=True, window=window))
        with torch.no_grad():
            _, state = call(make_map("favor+"), inputs, return_state=True)
        state.save(tmp_path / "state")
        sizes.append((state_bytes(state), (tmp_path / "state").stat().st_size))
    assert sizes[0] == sizes[1]


def test_float64_streams_stay_exact():
    phi = make_map("favor+")
    inputs = draw("favor+", "decay-token", Layout(300, causal=True))
    result = expect("favor+", phi, inputs)
    state, rows = None, []
    for start in range(0, 300, 7):
        row, state = call(phi, inputs.rows(start, min(300, start + 7)), state=state, return_state=True)
        rows.append(row)
    assert_outputs_close(torch.cat(rows, 2), result, torch.float64)
