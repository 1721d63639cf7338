"""PEFT on a converted model: adapters beside kernels, saved, loaded and merged."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import transformers as T
from hf_models import HYBRID, converted, inputs, logits, make, tokens

from reassoc import hf

# peft asks a model of transformers by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
ADAPTERS = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["reassoc"]}


@pytest.fixture
def adapted():
    """Adapters and kernels, both away from where they start."""
    torch.manual_seed(3)
    model = peft.get_peft_model(converted("llama"), peft.LoraConfig(**ADAPTERS)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, dtype=parameter.dtype))
    return model


def test_kernels_train_beside_adapters_and_nothing_else_does(adapted):
    adapted(tokens(), labels=tokens()).loss.backward()
    got = {n for n, p in adapted.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert got == {n for n, p in adapted.named_parameters() if "lora_" in n or "modules_to_save" in n}
    assert any("log_weight" in n for n in got) and any("lora_A" in n for n in got)


def test_an_adapter_comes_back_on_a_fresh_conversion(adapted, tmp_path):
    wanted = logits(adapted, inputs("llama"))
    assert not torch.allclose(wanted, logits(converted("llama"), inputs("llama")), rtol=1e-2)
    adapted.save_pretrained(tmp_path)
    base = hf.convert(make("llama"), **HYBRID).double()
    back = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(logits(back, inputs("llama")), wanted)


def test_merged_it_is_a_converted_model_again(adapted, tmp_path):
    wanted = logits(adapted, inputs("llama"))
    merged = adapted.merge_and_unload()
    assert type(merged) is T.LlamaForCausalLM and len(list(hf.kernel_layers(merged))) == 2
    # Adapters are added to weights rather than to what weights give.
    torch.testing.assert_close(logits(merged, inputs("llama")), wanted, rtol=1e-9, atol=1e-9)
    merged.save_pretrained(tmp_path)
    back = T.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(logits(back, inputs("llama")), logits(merged, inputs("llama")))


def test_it_generates_with_a_constant_cache(adapted):
    x = {k: v for k, v in inputs("llama", left=7).items() if k != "position_ids"}
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0, "no_repeat_ngram_size": 2}
    got = adapted.generate(**x, **options, do_sample=False)
    assert torch.equal(got, adapted.generate(**x, **options, do_sample=False, use_cache=False))
