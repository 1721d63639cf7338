"""Give a transformers model a state of constant size: convert, calibrate, generate. Needs the extra [hf].

python examples/convert_generate.py                # a tiny random Llama, made on the spot
python examples/convert_generate.py path/to/model  # a model of yours; calibrated on the embedded text
"""

import lzma
import sys
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import reassoc.hf

torch.manual_seed(0)
text = lzma.decompress(files("reassoc").joinpath("lab/data/king-james.txt.xz").read_bytes()).decode()

# 1. A model, and examples of text as it sees them.
if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
    examples = reassoc.hf.blocks(tokenizer, [text[:200_000]], length=512)
else:
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)  # fmt: skip
    model = LlamaForCausalLM(config)  # random weights: it writes noise, and the rest is as it would be
    ids = torch.tensor(list(text[:20_000].encode()))
    examples = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids.view(-1, 500)]
model.eval()
held_out = examples.pop()
softmax_logits = model(held_out["input_ids"][None]).logits.detach()

# 2. Far keys are read through a kernel; the last 64 positions and the first 4 tokens stay exact.
reassoc.hf.convert(model, "codebook", map_options={"num_features": 64}, window=64, sinks=4)
layers = reassoc.hf.calibrate(model, examples)  # one pass over text, no training
print(f"{layers} layers converted and calibrated")

# 3. How far is the converted model from the original, on text it was not calibrated on?
logits = model(held_out["input_ids"][None]).logits.detach()
agree = (logits.argmax(-1) == softmax_logits.argmax(-1)).float().mean()
print(f"most probable next token as with softmax at {agree:.0%} of {logits.shape[1]} positions")

# 4. generate() is transformers' own. Its cache holds the same number of bytes however long the text.
prompt = held_out["input_ids"][None, :200]
for count in (50, 300):
    found = model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                           pad_token_id=0, return_dict_in_generate=True)  # fmt: skip
    held = reassoc.hf.cache_bytes(found.cache)
    print(f"after {found.sequences.shape[1]} tokens the cache holds {held:,} bytes")
if len(sys.argv) > 1:
    print(tokenizer.decode(found.sequences[0, 200:]))
