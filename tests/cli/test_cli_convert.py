"""`reassoc convert`, `evaluate` and `generate` on tiny models; one line and exit code 2 for every mistake."""

import csv
import hashlib
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("typer")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

import reassoc.hf as hf  # noqa: E402
from reassoc.cli._app import run  # noqa: E402
from reassoc.hf.evaluate import WORDS  # noqa: E402

pytestmark = [
    # torch's own, where transformers' trainer makes a loader without an accelerator.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
]

KNOWN = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "The", "pass", "key", "is", ".", "Remember", "it", *WORDS,
    *(f"w{i}" for i in range(40)),
]  # fmt: skip
SIZES = {
    "vocab_size": len(KNOWN), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
QUICK = [
    "--features", "8", "--window", "8", "--sinks", "2", "--length", "32", "--calibration-tokens", "320",
    "--transfer-steps", "4", "--transfer-rate", "0.01", "--tune-steps", "4", "--eval-tokens", "96",
    "--checkpoint", "2",
]  # fmt: skip


def save(folder, model):
    special = isinstance(model, transformers.BertModel)
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(KNOWN)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if special:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    model.eval().save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, eos_token_id=None, bos_token_id=None)
    return save(tmp_path_factory.mktemp("models") / "llama", transformers.LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(2)
    return save(
        tmp_path_factory.mktemp("models") / "bert", transformers.BertModel(transformers.BertConfig(**SIZES))
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    words = [f"w{i * i * 7 % 40}" for i in range(4000)]
    path.write_text("\n".join(" ".join(words[i : i + 10]) for i in range(0, len(words), 10)))
    return str(path)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def converted(llama, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "converted"
    arguments = ["--model", llama, "--text", text, "--test-text", text, "--out", str(out), *QUICK]
    assert run(["convert", *arguments]) == 0
    return out


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def refused(capsys, command, arguments, *words):
    assert run([command, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reassoc: ") and err.count("\n") == 1, (out, err)
    for word in words:
        assert word in err, (word, err)


# Convert


def test_the_folder_holds_the_model_and_how_it_was_made(converted, llama, text):
    assert {path.name for path in converted.iterdir()} == {
        "config.json", "conversion.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert [path.name for path in converted.parent.iterdir()] == ["converted"]  # nothing is left beside it
    record = json.loads((converted / "conversion.json").read_text())
    assert [stage["stage"] for stage in record["stages"]] == ["softmax", "calibrate", "transfer", "tune"]
    for stage in record["stages"][1:]:
        assert stage["seconds"] > 0 and set(stage["tests"]) == {"book.txt"}
        assert stage["peak_bytes"] is None or stage["peak_bytes"] > 1e6
    assert [point["step"] for point in record["stages"][2]["log"]] == [1, 2, 3, 4]
    weights = hashlib.sha256(Path(llama, "model.safetensors").read_bytes()).hexdigest()
    assert record["model"]["sha256"]["model.safetensors"] == weights
    assert record["texts"] == [
        {"name": "book.txt", "part": "0:0.9",
         "sha256": hashlib.sha256(Path(text).read_bytes()).hexdigest()}
    ]  # fmt: skip
    assert record["plan"]["map_options"] == {"num_features": 8, "seed": 0}
    assert record["versions"]["transformers"] == transformers.__version__


def test_test_figures_are_those_of_the_saved_model(converted, llama, text):
    record = json.loads((converted / "conversion.json").read_text())
    content = Path(text).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    rows = hf.blocks(tokenizer, [content[int(0.95 * len(content)) :].decode()], 32)
    rows = [rows[int((i + 0.5) * len(rows) / 3)] for i in range(3)]  # 96 tokens, evenly
    for folder, stage in ((llama, 0), (converted, -1)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        told = record["stages"][stage]["tests"]["book.txt"]["perplexity"]
        assert told == pytest.approx(hf.perplexity(model, rows), rel=1e-4)
    assert len(list(hf.kernel_layers(model))) == 2


def test_the_original_is_not_touched_and_parts_are_cut_in_order(llama, text, tmp_path, monkeypatch):
    before, seen = digests(Path(llama)), {}

    def stop(model, tokenizer, texts, plan, out, *, tests, **_):
        seen.update(texts=texts, tests=tests)
        raise KeyboardInterrupt

    monkeypatch.setattr("reassoc.hf.pipeline.run", stop)
    (tmp_path / "é.txt").write_text("é" * 100)
    arguments = ["--model", llama, "--out", "o", "--text", text, "--text", "é.txt", "--test-text", "é.txt"]
    assert run(["convert", *arguments, "--part", "0.25:0.5", "--test-part", "0.505:0.6"]) == 2
    content = Path(text).read_text()
    assert seen["texts"]["book.txt"] == content[len(content) // 4 : len(content) // 2]
    # Bytes 50 to 100, and 101 to 120: byte 101 is the second half of a letter.
    assert seen["texts"]["é.txt"] == "é" * 25 and seen["tests"]["é.txt"] == "é" * 9
    assert digests(Path(llama)) == before


class Interrupting:
    """Ctrl-C in the n-th training step of the process."""

    def __init__(self, monkeypatch, at):
        self.count, self.at, self.own = 0, at, transformers.Trainer.training_step
        monkeypatch.setattr(transformers.Trainer, "training_step", lambda *a, **k: self(*a, **k))

    def __call__(self, *arguments, **options):
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt
        return self.own(*arguments, **options)


@pytest.mark.parametrize(("at", "left"), [(3, 6), (5, 4), (8, 2)])  # in stage 1, before and in 2
def test_an_interrupted_run_goes_on_and_gives_the_same(
    converted, llama, text, tmp_path, monkeypatch, capsys, at, left
):
    arguments = ["convert", "--model", llama, "--text", text, "--test-text", text, "--out", "o", *QUICK]
    with monkeypatch.context() as context:
        Interrupting(context, at)
        assert run(arguments) == 2
    assert capsys.readouterr().err.startswith("reassoc: interrupted")
    assert [path.name[:12] for path in tmp_path.iterdir()] == [".unfinished-"]
    counting = Interrupting(monkeypatch, 0)
    assert run(arguments) == 0
    # Each stage has four steps and a checkpoint every other: those before the last one are not redone.
    assert counting.count == left
    assert [path.name for path in tmp_path.iterdir()] == ["o"]
    again, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path / "o", converted))
    assert again.keys() == whole.keys()
    for name in whole:
        assert torch.equal(again[name], whole[name]), name
    record = json.loads((tmp_path / "o" / "conversion.json").read_text())
    other = json.loads((converted / "conversion.json").read_text())
    continued = [stage["stage"] for stage in record["stages"] if stage.get("continued")]
    assert continued == {3: ["transfer"], 5: [], 8: ["tune"]}[at]
    for mine, theirs in zip(record["stages"], other["stages"], strict=True):
        assert mine["tests"] == theirs["tests"] and mine.get("log") == theirs.get("log")


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        (["--layers", "none"], ["softmax", "tune"]),
        (["--feature-map", "none"], ["softmax", "calibrate", "tune"]),
        (["--layers", "1", "--tune-steps", "0"], ["softmax", "calibrate", "transfer"]),
        (["--window", "0", "--feature-map", "elu+1", "--transfer-steps", "0"],
         ["softmax", "calibrate", "tune"]),
    ],
)  # fmt: skip
def test_controls_and_variants(llama, text, tmp_path, options, stages):
    quick = QUICK if "--feature-map" not in options else QUICK[2:]
    quick = quick if "--window" not in options else quick[4:]
    arguments = ["--model", llama, "--text", text, "--test-text", text, "--out", "new/o", *quick, *options]
    assert run(["convert", *arguments]) == 0
    record = json.loads((tmp_path / "new" / "o" / "conversion.json").read_text())
    assert [stage["stage"] for stage in record["stages"]] == stages
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "o")
    count = {"none": 0, "1": 1}.get(options[1], 2) if options[0] == "--layers" else 2
    assert len(list(hf.kernel_layers(model))) == count


def test_an_encoder(bert, text, tmp_path, capsys):
    arguments = ["--model", bert, "--text", text, "--test-text", text, "--out", "mine", "--features", "16"]
    more = ["--transfer-steps", "30", "--transfer-rate", "0.02", "--length", "16", "--eval-tokens", "200"]
    more += ["--calibration-tokens", "600"]
    assert run(["convert", *arguments, *more]) == 0
    record = json.loads((tmp_path / "mine" / "conversion.json").read_text())
    stages = {stage["stage"]: stage["tests"]["book.txt"] for stage in record["stages"]}
    assert list(stages) == ["calibrate", "transfer"]
    assert stages["transfer"]["low"] <= stages["transfer"]["mean"] < 1
    log = record["stages"][1]["log"]
    assert log[-1]["loss"] < log[0]["loss"]
    capsys.readouterr()
    assert run(["evaluate", "--model", bert, "--against", "mine", "--text", text, "--tokens", "200",
                "--lengths", "16", "--out", "e"]) == 0  # fmt: skip
    with (tmp_path / "e" / "evaluate.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["bert", "mine"]
    assert float(rows[0]["cosine"]) == pytest.approx(1, abs=1e-6)
    assert float(rows[1]["cosine"]) == pytest.approx(stages["transfer"]["mean"], abs=1e-5)
    assert "cosine to the embeddings of bert: mine" in capsys.readouterr().out


def test_convert_refuses(llama, bert, text, tmp_path, capsys):
    base = ["--model", llama, "--text", text, "--out", "o"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    short = tmp_path / "short.txt"
    short.write_text("w1 w2 w3")

    def no(arguments, *words):
        refused(capsys, "convert", arguments, *words)

    no([*base, "--feature-map", "elu+2"], "--feature-map", "elu+2", "known: identity")
    no([*base, "--feature-map", "elu+1", "--features", "8"], "--features", "elu+1")
    no([*base, "--feature-map", "none", "--window", "0"], "no attention")
    no([*base, "--part", "0.9:0.1"], "--part is '0.9:0.1'", "0:0.9")
    no([*base, "--test-text", text, "--test-part", "0.5:1"], "overlap")
    no([*base, "--layers", "7", "--length", "100"], "layers are [7]", "0 to 1")
    no([*base, "--layers", "first"], "--layers", "whole numbers")
    no([*base, "--rule", "delta", "--length", "100"], "rule='delta'")
    no([*base, "--length", "500"], "length is 500", "at most 128")
    no([*base, "--length", "60"], "window and sinks are 68", "nothing to learn")
    no([*base, "--objective", "x", "--length", "100"], "objective is 'x'")
    no([*base, "--layers", "none", "--objective", "teacher", "--length", "100"], "'teacher'")
    no([*base, "--tune-rate", "0", "--length", "100"], "tune_rate is 0")
    no([*base, "--batch", "0", "--length", "100"], "batch is 0")
    no([*base, "--length", "100", "--test-text", str(short)], "short.txt has 1 tokens", "100")
    no(
        ["--model", llama, "--text", str(short), "--out", "o", "--part", "0:1", "--length", "100"],
        "short.txt has 3 tokens",
    )
    no(["--model", llama, "--text", "none.txt", "--out", "o"], "none.txt", "no such text file")
    no(["--model", "nowhere", "--text", text, "--out", "o"], "nowhere: no such model folder")
    no(["--model", llama, "--text", text, "--out", "short.txt/o"], "short.txt")
    no(["--model", llama, "--text", text, "--out", "full"], "full: exists", "not an empty folder")
    no(["--model", bert, "--text", text, "--out", "o", "--tune-steps", "3"], "BertModel", "no next token")
    no(
        ["--model", bert, "--text", text, "--out", "o", "--length", "100", "--window", "8"],
        "this model has none",
    )
    assert {path.name for path in tmp_path.iterdir()} == {"full", "short.txt"}


def test_a_model_that_cannot_be_converted(text, tmp_path, capsys):
    config = transformers.BloomConfig(vocab_size=len(KNOWN), hidden_size=32, n_layer=1, n_head=2)
    folder = save(tmp_path / "bloom", transformers.BloomForCausalLM(config))
    capsys.readouterr()  # the bar of saving
    base = ["--text", text, "--out", "o", "--length", "100"]
    refused(capsys, "convert", ["--model", folder, *base], "Bloom")
    (tmp_path / "bloom" / "model.safetensors").write_bytes(b"x")
    refused(capsys, "convert", ["--model", folder, *base], "cannot load the model")


def test_an_empty_folder_is_filled(llama, text, tmp_path):
    (tmp_path / "o").mkdir()
    arguments = ["--model", llama, "--text", text, "--out", "o", *QUICK, "--tune-steps", "0"]
    assert run(["convert", *arguments, "--transfer-steps", "0"]) == 0
    assert (tmp_path / "o" / "conversion.json").is_file()


def test_out_of_memory_is_one_line(llama, text, monkeypatch, capsys):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("reassoc.hf.pipeline.calibrate", full)
    refused(capsys, "convert", ["--model", llama, "--text", text, "--out", "o", *QUICK], "out of memory")


# Evaluate


def test_evaluate_compares_on_the_same_tokens(converted, llama, text, tmp_path, capsys):
    arguments = ["--model", llama, "--against", str(converted), "--text", text, "--lengths", "16,32"]
    arguments += ["--tokens", "96", "--recall", "--distances", "20,40", "--trials", "4", "--out", "new/e"]
    assert run(["evaluate", *arguments]) == 0
    printed = capsys.readouterr().out
    out = tmp_path / "new" / "e"
    assert printed.splitlines()[-1] == "Report: new/e/report.html"
    assert {path.name for path in out.iterdir()} == {
        "evaluate.csv", "evaluate.json", "recall.csv", "times.csv", "report.html", "figures"
    }  # fmt: skip
    assert {path.stem for path in (out / "figures").iterdir()} == {"perplexity", "recall"}
    with (out / "evaluate.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["length"], row["blocks"]) for row in rows] == [
        ("llama", "16", "6"), ("llama", "32", "3"), ("converted", "16", "6"), ("converted", "32", "3"),
    ]  # fmt: skip
    told = json.loads((converted / "conversion.json").read_text())["stages"]
    for row, stage in ((rows[1], told[0]), (rows[3], told[-1])):
        assert float(row["perplexity"]) == pytest.approx(stage["tests"]["book.txt"]["perplexity"], rel=1e-4)
    ratio = float(rows[3]["perplexity"]) / float(rows[1]["perplexity"])
    assert float(rows[3]["ratio"]) == pytest.approx(ratio, rel=1e-4)
    assert float(rows[3]["ratio_low"]) < ratio < float(rows[3]["ratio_high"])
    # Keys and values of 2 layers, 2 heads of 8, in float32.
    assert rows[1]["state_bytes"] == str(2 * 2 * 2 * 8 * 4 * 32)
    assert rows[2]["state_bytes"] == rows[3]["state_bytes"]
    with (out / "recall.csv").open() as file:
        assert [(r["model"], r["distance"], r["trials"]) for r in csv.DictReader(file)] == [
            (model, distance, "4") for model in ("llama", "converted") for distance in ("20", "40")
        ]
    whole = json.loads((out / "evaluate.json").read_text())
    assert str(tmp_path) not in whole["command"] and "--against converted" in whole["command"]
    assert f"perplexity {float(rows[1]['perplexity']):.2f}" in (out / "report.html").read_text()


def test_evaluate_goes_on_after_a_finished_model(converted, llama, text, tmp_path, monkeypatch):
    from reassoc.lab.conversion import run as module

    calls, own = [], module._measure

    def measure(source, *rest):
        calls.append(source.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(source, *rest)

    monkeypatch.setattr(module, "_measure", measure)
    arguments = ["evaluate", "--model", llama, "--against", str(converted), "--text", text, "--lengths", "32"]
    arguments += ["--tokens", "96", "--out", "e"]
    assert run(arguments) == 2
    assert run(arguments) == 0
    assert calls == ["llama", "converted", "converted"]
    assert not [path for path in (tmp_path / "e").iterdir() if path.name.startswith(".")]


def test_evaluate_refuses(converted, llama, bert, text, tmp_path, capsys):
    base = ["--model", llama, "--text", text, "--lengths", "32"]

    def no(arguments, *words):
        refused(capsys, "evaluate", arguments, *words)

    no([*base, "--against", llama], "models are named llama, llama")
    no([*base, "--against", bert], "bert", "differ")
    no(["--model", bert, "--text", text, "--lengths", "32", "--against", llama], "llama", "differ")
    no([*base, "--distances", "10"], "--distances belongs to --recall")
    no([*base, "--recall", "--distances", "10000"], "recall needs")
    no(["--model", bert, "--text", text, "--lengths", "32", "--recall"], "bert writes no text")
    no(["--model", llama, "--text", text, "--lengths", "1"], "--lengths")
    no(["--model", llama, "--text", text, "--lengths", "500"], "length is 500", "at most 128")
    no([*base, "--part", "0:0.001"], "book.txt has", "a block takes 32")
    no([*base, "--tokens", "0"], "--tokens is 0")
    no([*base, "--text", text], "a second text named book.txt")
    (tmp_path / "file").touch()
    no([*base, "--out", "file"], "file exists and is not a folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # no folder is left


# Generate


def test_generate_writes_what_the_model_writes(converted, capsys):
    prompt = "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12"
    model = transformers.AutoModelForCausalLM.from_pretrained(converted)
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 20, "pad_token_id": 0}
    for more, arguments in (({}, []), ({"num_beams": 3}, ["--beams", "3"])):
        capsys.readouterr()  # the bar of loading
        wanted = model.generate(ids, do_sample=False, **options, **more)[0, ids.shape[1] :]
        base = ["--model", str(converted), "--prompt", prompt, "--tokens", "20"]
        assert run(["generate", *base, *arguments]) == 0
        out, err = capsys.readouterr()
        assert out.strip() == tokenizer.decode(wanted, skip_special_tokens=True).strip()
        assert err.count("\n") == 1 and "12 tokens of prompt" in err and "19 more" in err
        assert int(err.split("; ")[-1].split()[0].replace(",", "")) > 0


def test_generate_samples_and_reads_files(converted, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("w1 w2 w3 " * 20)
    base = ["generate", "--model", str(converted), "--prompt-file", "prompt.txt", "--tokens", "12"]
    found = []
    for seed in ("1", "1", "2"):
        assert run([*base, "--temperature", "1.5", "--seed", seed]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]


def test_generate_refuses(converted, llama, bert, capsys):
    base = ["--model", llama, "--prompt", "w1"]

    def no(arguments, *words):
        refused(capsys, "generate", arguments, *words)

    no(["--model", llama], "--prompt and --prompt-file")
    no([*base, "--tokens", "0"], "--tokens")
    no([*base, "--tokens", "500"], "length is 501", "at most 128")
    no([*base, "--beams", "2", "--temperature", "1"], "--beams", "--temperature")
    no(["--model", llama, "--prompt", ""], "prompt is empty")
    no(["--model", bert, "--prompt", "w1"], "BertModel does not write text")


def test_a_wrong_checkpoint(converted, tmp_path, capsys):
    import shutil

    shutil.copytree(converted, tmp_path / "bad")
    config = json.loads((tmp_path / "bad" / "config.json").read_text())
    config["reassoc"]["format"] = 99
    (tmp_path / "bad" / "config.json").write_text(json.dumps(config))
    refused(capsys, "generate", ["--model", "bad", "--prompt", "w1"], "config.json", "format 99")


@pytest.mark.parametrize("command", ["convert", "evaluate", "generate"])
def test_help(command, capsys):
    assert run([command, "--help"]) == 0
    assert "--model" in capsys.readouterr().out
