"""The encoder-decoder: generation is the argmax of the forward, masks, rules, limits."""

import pytest
import torch
from nn_cases import (
    BUDGET,
    MAPS,
    RULE_CASES,
    SIGNED,
    SIGNED_FACTOR,
    VOCABULARY,
    WIDTH,
    assert_near,
    config,
    lively,
    tokens,
)
from torch.nn import functional

from reassoc.nn import EncoderDecoder, EncoderDecoderConfig

DOUBLE = torch.float64
START, STOP = 0, 1
MODELS = {
    "sum": {},
    "decay rotary": {"rule": "decay", "position": "rotary", "key_heads": 2},
    "retention convolution": {"rule": "decay", "decay": "fixed", "convolution": 3},
    "delta everything": {"rule": "delta", "convolution": 2, "query_key_norm": True, "output_norm": True,
                         "output_gate": True},
    "gated delta dpfp": {"rule": "gated-delta", "feature_map": "dpfp-1"},
    "favor+": {"feature_map": "favor+", "position": "rotary"},
    "window": {"window": 3},
    "softmax": {"mixer": "softmax"},
    "softmax rotary": {"mixer": "softmax", "position": "rotary", "convolution": 2, "key_heads": 1},
    "softmax delta": {"mixer": "softmax", "rule": "delta", "window": 3},
    "learned": {"learned": 30},
}  # fmt: skip


def made(name, dtype=DOUBLE, **more):
    options = dict(MODELS[name])
    whole = {"learned_positions": options.pop("learned", 0)} | more
    torch.manual_seed(0)
    chosen = config(options.pop("feature_map", "elu+1"), **options)
    model = EncoderDecoder(
        EncoderDecoderConfig(VOCABULARY, VOCABULARY + 2, width=WIDTH, hidden=WIDTH, attention=chosen, **whole)
    )
    return lively(model).to(dtype).eval()


def by_forward(model, source, count, **options):
    """Greedy generation from the whole forward, ends ignored."""
    target = source.new_full((len(source), 1), START)
    for _ in range(count):
        picked = model(source, target, **options)[:, -1].argmax(-1)
        target = torch.cat([target, picked[:, None]], 1)
    return target[:, 1:]


def cut(target, stop):
    """What a caller is to get: `stop` behind the first `stop`, and no column that is nothing else."""
    ended = (target == stop).cumsum(1)
    filled = target.masked_fill(ended > 0, stop)
    longest = int((ended == 0).sum(1).max()) + 1
    return filled[:, :longest]


@pytest.mark.parametrize("name", MODELS)
def test_generate_is_the_argmax_of_the_forward(name):
    model = made(name)
    source = tokens(4, 7)
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[1, 4:] = mask[2, 1:] = False
    with torch.no_grad():
        for options in ({}, {"source_mask": mask}):
            free = by_forward(model, source, 12, **options)
            stops = sorted(set(free.flatten().tolist()), key=lambda t: -(free == t).sum().item())
            unseen = next(t for t in range(VOCABULARY + 2) if t not in stops)
            for stop in (*stops[:3], unseen):
                got = model.generate(source, start=START, stop=stop, limit=12, **options)
                assert torch.equal(got, cut(free, stop)), stop
                assert got.dtype == torch.int64


def test_ends_are_filled_and_the_rest_goes_on():
    """A row that has ended says `stop` until all have, whatever the model would say."""
    model = made("sum")
    source = tokens(6, 7)
    with torch.no_grad():
        free = by_forward(model, source, 12)
        firsts = {
            stop: (free == stop).int().argmax(1).masked_fill(~(free == stop).any(1), 99) for stop in range(15)
        }
        stop = next(s for s, first in firsts.items() if (first < 11).any() and (first == 99).any())
        got = model.generate(source, start=START, stop=stop, limit=12)
    for row, first in enumerate(firsts[stop].tolist()):
        assert (got[row, first:] == stop).all()
        assert torch.equal(got[row, :first], free[row, :first])


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_limit(limit):
    model = made("sum")
    assert model.generate(tokens(2, 5), start=START, stop=14, limit=limit).shape == (2, limit)
    with pytest.raises(ValueError, match="limit must be a whole number, at least 0, got -1"):
        model.generate(tokens(2, 5), start=START, stop=14, limit=-1)


@pytest.mark.parametrize("name", MODELS)
def test_padding_of_the_source_changes_nothing(name):
    model = made(name)
    source, target = tokens(1, 5), tokens(2, 6, seed=3)
    with torch.no_grad():
        want = model(source, target[:1])
        for side in ("left", "right"):
            if side == "left" and MODELS[name].get("learned"):
                continue  # learned positions of a source count from its first column
            batch, mask = tokens(2, 9, seed=9), torch.ones(2, 9, dtype=torch.bool)
            own = slice(4, 9) if side == "left" else slice(0, 5)
            batch[0, own] = source[0]
            mask[0] = False
            mask[0, own] = True
            got = model(batch, target, source_mask=mask)
            assert_near(got[:1], want, BUDGET[DOUBLE], side)
            other = torch.where(mask, batch, (batch + 1) % VOCABULARY)
            assert torch.equal(model(other, target, source_mask=mask), got)
            assert_near(got[1:], model(batch[1:], target[1:]), BUDGET[DOUBLE], "the other row")


