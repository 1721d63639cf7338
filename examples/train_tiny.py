"""Train a tiny byte-level language model with the gated delta rule, then let it write.

python examples/train_tiny.py
"""

import lzma
import math
import time
from importlib.resources import files

import torch
from torch.nn.functional import cross_entropy

from reassoc.nn import AttentionConfig, LanguageModel, LanguageModelConfig

torch.manual_seed(0)
STEPS, STREAMS, SEGMENT = 200, 4, 256

# 1. A text, as bytes: the New Testament that comes with the package. Put a text of your own here.
text = lzma.decompress(files("reassoc").joinpath("lab/data/king-james.txt.xz").read_bytes())
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
train, test = tokens[: int(0.95 * len(tokens))], tokens[int(0.95 * len(tokens)) :]

# 2. A model: one small config chooses the attention. mixer="softmax" is a twin of the same shape.
attention = AttentionConfig(heads=4, feature_map="elu+1", rule="gated-delta", convolution=4)
model = LanguageModel(LanguageModelConfig(vocabulary=256, width=64, layers=2, attention=attention))
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} bytes to learn from")


def loss_on(part: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats a byte: each byte of (B, N + 1) but the first is predicted from those before it."""
    return cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())


def perplexity() -> float:
    """Of eight segments of the test text."""
    model.eval()
    with torch.no_grad():
        return math.exp(loss_on(test[: 8 * (SEGMENT + 1)].view(8, -1)).item())


# 3. Train it as any other module.
print(f"before training: perplexity {perplexity():.1f} a byte")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=STEPS, pct_start=0.1)
began = time.perf_counter()
model.train()
for step in range(STEPS):
    starts = torch.randint(len(train) - SEGMENT, (STREAMS,))
    loss = loss_on(torch.stack([train[i : i + SEGMENT + 1] for i in starts]))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if (step + 1) % 100 == 0:
        print(f"step {step + 1}: loss {loss.item():.2f} nats a byte")
print(f"after {time.perf_counter() - began:.0f} s: perplexity {perplexity():.1f} a byte")

# 4. Let it write. It keeps a state of constant size and no cache; a small model writes small talk.
prompt = b"And Jesus said unto them, "
context = torch.tensor([list(prompt)])
_, states = model(context[:, :-1], return_states=True)
size = states.nbytes
written = [int(t) for t in model.generate(context[:, -1:], 200, temperature=0.7, states=states)]
print(prompt.decode() + bytes(written).decode("ascii", "replace"))
print(f"state: {size:,} bytes after the prompt, {states.nbytes:,} after {int(states.length)} tokens")
print("(steps also keep what rounding took: more, once, whatever comes after)")
