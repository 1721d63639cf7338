"""A long sequence in constant memory: pieces, single tokens, a pause on disk, and the same result.

python examples/streaming.py
"""

import tempfile
from pathlib import Path

import torch

import reassoc
from reassoc import AttentionState
from reassoc.feature_maps import PositiveFeatures

torch.manual_seed(0)
HEADS, KEY_HEADS, SIZE, TOKENS = 4, 2, 32, 3000  # grouped: two query heads share a key head
PROMPT, PIECE = 2000, 500

query = torch.randn(1, HEADS, TOKENS, SIZE)
key, value = (torch.randn(1, KEY_HEADS, TOKENS, SIZE) for _ in range(2))
phi = PositiveFeatures(SIZE, 64, heads=KEY_HEADS, seed=0)


def tokens(start: int, stop: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value of some positions."""
    return query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop]


def report(state: AttentionState) -> None:
    """How much it has seen, and how much it takes."""
    print(f"after {int(state.length):4} tokens the state holds {state.nbytes:,} bytes")


# 1. The prompt, in pieces. Of the pieces before it, a piece needs the state and nothing else.
state = AttentionState.zeros(phi, batch=1, key_heads=KEY_HEADS, value_dim=SIZE)
outputs = []
for start in range(0, PROMPT, PIECE):
    output, state = reassoc.linear_attention(
        *tokens(start, start + PIECE), phi, causal=True, state=state, return_state=True
    )
    outputs.append(output)
    report(state)

# 2. A pause. The file holds the sums and says what made them; the map is saved by its own state_dict.
with tempfile.TemporaryDirectory() as folder:
    state.save(Path(folder) / "state.safetensors")
    state = AttentionState.load(Path(folder) / "state.safetensors")

# 3. One token at a time. `step` advances the state; a clone made before keeps its numbers.
snapshot = state.clone()
for t in range(PROMPT, TOKENS):
    outputs.append(reassoc.step(*tokens(t, t + 1), phi, state))
report(state)
print("(twice as much, once: steps also keep what rounding took)")

# 4. The same as the whole at once, whatever the cuts.
whole = reassoc.linear_attention(query, key, value, phi, causal=True)
difference = (torch.cat(outputs, 2) - whole).norm() / whole.norm()
print(f"pieces and steps differ from the whole by {difference:.0e} of its size")

# 5. Another continuation can start from the snapshot.
reassoc.step(*tokens(0, 1), phi, snapshot)
print(f"the snapshot went its own way: {int(snapshot.length)} tokens, the other state {int(state.length)}")

# 6. The state of another map is refused: it would give numbers that mean nothing.
try:
    reassoc.step(*tokens(0, 1), PositiveFeatures(SIZE, 64, heads=KEY_HEADS, seed=1), state)
except ValueError as error:
    print("refused:", error)
