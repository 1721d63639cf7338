"""Translation: the pairs are what they should be, padding is nothing, and small models learn."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sacrebleu")

from reassoc.lab import InputError
from reassoc.lab._study import render
from reassoc.lab.recipes import recipe
from reassoc.lab.seq2seq import (
    Settings,
    forget_parts,
    numbers,
    read_pairs,
    read_sides,
    seq2seq,
    study,
    translate,
)
from reassoc.lab.seq2seq import run as run_module
from reassoc.lab.seq2seq.numbers import spell
from reassoc.lab.seq2seq.pairs import PADDING, STOP, check_pairs, decode, divide, encode
from reassoc.lab.seq2seq.score import Bleu, exact_match

TINY = Settings(
    recipes=("softmax:learned", "elu+1:delta:learned"), seeds=(0,), width=16, layers=1, heads=2, batch=8,
    steps=3, every=2, held_out=5,
)  # fmt: skip
PAIRS = [(f"{n} {n + 1}", f"{n}") for n in range(60)]


@pytest.fixture(autouse=True)
def one_thread():
    """These models are too small to share: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def value(words):
    """What number words mean, by adding up, which is not how they are made."""
    total = part = 0
    small = {spell(n): n for n in range(20)} | {spell(n): n for n in range(20, 100, 10)} | {"a": 1}
    for word in words.replace("-", " ").split():
        if word == "hundred":
            part *= 100
        elif word == "thousand":
            total, part = total + 1000 * part, 0
        elif word != "and":
            part += small[word]
    return total + part


def test_number_words_mean_their_numbers():
    for number in [*range(0, 2000), *range(2000, 10**6, 997), 999_999]:
        for form in range(16):
            options = {
                name: bool(form >> bit & 1)
                for bit, name in enumerate(("conjunction", "hyphen", "article", "hundreds"))
            }
            assert value(spell(number, **options)) == number, (number, options)


def test_number_words_as_people_write_them():
    assert (
        spell(0) == "zero" and spell(305) == "three hundred and five" and spell(20_000) == "twenty thousand"
    )
    assert spell(305, conjunction=False) == "three hundred five"
    assert spell(121, article=True, hyphen=False) == "a hundred and twenty one"
    assert spell(1234, hundreds=True) == "twelve hundred and thirty-four"
    assert spell(1034, hundreds=True) == spell(1034) == "one thousand and thirty-four"
    assert spell(2034, hundreds=True) == spell(2034)  # nobody says twenty hundred
    assert spell(2001) == "two thousand and one" and spell(2100) == "two thousand one hundred"
    assert spell(100_000, article=True) == "a hundred thousand"


def test_the_default_task_has_every_number_once_and_all_lengths():
    pairs = numbers()
    digits = [target for _, target in pairs]
    assert len(set(digits)) == len(pairs) == 8_000 and numbers() == pairs != numbers(seed=1)
    assert {len(text) for text in digits} == {1, 2, 3, 4}
    assert all(str(value(source)) == target for source, target in pairs[:500])


def test_splits_share_no_source():
    pairs = [*PAIRS, ("0 1", "another"), ("5 6", "5")]
    splits = divide(pairs, 5, 0)
    sources = [{source for source, _ in part} for part in splits]
    assert not sources[0] & sources[1] and not sources[0] & sources[2] and not sources[1] & sources[2]
    assert [len(part) for part in sources] == [50, 5, 5]
    assert sorted(pair for part in splits for pair in part) == sorted(set(pairs))
    assert divide(pairs, 500, 0) != divide(pairs, 500, 1)
    assert len(divide(pairs, 500, 0).test) in (6, 7)  # a tenth of the sources


def test_bytes_of_any_text_come_back():
    texts = ["", "abc", "žluťoučký kůň", "日本"]
    tokens = encode(texts)
    assert tokens.shape == (4, max(len(text.encode()) for text in texts)) and int(tokens.max()) == PADDING
    assert decode(tokens) == texts
    assert decode(torch.tensor([[104, 105, STOP, 33], [255, 104, STOP, STOP]])) == ["hi", "�h"]


