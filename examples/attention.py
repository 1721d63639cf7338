"""Your own tensors through the operator: any kernel, how far it is from softmax, what is undefined.

python examples/attention.py
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import reassoc
from reassoc import feature_maps

torch.manual_seed(0)

# 1. Tensors as scaled_dot_product_attention takes them: (batch, heads, tokens, size). Put your own here.
query, key, value = (torch.randn(1, 4, 512, 32) for _ in range(3))
exact = scaled_dot_product_attention(query, key, value, is_causal=True)

# 2. Maps without parameters go by name. Random and fitted ones are objects that you make and keep.
maps = {name: feature_maps.make(name, 32) for name in ("elu+1", "relu", "dpfp-1", "taylor")}
maps["favor+, 256"] = feature_maps.make("favor+", 32, num_features=256, heads=4)
maps["favor+, 256, calibrated"] = feature_maps.make("favor+", 32, num_features=256, heads=4)
maps["favor+, 256, calibrated"].calibrate_(query, key)
maps["landmark, 253"] = feature_maps.make("landmark", 32, num_features=256, heads=4).calibrate_(query, key)

# 3. The same call for each. An error of 1 is that of an output of zeros. Calibrated and fitted maps have seen
#    these very tensors: on your model judge them on others, as `reassoc fidelity` does.
print("relative distance from softmax attention on these tensors:")
for name, phi in maps.items():
    output = reassoc.linear_attention(query, key, value, phi, causal=True, undefined="zero")
    error = (output - exact).norm() / exact.norm()
    print(f"  {name:24} r = {phi.feature_dim:4}   {error:.2f}")

# 4. Every output is a weighted sum of the values it may see, and the weights can be looked at.
weights = reassoc.attention_matrix(query, key, "elu+1", causal=True)
output = reassoc.linear_attention(query, key, value, "elu+1", causal=True)
difference = (weights @ value - output).norm() / output.norm()
print(
    f"weights add up to {weights.sum(-1).mean():.6f} a row; weights @ value is the output to {difference:.0e}"
)

# 5. Where no visible key has a feature in common with the query, the denominator is zero. You choose.
negative = -key.abs()  # ReLU makes nothing but zeros of these
for policy in ("nan", "zero", "raise"):
    try:
        output = reassoc.linear_attention(query, negative, value, "relu", causal=True, undefined=policy)
        print(f"undefined={policy!r}: the first output is {output[0, 0, 0, 0].item()}")
    except ValueError as error:
        print(f"undefined={policy!r}: {str(error).split('. ')[0]}")

# 6. What to cite.
entries = reassoc.citation(maps["favor+, 256"])
print("to cite:", ", ".join(line.split("{")[1][:-1] for line in entries.splitlines() if line.startswith("@")))
