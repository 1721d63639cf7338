"""Padding changes nothing, rows do not see each other, and nobody sees the future."""

import math

import pytest
import torch
from nn_cases import (
    BUDGET,
    MAPS,
    SIGNED,
    SIGNED_FACTOR,
    VOCABULARY,
    WIDTH,
    assert_near,
    config,
    language_model,
    lively,
    tokens,
)

from reassoc.nn import attention

DOUBLE = torch.float64
MODELS = {
    "sum": {},
    "decay convolution rotary": {"rule": "decay", "decay": "feature", "convolution": 3, "position": "rotary"},
    "retention": {"rule": "decay", "decay": "fixed", "key_heads": 2},
    "delta convolution": {"rule": "delta", "convolution": 4, "query_key_norm": True},
    "gated delta rotary": {"rule": "gated-delta", "position": "rotary"},
    "rotary after": {"position": "rotary-after", "convolution": 2},
    "favor+": {"feature_map": "favor+", "output_norm": True, "output_gate": True},
    "window": {"window": 3, "convolution": 2},
    "softmax": {"mixer": "softmax"},
    "softmax rotary": {
        "mixer": "softmax",
        "convolution": 3,
        "position": "rotary",
        "key_heads": 1,
    },
    "softmax window": {"mixer": "softmax", "window": 3, "position": "rotary"},
    "learned": {"learned": 40},
    "softmax learned": {"mixer": "softmax", "learned": 40},
}
LENGTHS = (9, 4, 1)


def made(name):
    options = dict(MODELS[name])
    learned = options.pop("learned", 0)
    return language_model(config(options.pop("feature_map", "elu+1"), **options), learned_positions=learned)


def padded(side, width=11):
    """Texts of different length in one batch; ids (3, width), mask, and the texts."""
    texts = [tokens(1, length, seed=length) for length in LENGTHS]
    ids, mask = tokens(3, width, seed=77), torch.zeros(3, width, dtype=torch.bool)
    for row, text in enumerate(texts):
        own = slice(width - text.shape[1], width) if side == "left" else slice(0, text.shape[1])
        ids[row, own], mask[row, own] = text[0], True
    return ids, mask, texts


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(name, side):
    model = made(name)
    ids, mask, texts = padded(side)
    with torch.no_grad():
        logits, states = model(ids, key_mask=mask, return_states=True)
        alone = [model(text, return_states=True) for text in texts]
        assert logits.isfinite().all()
        for row, (want, _) in enumerate(alone):
            assert_near(logits[row][mask[row]][None], want, BUDGET[DOUBLE], f"row {row}")
        assert states.length.tolist() == list(LENGTHS)
        if "window" in name and side == "right":
            return  # a window counts positions, hidden ones too: padding behind a text uses it up
        # And what follows does not notice either: a segment, then steps.
        more = tokens(3, 5, seed=8)
        following, states = model(more[:, :3], states=states, return_states=True)
        steps = [model.step(more[:, i : i + 1], states) for i in (3, 4)]
        for row, (_, own) in enumerate(alone):
            want = model(more[row : row + 1], states=own)
            got = torch.cat([following, *steps], 1)[row : row + 1]
            assert_near(got, want, BUDGET[DOUBLE], f"after row {row}")


@pytest.mark.parametrize("name", MAPS)
def test_padding_changes_nothing_for_any_map(name):
    model = language_model(config(name, rule="decay", convolution=2))
    with torch.no_grad():
        for side in ("left", "right"):
            ids, mask, texts = padded(side)
            logits = model(ids, key_mask=mask)
            for row, text in enumerate(texts):
                allowed = BUDGET[DOUBLE] * (SIGNED_FACTOR if name in SIGNED else 1)
                assert_near(logits[row][mask[row]][None], model(text), allowed, f"{side} {row}")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [n for n in MODELS if "window" not in n])
def test_padding_of_a_later_segment_changes_nothing(name, side):
    """What convolutions still need must not be pushed away by padding before the next real token."""
    model = made(name)
    ids, mask, texts = padded(side)
    before = tokens(3, 4, seed=5)
    with torch.no_grad():
        _, states = model(before, return_states=True)
        logits, states = model(ids, key_mask=mask, states=states, return_states=True)
        step = model.step(before[:, :1], states)
        for row, text in enumerate(texts):
            whole = torch.cat([before[row : row + 1], text, before[row : row + 1, :1]], 1)
            want = model(whole)[:, 4:]
            got = torch.cat([logits[row][mask[row]], step[row]])[None]
            assert_near(got, want, BUDGET[DOUBLE], f"row {row}")