def test_padding_changes_no_loss_and_no_translation():
    settings = replace(TINY, recipes=("elu+1:learned",))
    model = run_module.build(settings, recipe("elu+1:learned"), 40, 0)
    short, long = ("one", "1"), ("one hundred and twenty-one thousand", "121000")
    alone, other = (run_module.batch_loss(model, [pair]).item() for pair in (short, long))
    both = run_module.batch_loss(model, [short, long]).item()
    # Mean over 2 + 7 bytes, stops included. float32 sums in another order: 1e-5 is design.md's budget.
    assert both == pytest.approx((2 * alone + 7 * other) / 9, rel=1e-5)
    torch.manual_seed(1)
    for parameter in model.parameters():  # so that what it writes depends on what it reads
        torch.nn.init.normal_(parameter, std=0.1)
    together = translate(model, [short[0], long[0]], 20)
    assert together[0] != together[1]
    assert together == translate(model, [short[0]], 20) + translate(model, [long[0]], 20)


@pytest.mark.parametrize("text", ["softmax:learned", "elu+1:delta:learned"])
def test_small_models_learn_to_copy_and_untrained_ones_do_not(text):
    chance = torch.Generator().manual_seed(0)
    words = ["".join("abc"[i] for i in torch.randint(3, (4,), generator=chance)) for _ in range(400)]
    pairs = [(word, word) for word in dict.fromkeys(words)]
    settings = replace(TINY, recipes=(text,), width=32, batch=16, rate=1e-2, steps=250, every=250, held_out=8)
    assert seq2seq(pairs, "copies", settings).rows[0]["exact_match"] >= 0.75
    before = seq2seq(pairs, "copies", replace(settings, steps=1)).rows[0]
    assert before["exact_match"] <= 0.25  # one right by chance is 1 of 81


def test_scores():
    assert exact_match(["12", "13"], ["12", "14"]) == 0.5
    bleu = Bleu("13a")
    same = ["the cat sat on the mat", "a dog ran over the hill"]
    assert bleu(same, same) == pytest.approx(100) and bleu(["no such thing"] * 2, same) < 10
    assert "tok:13a" in bleu.signature
    with pytest.raises(InputError, match=r"--tokenize: expected one of 13a.*got 'words'"):
        Bleu("words")


