"""Measures of a conversion against numbers known otherwise."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import reassoc.hf as hf  # noqa: E402
from reassoc._errors import InputError  # noqa: E402
from reassoc.hf.evaluate import CANDIDATES, WORDS, block_losses, wilson  # noqa: E402

KNOWN = ["[UNK]", "The", "pass", "key", "is", ".", "Remember", "it", *WORDS, *(f"w{i}" for i in range(40))]
TEXT = " ".join(f"w{i * i * 7 % 40}" for i in range(600))
IS = KNOWN.index("is")


def make_tokenizer(words=KNOWN):
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def make_llama(kind=transformers.LlamaForCausalLM, **changes):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(KNOWN), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
        **changes,
    )  # fmt: skip
    return kind(config)


def rows(length, count=4):
    return hf.blocks(make_tokenizer(), [TEXT], length)[:count]


# Perplexity


def test_block_losses_are_the_models_own_loss():
    model, examples = make_llama().eval(), rows(48)
    with torch.no_grad():
        own = [model(row["input_ids"][None], labels=row["input_ids"][None]).loss.item() for row in examples]
    # Sums of 47 float32 losses of size 10 at most, in another order.
    assert block_losses(model, examples) == pytest.approx(own, rel=47 * 2**-23)
    assert hf.perplexity(model, examples) == pytest.approx(math.exp(sum(own) / 4), rel=1e-4)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    model = make_llama(tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    assert hf.perplexity(model, rows(48)) == pytest.approx(len(KNOWN), rel=1e-5)
    assert model.training  # as it was


def test_many_positions_are_taken_piece_by_piece(monkeypatch):
    model, examples = make_llama(), rows(48)
    whole = block_losses(model, examples)
    monkeypatch.setattr("reassoc.hf.evaluate.LOGITS", 10)
    assert block_losses(model, examples) == pytest.approx(whole, rel=47 * 2**-23)


def test_what_has_no_perplexity():
    with pytest.raises(InputError, match="BertModel predicts no next token"):
        block_losses(make_bert(), rows(48))
    with pytest.raises(InputError, match="at least one block"):
        block_losses(make_llama(), [])
    with pytest.raises(InputError, match="length is 300; this model takes at most 256 tokens"):
        block_losses(make_llama(), rows(300))


# Embeddings


def make_bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(KNOWN), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def test_embeddings_are_means_over_real_tokens():
    model, examples = make_bert(), [rows(48)[0], *rows(20)]
    found = hf.embeddings(model, examples, batch=2)
    with torch.no_grad():
        for row, got in zip(examples, found, strict=True):
            alone = model(row["input_ids"][None]).last_hidden_state[0].mean(0)
            torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)  # float32 through two layers
    with pytest.raises(InputError, match="at least one line"):
        hf.embeddings(model, [])


def test_agreement_of_known_vectors():
    first = torch.eye(2).repeat(10, 1)
    second = first.clone()
    second[0] = torch.tensor([3.0, 4.0])  # cosine 0.6
    second[1] = torch.tensor([0.0, -2.0])  # cosine -1
    found = hf.agreement(first, second)
    assert found.mean == pytest.approx((18 + 0.6 - 1) / 20)
    # The 5th percentile of 20 ordered values lies at position 0.95, between -1 and 0.6.
    assert found.low == pytest.approx(-1 + 0.95 * 1.6)
    assert found.lines == 20


# Recall


class Searching(transformers.LlamaForCausalLM):
    """Answers "is" with what followed the first "is" among the last ``reach`` tokens, or with nothing."""

    reach = 1 << 20
    lengths = None

    def forward(self, input_ids, **_):
        type(self).lengths = (type(self).lengths or set()) | {input_ids.shape[1]}
        logits = torch.zeros(1, input_ids.shape[1], len(KNOWN))
        seen = input_ids[0, -self.reach :].tolist()
        assert seen[-1] == IS
        if IS in seen[:-1]:
            logits[0, -1, seen[seen.index(IS) + 1]] = 1.0
        return transformers.modeling_outputs.CausalLMOutput(logits=logits)


@pytest.mark.parametrize(("reach", "right"), [(1000, 40), (110, 40), (100, 2)])
def test_recall_asks_for_the_key_over_the_distance(monkeypatch, reach, right):
    # From the word to the question: the word, ". Remember it .", the distance, "The pass key is".
    monkeypatch.setattr(Searching, "reach", reach)
    monkeypatch.setattr(Searching, "lengths", None)
    found = hf.recall(make_llama(Searching), make_tokenizer(), [TEXT, TEXT], 100)
    # Without an answer the first candidate is named, which is right for two of forty trials.
    assert (found.right, found.trials, found.distance) == (right, 40, 100)
    assert found.low <= right / 40 <= found.high
    assert Searching.lengths == {32 + 4 + 1 + 4 + 100 + 4}


def test_trials_have_different_text_and_words(monkeypatch):
    seen = []

    class Recording(Searching):
        def forward(self, input_ids, **_):
            seen.append(tuple(input_ids[0].tolist()))
            return super().forward(input_ids)

    hf.recall(make_llama(Recording), make_tokenizer(), [TEXT], 50, trials=20)
    assert len({row[36] for row in seen}) == CANDIDATES == 20
    assert len({row[:32] for row in seen}) > 10


def test_recall_refuses(monkeypatch):
    model, tokenizer = make_llama(), make_tokenizer()
    with pytest.raises(InputError, match="needs 632 tokens of each text, the shortest has 600"):
        hf.recall(model, tokenizer, [TEXT], 600)
    with pytest.raises(InputError, match="length is 345; this model takes at most 256 tokens"):
        hf.recall(model, tokenizer, [TEXT], 300)
    with pytest.raises(InputError, match="tells 1 of 50 words apart"):
        hf.recall(model, make_tokenizer(["[UNK]", "apple", "w1"]), [TEXT], 50)
    with pytest.raises(InputError, match="BertModel predicts no next token"):
        hf.recall(make_bert(), tokenizer, [TEXT], 50)
    with pytest.raises(InputError, match="at least 1 token and 1 trial"):
        hf.recall(model, tokenizer, [TEXT], 0)


def test_wilson_interval_of_known_shares():
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