@pytest.mark.parametrize("name", MODELS)
def test_generation_with_padding_on_the_left_is_that_without(name):
    model = made(name)
    ids, mask, texts = padded("left")
    got = torch.stack(list(model.generate(ids, 8, key_mask=mask)), 1)
    for row, text in enumerate(texts):
        want = torch.stack(list(model.generate(text, 8)), 1)
        assert torch.equal(got[row : row + 1], want), f"row {row}"


@pytest.mark.parametrize("name", MODELS)
def test_a_hidden_token_may_be_any(name):
    model = made(name)
    for side in ("left", "right"):
        ids, mask, _ = padded(side)
        other = torch.where(mask, ids, (ids + 1) % VOCABULARY)
        with torch.no_grad():
            one, two = (model(t, key_mask=mask, return_states=True) for t in (ids, other))
        assert torch.equal(one[0][mask], two[0][mask])
        for mine, theirs in zip(one[1].layers, two[1].layers, strict=True):
            mine, theirs = mine.memory._pack()[0], theirs.memory._pack()[0]
            for part in mine:
                if part == "tail.mask" or ("window" in name and part != "length"):
                    continue
                assert torch.equal(mine[part], theirs[part]), part


@pytest.mark.parametrize(
    "options", [{}, {"convolution": 3}, {"position": "rotary-after"}, {"mixer": "softmax"}], ids=str
)
def test_hidden_keys_may_be_nan(options):
    torch.manual_seed(0)
    layer = lively(attention(WIDTH, config(**options))).double()
    x = torch.randn(2, 7, WIDTH, dtype=DOUBLE)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = mask[1, :2] = False
    hidden = x.masked_fill(~mask[..., None], math.nan)
    got, want = layer(hidden, key_mask=mask), layer(x, key_mask=mask)
    assert torch.equal(got[mask], want[mask])
    assert got[mask].isfinite().all()


@pytest.mark.parametrize("mixer", ["linear", "softmax"])
@pytest.mark.parametrize("position", ["none", "rotary"])
def test_a_row_that_is_hidden_throughout_gives_nothing(mixer, position):
    for causal in (True, False):
        torch.manual_seed(0)
        chosen = config(mixer=mixer, position=position, convolution=2 if causal else 0)
        layer = lively(attention(WIDTH, chosen, causal=causal)).double()
        x = torch.randn(2, 7, WIDTH, dtype=DOUBLE, requires_grad=True)
        mask = torch.ones(2, 7, dtype=torch.bool)
        mask[0] = False
        mask[1, :3] = False
        output = layer(x, key_mask=mask)
        assert output[0].abs().max() == 0
        if causal:
            assert output[1, :3].abs().max() == 0
        assert output[1, 3:].abs().min(-1).values.max() > 0
        output.square().sum().backward()
        assert x.grad.isfinite().all() and x.grad[0].abs().max() == 0
        assert all(p.grad.isfinite().all() for p in layer.parameters())
    model = language_model(config(mixer=mixer, position=position))
    logits = model(tokens(2, 7), key_mask=mask)
    assert logits.isfinite().all()
    logits.log_softmax(-1)[mask].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_rows_do_not_see_each_other(name):
    model = made(name)
    ids = tokens(4, 9)
    with torch.no_grad():
        full = model(ids)
        for row in range(4):
            assert_near(full[row : row + 1], model(ids[row : row + 1]), BUDGET[DOUBLE], f"row {row}")


@pytest.mark.parametrize("name", MODELS)
def test_the_future_changes_nothing(name):
    model = made(name)
    ids = tokens(2, 10)
    with torch.no_grad():
        full = model(ids)
        for cut in (1, 4, 9):
            other = ids.clone()
            other[:, cut:] = (other[:, cut:] + 1 + torch.arange(10 - cut)) % VOCABULARY
            changed = model(other)
            assert_near(changed[:, :cut], full[:, :cut], BUDGET[DOUBLE], f"before {cut}")
            assert (changed[:, cut:] - full[:, cut:]).abs().amax((0, 2)).min() > 1e-3


@pytest.mark.parametrize("name", ["sum", "softmax", "gated delta rotary", "delta convolution"])
def test_the_past_reaches_every_later_token(name):
    model = made(name)
    ids = tokens(1, 8)
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % VOCABULARY
    with torch.no_grad():
        assert (model(other) - model(ids)).abs().amax((0, 2)).min() > 1e-6