def test_without_sacrebleu_it_says_what_to_install(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(InputError, match="pip install 'reassoc\\[lab\\]'"):
        seq2seq(PAIRS, "pairs", TINY, resume=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_rows_curves_examples_and_the_page():
    results = seq2seq(PAIRS, "some <pairs>", replace(TINY, seeds=(0, 1)))
    assert [(row["recipe"], row["seed"]) for row in results.rows] == [
        (text, seed) for text in TINY.recipes for seed in (0, 1)
    ]
    assert [point["step"] for point in results.curves] == [2, 3] * 4
    assert 0 < len(results.examples) <= 4 * 10
    found = study(results)
    page = render(found, "reassoc seq2seq")
    assert "some &lt;pairs&gt;" in page and "tok:char" in page and "Some translations" in page
    assert [plot.name for plot in found.figures] == ["training"]


def test_the_answer_compares_with_the_twin():
    results = seq2seq(
        PAIRS, "pairs", replace(TINY, recipes=("softmax:learned", "elu+1:learned", "relu:learned"))
    )
    for row, exact in zip(results.rows, (0.9, 0.89, 0.5), strict=True):
        row["exact_match"] = exact
    said = study(results).answer
    assert said[0].startswith("Of kernel attention elu+1:learned translates best: 89.0% exactly right")
    assert said[1].startswith("Its twin with softmax attention (softmax:learned): 90.0%")
    assert (
        said[-1]
        == "Exact matches against softmax:learned, within the spread: elu+1:learned; worse: relu:learned."
    )


def test_a_diverged_run_is_a_result_and_told(monkeypatch):
    monkeypatch.setattr(run_module, "update", lambda *args, **options: float("nan"))
    results = seq2seq(PAIRS, "pairs", TINY)
    assert {(row["ended"], row["steps"]) for row in results.rows} == {("diverged", 1)}
    assert any(
        "diverged" in sentence and "(seed 0, step 1)" in sentence for sentence in study(results).answer
    )


def test_an_interrupted_experiment_goes_on_and_gives_the_same(tmp_path, monkeypatch):
    whole = seq2seq(PAIRS, "pairs", TINY)
    trained = []
    real = run_module.train

    def interrupted(settings, chosen, *rest):
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(chosen.name)
        return real(settings, chosen, *rest)

    def counted(settings, chosen, *rest):
        trained.append(chosen.name)
        return real(settings, chosen, *rest)

    monkeypatch.setattr(run_module, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        seq2seq(PAIRS, "pairs", TINY, resume=tmp_path)
    monkeypatch.setattr(run_module, "train", counted)
    results = seq2seq(PAIRS, "pairs", TINY, resume=tmp_path)
    assert trained == list(TINY.recipes)  # none twice
    assert results.rows == whole.rows and results.examples == whole.examples
    forget_parts(tmp_path, results)
    assert not list(tmp_path.iterdir())


def test_files_of_pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes("\ufeffein Haus\ta house\r\nzwei\u2028Häuser\ttwo houses\n".encode())
    pairs = [("ein Haus", "a house"), ("zwei\u2028Häuser", "two houses")]
    assert read_pairs(path) == pairs
    for name, side in (("de", 0), ("en", 1)):
        (tmp_path / name).write_text("\n".join(pair[side] for pair in pairs), encoding="utf-8")
    assert read_sides(tmp_path / "de", tmp_path / "en") == pairs


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("pairs.tsv is empty",)),
        (b"\n \n", ("pairs.tsv is empty",)),
        (b"a\tb\nno tab here\n", ("line 2", "no tab", "SOURCE<tab>TARGET")),
        (b"a\tb\nc\td\te\n", ("line 2", "2 tabs")),
        (b"a\tb\nc\t\n", ("line 2", "a side empty")),
        (b"a\tb\n\nc\td\n", ("line 2", "an empty line")),
        (b"a\tb\nc\xff\td\n", ("line 2", "not UTF-8", "0xff")),
    ],
)
def test_files_that_are_no_pairs(tmp_path, content, words):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_pairs(path)
    text = str(caught.value)
    assert text.startswith("--pairs: ") and "\n" not in text and all(word in text for word in words), text


def test_sides_that_do_not_fit(tmp_path):
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("eins\n")
    with pytest.raises(InputError, match="as many lines in each, got 2 in a and 1 in b"):
        read_sides(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b").write_text("eins\n\n")
    with pytest.raises(InputError, match="--target: b line 2: expected text, got an empty line"):
        read_sides(tmp_path / "a", tmp_path / "b")


def test_too_few_and_too_long_pairs():
    with pytest.raises(InputError, match=r"at least 10 different sources.*got 9"):
        check_pairs([*PAIRS[:9], ("0 1", "again")], 100)
    with pytest.raises(
        InputError, match=r"2 of 62 pairs are longer than 9 bytes, the first in line 61.*--limit 12"
    ):
        check_pairs([*PAIRS, ("ž" * 5, "a"), ("b", "ž" * 6)], 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipes": ()}, ("--models", "at least one")),
        ({"recipes": ("elu+1:carried",)}, ("carried", "segments")),
        ({"seeds": (-1,)}, ("--seeds", "-1")),
        ({"width": 15}, ("--width", "15", "2 heads")),
        ({"rate": 0.0}, ("--rate", "above 0")),
        ({"held_out": 0}, ("--held-out", "0")),
        ({"weight_decay": float("nan")}, ("--weight-decay", "nan")),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(change, words):
    with pytest.raises(InputError) as caught:
        replace(TINY, **change)
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_a_recipe_that_does_not_fit_is_refused_before_any_work(tmp_path):
    with pytest.raises(InputError, match="recipe 'elu\\+1:rotary-after' with width 16"):
        seq2seq(PAIRS, "pairs", replace(TINY, recipes=("elu+1:rotary-after",)), resume=tmp_path / "new")
    assert not (tmp_path / "new").exists()
