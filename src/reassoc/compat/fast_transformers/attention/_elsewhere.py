"""Attention of the original that is not linear, and so not of this library."""

CLASSES = (
    "ClusteredAttention",
    "ExactTopKAttention",
    "ImprovedClusteredAttention",
    "ImprovedClusteredCausalAttention",
    "LocalAttention",
    "ReformerAttention",
)
NAMES = (
    "causal-improved-clustered",
    "clustered",
    "exact-topk",
    "improved-clustered",
    "local",
    "reformer",
)
# Of theirs alone: old scripts set them whichever attention they then choose.
PARAMETERS = (
    "bits",
    "chunk_size",
    "clusters",
    "hash_bias",
    "iterations",
    "local_context",
    "masked",
    "rounds",
    "topk",
)


def refuse(name: str) -> str:
    """What to say to who asks for one."""
    return (
        f"{name} is not linear attention and not part of reassoc: it approximates softmax by choosing keys. "
        "Use 'full' (the same weights give what it approximates), 'linear' or 'causal-linear', or "
        "reassoc.hybrid_attention for exact near keys beside linear attention"
    )
