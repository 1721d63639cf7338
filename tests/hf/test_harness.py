"""lm-evaluation-harness loads a converted checkpoint and scores a local task with it."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")
import transformers as T
from hf_models import VOCABULARY, converted
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(3, VOCABULARY))]
QUESTIONS = [
    {
        "question": " ".join(f"w{3 + (7 * i + j * j) % 61}" for j in range(20)),
        "choices": ["w5", "w40 w9", "w17"],
        "label": i % 3,
    }
    for i in range(8)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint with its tokenizer, and no way to the network or to caches elsewhere."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    T.PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(tmp_path / "model")
    converted("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports, none of it ours
def test_a_multiple_choice_task(folder):
    from lm_eval import evaluator
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    from reassoc import hf

    lm = HFLM(pretrained=str(folder / "model"), device="cpu", dtype="float32", batch_size=3)
    assert len(list(hf.kernel_layers(lm.model))) == 2
    task = ConfigurableTask(
        config={
            "task": "local", "dataset_path": "json", "output_type": "multiple_choice",
            "dataset_kwargs": {"data_files": {"test": str(folder / "task.jsonl")}}, "test_split": "test",
            "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc"}],
        }
    )  # fmt: skip
    found = evaluator.evaluate(lm=lm, task_dict={"local": task}, bootstrap_iters=0)
    model = T.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    right = sum(best(model, row) == row["label"] for row in QUESTIONS)
    assert found["results"]["local"]["acc,none"] == right / len(QUESTIONS)
    assert 0 < right < len(QUESTIONS)


def best(model, row):
    """The choice with the largest log likelihood after the question."""
    question = [WORDS.index(word) for word in row["question"].split()]
    scores = []
    for choice in row["choices"]:
        answer = [WORDS.index(word) for word in choice.split()]
        ids = torch.tensor([question + answer])
        with torch.no_grad():
            predicted = model(ids).logits[0].log_softmax(-1)[len(question) - 1 : -1]
        scores.append(predicted.gather(1, torch.tensor(answer)[:, None]).sum().item())
    return max(range(len(scores)), key=scores.__getitem__)