@pytest.mark.parametrize("name", MODELS)
def test_a_target_sees_its_past_and_the_whole_source(name):
    model = made(name)
    source, target = tokens(2, 7), tokens(2, 8, seed=3)
    with torch.no_grad():
        full = model(source, target)
        later = target.clone()
        later[:, 5:] = (later[:, 5:] + 1) % VOCABULARY
        assert_near(model(source, later)[:, :5], full[:, :5], BUDGET[DOUBLE])
        for column in (0, 6):
            changed = source.clone()
            changed[:, column] = (changed[:, column] + 1) % VOCABULARY
            assert (model(changed, target) - full).abs().amax((0, 2)).min() > 1e-4


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_fully_hidden_source_gives_numbers(side):
    for name in ("sum", "softmax", "softmax rotary"):
        model = made(name)
        mask = torch.ones(2, 5, dtype=torch.bool)
        mask[0] = False
        logits = model(tokens(2, 5), tokens(2, 4), source_mask=mask)
        assert logits.isfinite().all()
        logits.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        got = model.generate(tokens(2, 5), start=START, stop=STOP, limit=4, source_mask=mask)
        assert len(got) == 2


def test_an_empty_source_gives_numbers():
    for name in ("sum", "softmax", "delta everything"):
        model = made(name)
        assert model(tokens(2, 0), tokens(2, 3)).isfinite().all()
        assert len(model.generate(tokens(2, 0), start=START, stop=STOP, limit=3)) == 2


@pytest.mark.parametrize(("rule", "decay"), RULE_CASES)
@pytest.mark.parametrize("name", MAPS)
def test_every_map_and_rule_trains_and_generates(name, rule, decay):
    torch.manual_seed(0)
    position = ("none", "rotary")[RULE_CASES.index((rule, decay)) % 2]
    chosen = config(name, rule=rule, decay=decay, position=position)
    whole = EncoderDecoderConfig(VOCABULARY, VOCABULARY, width=WIDTH, layers=1, hidden=8, attention=chosen)
    model = lively(EncoderDecoder(whole)).double()
    source, target = tokens(2, 5), tokens(2, 4, seed=3)
    loss = functional.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
    loss.backward()
    for what, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), what
        assert parameter.grad.abs().sum() > 0, what
    with torch.no_grad():
        full = by_forward(model, source, 4)
        got = model.generate(source, start=START, stop=STOP, limit=4)
        logits = model(source, torch.cat([torch.full((2, 1), START), full], 1)).topk(2).values
    close = (logits[..., 0] - logits[..., 1]).min()
    if close > BUDGET[DOUBLE] * (SIGNED_FACTOR if name in SIGNED else 1):  # else either is the largest
        assert torch.equal(got, cut(full, STOP))


@pytest.mark.parametrize("name", ["sum", "delta everything", "softmax"])
def test_the_rule_is_that_of_the_decoder(name):
    model = made(name)
    rule = MODELS[name].get("rule", "sum")
    for block in model.encoder:
        assert block.attention.config.rule == "sum" and not block.attention.causal
        assert block.attention.config.normalization == "attention"
    for block in model.decoder:
        assert block.attention.config.rule == rule and block.attention.causal
        assert block.cross.config.rule == "sum" and not block.cross.causal


def test_dropout_is_for_training_only():
    model = made("sum", dropout=0.5)
    source, target = tokens(2, 5), tokens(2, 4)
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


def test_autocast():
    for name in ("sum", "delta everything", "softmax rotary"):
        model = made(name, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens(2, 5), tokens(2, 4))
            got = model.generate(tokens(2, 5), start=START, stop=STOP, limit=4)
        assert logits.isfinite().all() and len(got) == 2
        logits.float().square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_checkpoint_is_the_model():
    model = made("favor+", torch.float32)
    torch.manual_seed(4)
    other = EncoderDecoder(EncoderDecoderConfig.from_dict(model.config.to_dict())).eval()
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(tokens(2, 5), tokens(2, 4)), model(tokens(2, 5), tokens(2, 4)))


def test_what_is_refused():
    short = made("sum", learned_positions=4)
    for call in (
        lambda: short(tokens(2, 5), tokens(2, 3)),
        lambda: short(tokens(2, 3), tokens(2, 5)),
        lambda: short.generate(tokens(2, 3), start=START, stop=14, limit=9),
    ):
        with pytest.raises(ValueError, match=r"position \d has no embedding: learned_positions=4\. Use"):
            call()
    with pytest.raises(ValueError, match="rotary-after needs causal attention"):
        EncoderDecoderConfig(5, 5, attention=config(position="rotary-after"))
    for name in ("sum", "softmax"):
        model = made(name)
        wrong = torch.ones(1, 5, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"key_mask must have shape \(B, M\) = \(2, 5\)"):
            model(tokens(2, 5), tokens(2, 3), source_mask=wrong)
        with pytest.raises(ValueError, match=r"key_mask must have shape \(B, M\) = \(2, 5\)"):
            model.generate(tokens(2, 5), start=START, stop=STOP, limit=3, source_mask=wrong)
