"""The language model: what it is made of, how it starts, and what it refuses."""

import math

import pytest
import torch
from nn_cases import BUDGET, VOCABULARY, WIDTH, assert_near, config, language_model, tokens
from torch.nn import functional

from reassoc.nn import Block, FeedForward, LanguageModel, LanguageModelConfig, attention

IDS = tokens(2, 9)


def test_the_model_is_blocks_between_embedding_and_its_transpose():
    model = language_model(config("favor+", rule="decay", convolution=2), learned_positions=9)
    x = model.embedding.weight[IDS] + model.positions.weight[:9]
    for block in model.blocks:
        x = x + block.attention(
            functional.layer_norm(x, (WIDTH,), block.attention_norm.weight, block.attention_norm.bias)
        )
        hidden = functional.layer_norm(x, (WIDTH,), block.feed_norm.weight, block.feed_norm.bias)
        hidden = functional.gelu(hidden @ block.feed_forward.up.weight.T + block.feed_forward.up.bias)
        x = x + hidden @ block.feed_forward.down.weight.T + block.feed_forward.down.bias
    x = functional.layer_norm(x, (WIDTH,), model.norm.weight, model.norm.bias)
    assert_near(model(IDS), x @ model.embedding.weight.T, BUDGET[torch.float64])


def test_a_fresh_model_knows_nothing():
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(vocabulary=50))
    ids = torch.randint(50, (4, 64))
    loss = functional.cross_entropy(model(ids).flatten(0, 1), torch.randint(50, (4 * 64,)))
    assert loss.item() == pytest.approx(math.log(50), abs=0.1)
    assert model.blocks[0].feed_forward.up.out_features == 4 * 128
    assert isinstance(model.blocks[0].feed_forward, FeedForward)


@pytest.mark.parametrize(
    "options",
    [{}, {"rule": "delta", "feature_map": "dpfp-1", "convolution": 3}, {"mixer": "softmax"}],
    ids=str,
)
def test_a_model_learns_to_repeat(options):
    """A period of three tokens: the next one is known after the first three."""
    options = dict(options)
    torch.manual_seed(0)
    chosen = config(options.pop("feature_map", "elu+1"), **options)
    model = LanguageModel(
        LanguageModelConfig(VOCABULARY, width=32, layers=2, attention=chosen, learned_positions=12)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    ids = torch.randint(VOCABULARY, (16, 3)).repeat(1, 4)
    losses = []
    for _ in range(60):
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.5)
    assert losses[-1] < 0.5 * losses[0]


def test_the_same_seed_makes_the_same_model():
    one, two = (language_model(config("hedgehog"), seed=3) for _ in range(2))
    assert all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("mixer", ["linear", "softmax"])
def test_sizes_of_the_twins_are_equal(mixer):
    model = language_model(config(mixer=mixer, convolution=3, output_gate=True, query_key_norm=True))
    other = language_model(config(convolution=3, output_gate=True, query_key_norm=True))
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in other.named_parameters()
    }


def test_dropout_is_for_training_only():
    model = language_model(config(), dropout=0.5)
    assert torch.equal(model(IDS), model(IDS))
    model.train()
    assert not torch.equal(model(IDS), model(IDS))


def test_dropout_is_of_everything_that_a_block_adds():
    cross = attention(WIDTH, config(), causal=False)
    block = Block(WIDTH, WIDTH, config(), dropout=1.0, cross=cross)
    x, context = torch.randn(2, 5, WIDTH), torch.randn(2, 3, WIDTH)
    assert torch.equal(block(x, context=context)[0], x)
    assert not torch.equal(block.eval()(x, context=context)[0], x)


def test_learned_positions_are_counted_from_the_first_real_token():
    model = language_model(config(), learned_positions=9)
    with torch.no_grad():
        _, states = model(IDS[:, :6], return_states=True)
        model.step(IDS[:, 6:7], states)
        model(IDS[:, 7:], states=states)
        padded, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.bool)
        padded[:, 11:], mask[:, :11] = IDS, False
        assert_near(model(padded, key_mask=mask)[:, 11:], model(IDS), BUDGET[torch.float64])
        for call in (
            lambda: model(tokens(2, 10)),
            lambda: model(tokens(2, 10), key_mask=torch.ones(2, 10, dtype=torch.bool)),
            lambda: model(IDS[:, :4], states=states),
            lambda: list(model.generate(IDS, 3)),
        ):
            with pytest.raises(ValueError, match=r"position \d+ has no embedding: learned_positions=9\. Use"):
                call()
        assert model(IDS[:, :0]).shape == (2, 0, VOCABULARY)
        assert model(IDS[:, :0], key_mask=torch.ones(2, 0, dtype=torch.bool)).shape == (2, 0, VOCABULARY)


REFUSED = {
    "rank": (lambda m: m(IDS[0]), r"tokens must have shape \(B, N\), got \(9,\)"),
    "rank of a step": (lambda m: m.step(IDS[:, 0], m(IDS, return_states=True)[1]), r"tokens must have shape"),
    "two at a step": (lambda m: m.step(IDS[:, :2], m(IDS, return_states=True)[1]), r"shape \(B, 1,"),
    "mask": (lambda m: m(IDS, key_mask=torch.ones(1, 9, dtype=torch.bool)), r"key_mask must have shape"),
    "nothing to begin with": (lambda m: next(m.generate(IDS[:, :0], 3)), r"N at least 1, got \(2, 0\)"),
    "generate from a row": (lambda m: next(m.generate(IDS[0], 3)), r"generate needs tokens \(B, N\)"),
    "count": (lambda m: next(m.generate(IDS, -1)), "count must be a whole number, at least 0, got -1"),
    "temperature": (
        lambda m: next(m.generate(IDS, 1, temperature=-1.0)), "temperature must be at least 0, got -1.0",
    ),
    "no number": (
        lambda m: next(m.generate(IDS, 1, temperature=math.nan)), "temperature must be a finite number",
    ),
    "padding on the right": (
        lambda m: next(m.generate(IDS, 1, key_mask=torch.arange(9).expand(2, 9) < 5)), "pad on the left",
    ),
}  # fmt: skip


@pytest.mark.parametrize("learned", [0, 20])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what, learned):
    call, message = REFUSED[what]
    for mixer in ("linear", "softmax"):
        with pytest.raises(ValueError, match=message):
            call(language_model(config(mixer=mixer), learned_positions=learned))


def test_a_mask_of_numbers_is_refused():
    for mixer in ("linear", "softmax"):
        for learned in (0, 20):
            model = language_model(config(mixer=mixer), learned_positions=learned)
            with pytest.raises(TypeError, match="key_mask must be a bool tensor"):
                model(IDS, key_mask=torch.ones(2, 9, dtype=torch.int64))
