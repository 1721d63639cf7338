"""Language models compared: the data, the numbers, the report; every mistake is one line."""

import errno
import json
import math
import statistics
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from reassoc.lab import InputError
from reassoc.lab._study import render, write_study
from reassoc.lab.lm import Settings, checkpoint, compare, forget_parts, load_model, read, study
from reassoc.lab.lm import container as container_module
from reassoc.lab.lm import text as text_module
from reassoc.lab.lm import trainer as trainer_module
from reassoc.lab.lm.contrasts import against_first, contrasts
from reassoc.lab.lm.evaluate import bits_per_byte, nats, perplexity
from reassoc.lab.lm.ranks import Ranks
from reassoc.lab.lm.run import Results
from reassoc.lab.lm.streams import Streams
from reassoc.lab.lm.trainer import Trainer
from reassoc.lab.recipes import recipe, recipes
from reassoc.nn import LanguageModel

TINY = Settings(width=16, layers=1, heads=2, segment=16, batch=2, steps=6, warmup=2)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A text of 2,000 bytes: 1,800 to train on, 100 each to judge by."""
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_bytes(bytes(ord("a") + i * i % 23 for i in range(2000)))
    return read(path)


# The text


def test_the_embedded_text_is_what_its_provenance_says():
    found = read()
    folder = Path(text_module.__file__).parents[1] / "data"
    assert found.sha256 in (folder / "PROVENANCE.md").read_text()
    assert (found.vocabulary, found.tokenizer) == (256, None)
    sizes = [len(split.tokens) for split in (found.training, found.validation, found.test)]
    assert sum(sizes) == 949_479 and sizes[0] == 949_479 * 9 // 10 and abs(sizes[1] - sizes[2]) <= 1
    assert found.words(found.training.tokens[:40].tolist()) == "The book of the generation of Jesus Chri"
    assert found.words(found.test.tokens[-5:].tolist()) == "men.\n"


def test_any_bytes_are_a_text(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 4)
    found = read(path)
    assert (
        torch.cat([s.tokens for s in (found.training, found.validation, found.test)]).tolist()
        == [*range(256)] * 4
    )
    assert found.words([0xFF]) == "�"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), special_tokens=["?"],
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["wörter und wörter und worte"], trainer)
    made.enable_truncation(7)  # as a saved one may have it: must not cut the text
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def test_a_tokenizer_sees_whole_characters_and_its_bytes_are_counted(tmp_path, tokenizer):
    content = "wörter und " * 50 + "ö" * 41  # for some of these lengths a cut falls into an ö
    maker, _ = text_module.load_tokenizer(tokenizer)
    for extra in range(4):
        path = tmp_path / "text.txt"
        path.write_text(content + "ö" * extra, encoding="utf-8")
        found = read(path, tokenizer)
        parts = [found.training, found.validation, found.test]
        assert "".join(found.words(s.tokens.tolist()) for s in parts) == content + "ö" * extra
        for split in parts:
            # Letters of this alphabet are a byte each; a first token that ends within ö counts it whole.
            first = len(maker.id_to_token(split.tokens[0].item()))
            assert len(found.words(split.tokens.tolist()).encode()) - split.bytes in (first, first + 1)
    assert found.vocabulary > 256 and found.tokenizer["name"] == "tokenizer.json"


def test_texts_that_cannot_be_read(tmp_path, tokenizer, monkeypatch):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good \xff bad " * 40)
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    for arguments, words in (
        ((tmp_path / "none.txt",), "no such file"),
        ((tmp_path,), "is a folder"),
        ((bad, tokenizer), "not UTF-8 text"),
        ((None, wrong), "not a tokenizer.json"),
        ((None, binary), "not UTF-8"),
        ((None, tmp_path / "none.json"), "no such file"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            read(*arguments)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install 'reassoc\[lab\]'"):
        read(None, tokenizer)


# The data


def test_streams_follow_the_text_and_are_divided_among_processes():
    tokens = torch.arange(1000)
    whole = Streams(tokens, batch=4, segment=10)
    assert whole.segments == 24  # 999 // 4 = 249 tokens a stream
    halves = [Streams(tokens, 4, 10, rank, 2) for rank in range(2)]
    for step in (0, 1, 23, 24, 49):
        inputs, targets, fresh = whole.at(step)
        first = step % 24 * 10
        assert inputs[:, 0].tolist() == [first, 249 + first, 498 + first, 747 + first]
        assert torch.equal(inputs + 1, targets) and torch.equal(inputs.diff(dim=1), torch.ones(4, 9))
        assert fresh == (step % 24 == 0)
        assert torch.equal(torch.cat([half.at(step).inputs for half in halves]), inputs)
    with pytest.raises(InputError, match="4 streams cannot be divided among 3 processes"):
        Streams(tokens, 4, 10, 0, 3)


def test_the_longest_segment_that_fits(short):
    # 1,800 tokens: 2 streams of 899 and the target of the last.
    Settings(batch=2, segment=899).check_text(short)
    with pytest.raises(InputError, match=r"1,801 are needed for one segment of 900 in each of 2 streams"):
        Settings(batch=2, segment=900).check_text(short)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 30, "heads": 4}, "--width: 30 is not a multiple of 4 heads"),
        ({"steps": 0}, "--steps"),
        ({"rate": math.inf}, "--rate"),
        ({"clip": 0.0}, "--clip"),
        ({"dropout": 1.0}, "--dropout"),
        ({"warmup": -1}, "--warmup"),
    ],
)
def test_impossible_settings(options, words):
    with pytest.raises(InputError, match=words):
        Settings(**options)


def test_learning_rate_warms_up_and_falls_to_a_tenth(short):
    settings = Settings(**vars(TINY) | {"steps": 40, "warmup": 10, "rate": 1e-3})
    rates = []
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(recipe("relu"), settings, short, 0, Ranks())
        for _ in range(40):
            trainer.step()
            (rate,) = {group["lr"] for group in trainer.optimizer.param_groups}
            rates.append(rate / 1e-3)
    assert rates[:11] == pytest.approx([*(0.1 * (i + 1) for i in range(10)), 1.0])
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[-1] < 0.11


# Training


def trained(name, text, settings=TINY, seed=0):
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(recipe(name), settings, text, seed, Ranks())
        while not trainer.finished:
            trainer.step()
    return trainer


def test_a_model_learns(short):
    settings = Settings(width=32, layers=1, heads=2, segment=32, batch=4, steps=60, warmup=5, rate=1e-2)
    trainer = trained("elu+1", short, settings)
    # The text repeats with period 23: far less than the log 256 of knowing nothing, or the log 12 of
    # knowing only which letters there are (i * i mod 23 takes 12 values).
    assert trainer.curve.losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert statistics.mean(trainer.curve.losses[-5:]) < math.log(12) / 2
    value = nats(trainer.model, short.test, 32, carried=False)
    assert value < math.log(12) and perplexity(value) == pytest.approx(math.exp(value))
    assert bits_per_byte(value, short.test) == pytest.approx(value / math.log(2))


def test_carried_context_is_used_without_gradient_and_dropped_where_the_text_begins_again(short):
    settings = Settings(width=16, layers=1, heads=2, segment=400, batch=2, steps=3, warmup=0)
    carried, truncated = (trained(name, short, settings).curve.losses for name in ("elu+1:carried", "elu+1"))
    # 899 tokens a stream make two segments: step 1 has a context, steps 0 and 2 have none.
    assert carried[0] == truncated[0]
    assert carried[1] != truncated[1]
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(recipe("elu+1:carried"), settings, short, 0, Ranks())
        for _ in range(2):
            trainer.step()
        assert trainer.states.length.tolist() == [800, 800]
        trainer.step()
    assert trainer.states.length.tolist() == [400, 400]


def test_redraws_come_when_due_and_drop_the_carried_context(short):
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(recipe("favor+:features=8:redraw=2:carried"), TINY, short, 0, Ranks())
        seen = []
        for _ in range(4):
            trainer.step()
            draw = trainer.model.state_dict()["blocks.0.attention.feature_map.draw"][1].item()
            seen.append((draw, trainer.states.length.unique().item() // TINY.segment))
    # The draw that a step was trained with, and segments carried: a model is judged as it was trained.
    assert seen == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_every_process_has_random_numbers_of_its_own():
    # torch looks at the low 32 bits of a seed only.
    seeds = [trainer_module._mixed(seed, rank) for seed in range(3) for rank in range(1, 5)]
    assert len({*seeds, 0, 1, 2}) == len(seeds) + 3
    assert all(0 <= seed < 1 << 32 for seed in seeds)


def test_a_run_that_diverged_at_once_goes_on_from_its_checkpoint(short, tmp_path):
    path = tmp_path / "c.safetensors"
    with torch.random.fork_rng(devices=[]):
        first, second = (Trainer(recipe("elu+1"), TINY, short, 0, Ranks()) for _ in range(2))
    with torch.no_grad():
        first.model.embedding.weight.fill_(math.inf)
    first.step()
    assert first.curve.diverged == 0 and not first.optimizer.state
    checkpoint.save(path, first, {"seed": 0})
    with torch.random.fork_rng(devices=[]):
        assert checkpoint.resume(path, second, {"seed": 0})
    assert second.finished and second.curve.diverged == 0


def test_judging_equals_the_definition(short):
    model = trained("elu+1:delta:carried", short).model
    tokens = short.test.tokens
    with torch.no_grad():
        whole = model(tokens[None, :-1])[0].log_softmax(-1).double()
        cut = torch.cat([model(part[None])[0] for part in tokens[:-1].split(16)]).log_softmax(-1).double()
    for logits, carried in ((whole, True), (cut, False)):
        expected = -logits.gather(1, tokens[1:, None]).mean().item()
        # float32 logits of size 10 at most, in another order of sums: ten times their rounding.
        assert nats(model, short.test, 16, carried) == pytest.approx(expected, rel=1e-5)
    before = short.before("test")
    assert torch.equal(before, short.validation.tokens) and len(short.before("validation")) == 100
    with torch.no_grad():
        after = model(torch.cat([before, tokens[:-1]])[None])[0, len(before) :].log_softmax(-1).double()
    expected = -after.gather(1, tokens[1:, None]).mean().item()
    assert nats(model, short.test, 16, True, before) == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_not_finite_is_a_result(short, tmp_path, monkeypatch):
    step = Trainer.step

    def poisoned(self):
        if self.recipe.name == "relu" and self.step_number == 3:
            with torch.no_grad():
                self.model.embedding.weight.fill_(math.inf)
        step(self)

    monkeypatch.setattr(Trainer, "step", poisoned)
    results = compare(recipes(["relu", "elu+1"]), short, TINY, folder=tmp_path)
    first, second = results.runs
    assert (
        first["diverged"] == 3
        and len(first["losses"]) == 4
        and math.isnan(first["nats"]["test"]["truncated"])
    )
    assert second["diverged"] is None and first["sample"] is None
    found = study(results)
    assert any("relu, seed 0: diverged at step 4 of 6." in sentence for sentence in found.answer)
    assert found.answer[0].startswith("Lowest test perplexity: elu+1")
    write_study(found, tmp_path, "reassoc lm")
    again = compare(recipes(["relu", "elu+1"]), short, TINY, folder=tmp_path)
    assert again.runs[0]["diverged"] == 3


# Checkpoints, models


def stopped(name, text, path, steps, settings=TINY):
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(recipe(name), settings, text, 0, Ranks())
        for _ in range(steps):
            trainer.step()
        checkpoint.save(path, trainer, {"seed": 0})


@pytest.mark.parametrize(
    "name", ["softmax:learned", "elu+1:gated-delta:conv=3:carried", "favor+:features=8:redraw=2:carried"]
)
def test_a_checkpoint_goes_on_to_the_same_bits(name, short, tmp_path):
    settings = Settings(**vars(TINY) | {"dropout": 0.1, "steps": 8})
    path = tmp_path / "c.safetensors"
    stopped(name, short, path, 5, settings)
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(recipe(name), settings, short, 0, Ranks())
        assert checkpoint.resume(path, trainer, {"seed": 0}) and trainer.step_number == 5
        while not trainer.finished:
            trainer.step()
    whole = trained(name, short, settings)
    assert trainer.curve.losses == whole.curve.losses and len(whole.curve.losses) == 8
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name


def test_checkpoints_that_do_not_fit_are_refused_in_one_line(short, tmp_path):
    path = tmp_path / "c.safetensors"
    stopped("elu+1", short, path, 2)
    content = path.read_bytes()
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(recipe("elu+1"), TINY, short, 0, Ranks())
        for key, words in (
            ({"seed": 1}, "made with another seed .0 instead of 1."),
            ({"tokenizer": {"name": "a", "sha256": "b"}}, "made with another tokenizer"),
        ):
            with pytest.raises(InputError, match=words):
                checkpoint.resume(path, trainer, key)
        for broken, words in (
            (content[:-7], "damaged"),
            (content[: len(content) // 2], "damaged"),
            (b"\x10" * 40, "damaged"),
            (b"", "damaged"),
            (content.replace(b"reassoc-lm-checkpoint-1", b"reassoc-lm-checkpoint-9"), "not a checkpoint"),
        ):
            path.write_bytes(broken)
            with pytest.raises(InputError, match=words) as caught:
                checkpoint.resume(path, trainer, {"seed": 0})
            assert "\n" not in str(caught.value)
            assert path.read_bytes() == broken
        other = Trainer(recipe("elu+1:delta"), TINY, short, 0, Ranks())
        path.write_bytes(content)
        with pytest.raises(InputError, match="damaged checkpoint"):
            checkpoint.resume(path, other, {"seed": 0})


def test_no_space_left_leaves_the_earlier_checkpoint(short, tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    stopped("elu+1", short, path, 2)
    before = path.read_bytes()

    def full(self, data):
        with open(self, "wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(container_module.Path, "write_bytes", full)
    with pytest.raises(InputError, match=r"No space left on device.*the earlier one is as it was") as caught:
        stopped("elu+1", short, path, 4)
    monkeypatch.undo()
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_finished_models_come_back(short, tmp_path, tokenizer):
    results = compare(
        recipes(["favor+:features=8:redraw=2", "softmax:learned"]), short, TINY, folder=tmp_path
    )
    for run in results.runs:
        model = load_model(tmp_path / "models" / checkpoint.file_name(run["recipe"], 0))
        assert isinstance(model, LanguageModel) and not model.training
        # As saved, so the same bits.
        assert nats(model, short.test, 16, carried=False) == run["nats"]["test"]["truncated"]
    path = tmp_path / "models" / "softmax_learned-seed0.safetensors"
    with pytest.raises(InputError, match=r"was trained on bytes; tokenizer.json does not fit it"):
        load_model(path, tokenizer)
    content = path.read_bytes()
    for broken, words in (
        (content[:-1], "damaged"),
        (content.replace(b'vocabulary\\": 256', b'vocabulary\\": 257'), "without a tokenizer|described"),
        (content.replace(b'width\\": 16,', b'width\\": 99,'), "does not fit its own description"),
        (content.replace(b'layers\\": 1,', b'layers\\": 9,'), "does not fit its own description"),
        (content.replace(b"reassoc-lm-model-1", b"reassoc-lm-model-2"), "not a model"),
    ):
        assert broken != content
        path.write_bytes(broken)
        with pytest.raises(InputError, match=words) as caught:
            load_model(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no such file"):
        load_model(tmp_path / "none")


def test_a_model_knows_its_tokenizer(tmp_path, tokenizer):
    path = tmp_path / "text.txt"
    path.write_text("wörter und worte " * 100, encoding="utf-8")
    text = read(path, tokenizer)
    compare(recipes(["elu+1"]), text, TINY, folder=tmp_path)
    model = tmp_path / "models" / "elu+1-seed0.safetensors"
    assert load_model(model, tokenizer).config.vocabulary == text.vocabulary
    other = tmp_path / "other.json"
    other.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(InputError, match="was trained with another tokenizer"):
        load_model(model, other)


# The comparison


@pytest.fixture(scope="module")
def compared(short, tmp_path_factory):
    names = [
        "softmax",
        "elu+1",
        "elu+1:delta",
        "elu+1:delta:attention",
        "elu+1:delta:carried",
        "elu+1:learned",
    ]
    folder = tmp_path_factory.mktemp("compared")
    calls = []
    found = compare(
        recipes(names), short, TINY, [1, 0], folder=folder, progress=lambda *about: calls.append(about)
    )
    return found, folder, calls


def test_a_comparison_is_complete_and_repeats(compared, short, tmp_path):
    results, folder, calls = compared
    assert [(run["recipe"], run["seed"]) for run in results.runs][:3] == [
        ("softmax", 1),
        ("softmax", 0),
        ("elu+1", 1),
    ]
    assert calls[-1][:2] == (6 * 2 * 6, 6 * 2 * 6)
    assert [a[0] for a in calls] == sorted(a[0] for a in calls)
    for run in results.runs:
        assert len(run["losses"]) == 6 and all(map(math.isfinite, run["losses"]))
        possible = not run["recipe"].startswith(("softmax", "elu+1:learned"))
        assert (run["nats"]["test"]["carried"] is not None) == possible
        assert run["sample"] is not None
    softmax, elu = results.runs[0], results.runs[2]
    assert softmax["parameters"] == elu["parameters"]
    # Keys and values of 16 tokens, 2 heads of 8; S and z of 2 heads of 8; and a few counts.
    assert 0 <= softmax["state_bytes"] - 4 * 16 * 2 * 16 < 128
    assert 0 <= elu["state_bytes"] - 4 * 2 * 8 * 9 < 128
    again = compare(recipes(["elu+1:delta"]), short, TINY, [0], folder=tmp_path)
    same = next(run for run in results.runs if (run["recipe"], run["seed"]) == ("elu+1:delta", 0))
    assert again.runs[0]["losses"] == same["losses"] and again.runs[0]["nats"] == same["nats"]
    assert not list((folder / "checkpoints").iterdir()) and len(list((folder / "models").iterdir())) == 12


def test_finished_parts_are_kept_until_told(compared, short, tmp_path):
    folder = tmp_path
    first = compare(recipes(["elu+1"]), short, TINY, folder=folder)
    (folder / "models" / "elu+1-seed0.safetensors").unlink()
    second = compare(recipes(["elu+1", "relu"]), short, TINY, folder=folder)
    assert second.runs[0] == first.runs[0]  # seconds included: not trained again
    forget_parts(folder, second)
    assert {p.name for p in folder.iterdir()} == {"models"}


def test_contrasts_differ_in_one_choice(compared):
    results, _, _ = compared
    found = {(c.choice, c.base, c.other) for c in contrasts(results)}
    assert found == {
        ("rule", "elu+1", "elu+1:delta"),
        ("rule", "elu+1", "elu+1:delta:attention"),
        ("normalization", "elu+1:delta", "elu+1:delta:attention"),
        ("context", "elu+1:delta", "elu+1:delta:carried"),
        ("position", "elu+1", "elu+1:learned"),
    }
    assert [c.other for c in against_first(results)] == [r.name for r in results.recipes[1:]]


def by_hand(short, scores):
    """Results with the test nats given by recipe and seed."""
    runs = []
    for name, values in scores.items():
        for seed, value in enumerate(values):
            runs.append({
                "recipe": name, "seed": seed, "parameters": 100, "state_bytes": 64, "diverged": None,
                "losses": [3.0, 2.0, 2.5], "norms": [0.5, 2.0, 0.1], "seconds": [0.1, 0.1, 0.2],
                "sample": None,
                "nats": {part: {"truncated": value, "carried": None} for part in ("validation", "test")},
            })  # fmt: skip
    settings = TINY.to_json() | {"warmup": 0}
    seeds = list(range(len(next(iter(scores.values())))))
    manifest = {
        "settings": settings, "seeds": seeds, "versions": {}, "machine": {},
        "text": {"name": "<b>a</b>", "sha256": "", "vocabulary": 256, "tokens": {"training": 1800}},
    }  # fmt: skip
    return Results(recipes(list(scores)), short, runs, manifest)


def test_differences_within_the_spread_are_called_so(short):
    results = by_hand(short, {"relu": [1.0, 1.1], "relu:delta": [0.9, 0.95], "elu+1": [1.05, 1.2]})
    rule, *others = contrasts(results)
    assert (rule.was, rule.now, rule.apart) == ("sum", "delta", True) and not others
    (worse,) = contrasts(by_hand(short, {"relu": [1.0, 1.1], "relu:none": [1.2, 1.3]}))
    assert (worse.was, worse.now, worse.apart) == ("attention", "none", True) and worse.change > 0
    assert rule.changes == pytest.approx([math.expm1(-0.1), math.expm1(-0.15)])
    assert [c.apart for c in against_first(results)] == [True, False]
    sentences = study(results).answer
    low, high = math.exp(0.9), math.exp(0.95)
    assert sentences[0] == (
        f"Lowest test perplexity: relu:delta, {(low + high) / 2:.3f} ({low:.3f} to {high:.3f})."
    )
    assert sentences[1] == "Rule delta instead of sum (relu:delta against relu): 11.7 % lower perplexity."
    assert "elu+1 against relu: 7.8 % higher perplexity, which is within the spread over seeds." in sentences
    single = study(by_hand(short, {"relu": [1.0], "elu+1": [0.9]})).answer
    assert single[1].startswith("One seed") and single[-1].endswith("9.5 % lower perplexity (one seed).")


def test_the_row_of_a_run(short):
    row = study(by_hand(short, {"relu": [1.0]})).rows[0]
    assert row["largest_rise"] == 0.5 and row["largest_gradient"] == 2.0
    assert row["clipped_share"] == pytest.approx(1 / 3) and row["training_loss"] == pytest.approx(2.5)
    assert row["test_perplexity_truncated"] == pytest.approx(math.e) and math.isnan(
        row["test_perplexity_carried"]
    )
    assert row["test_bits_per_byte"] == pytest.approx(1 / math.log(2)) and "seconds" not in row


def test_the_report_is_escaped_and_the_tables_repeat(compared, short, tmp_path):
    results, _, _ = compared
    found = study(results)
    page = write_study(found, tmp_path / "a", "reassoc lm").read_text(encoding="utf-8")
    write_study(study(results), tmp_path / "b", "reassoc lm")
    for name in ("lm.csv", "lm.json", "curves.csv", "differences.csv", "samples.csv", "report.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for title in ("Recipes", "One choice at a time", "Judged both ways", "Training", "What the models write"):
        assert f">{title}</h2>" in page
    assert {p.name for p in (tmp_path / "a" / "figures").iterdir()} == {
        "lm-loss.png", "lm-loss.svg", "lm-state.png", "lm-state.svg"
    }  # fmt: skip
    whole = json.loads((tmp_path / "a" / "lm.json").read_text())
    assert len(whole["rows"]) == 12 and "times" not in whole and whole["settings"]["segment"] == 16
    assert "<b>a</b>" not in render(study(by_hand(short, {"relu": [1.0]})), "reassoc lm")


def test_mistakes_before_any_work(short, tmp_path):
    for arguments, words in (
        ({"seeds": []}, "--seeds"),
        ({"seeds": [-1]}, "--seeds"),
        ({"every": 0}, "--checkpoint"),
        ({"threads": 0}, "--threads"),
    ):
        with pytest.raises(InputError, match=words):
            compare(recipes(["relu"]), short, TINY, folder=tmp_path / "out", **arguments)
    odd = Settings(**vars(TINY) | {"width": 6})
    with pytest.raises(InputError, match="recipe 'hedgehog:rotary' does not fit"):
        compare(recipes(["hedgehog:rotary"]), short, odd, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()
