"""Tiny random models of many architectures, ways to convert them, and inputs: nothing is downloaded."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
import transformers as T  # noqa: E402

transformers.utils.logging.disable_progress_bar()

VOCABULARY, TOKENS = 64, 40
SPAN = 12  # the sliding windows of Mistral and Gemma: longer than WINDOW, shorter than TOKENS
WINDOW = 8
# Weights large enough that attention is far from uniform and predictions are far from ties.
RANGE = 0.3
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": RANGE,
}  # fmt: skip
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
GROUPED = PLAIN | IDS | {"num_key_value_heads": 2, "head_dim": 8}


def bert(kind=None, **options):
    return (kind or T.BertForMaskedLM)(T.BertConfig(**(PLAIN | NO_DROPOUT | options)))


def bart(**options):
    sizes = {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "max_position_embeddings": 512, "init_std": RANGE,
        "decoder_start_token_id": 2, "forced_eos_token_id": None, "dropout": 0.0,
    }  # fmt: skip
    return T.BartForConditionalGeneration(T.BartConfig(**(sizes | IDS | options)))


def gemma3(**options):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    own = {"num_hidden_layers": 3, "sliding_window": SPAN, "layer_types": kinds}
    return T.Gemma3ForCausalLM(T.Gemma3TextConfig(**(GROUPED | own | options)))


def gpt2(**options):
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    still = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "initializer_range": RANGE}
    return T.GPT2LMHeadModel(T.GPT2Config(**(sizes | IDS | still | options)))


def vit(**options):
    image = {"image_size": 16, "patch_size": 4, "num_labels": 3}
    sizes = {k: v for k, v in PLAIN.items() if k not in ("vocab_size", "max_position_embeddings")}
    return T.ViTForImageClassification(T.ViTConfig(**(sizes | image | NO_DROPOUT | options)))


MODELS = {
    "llama": lambda **o: T.LlamaForCausalLM(T.LlamaConfig(**(GROUPED | o))),
    "mistral": lambda **o: T.MistralForCausalLM(T.MistralConfig(**(GROUPED | {"sliding_window": SPAN} | o))),
    "qwen3": lambda **o: T.Qwen3ForCausalLM(T.Qwen3Config(**(GROUPED | o))),
    "gemma3": gemma3,
    "gpt2": gpt2,
    "bert": bert,
    "bart": bart,
    "vit": vit,
}
DECODERS = ("llama", "mistral", "qwen3", "gemma3", "gpt2")
WRITERS = (*DECODERS, "bart")
HYBRID = {"feature_map": "codebook", "map_options": {"num_features": 16}, "window": WINDOW, "sinks": 2}
WAYS = {
    "pure": {"feature_map": "elu+1"},
    "codebook": HYBRID,
    "window": {"feature_map": None, "window": WINDOW, "sinks": 2},
    "decay": {"feature_map": "elu+1", "rule": "decay"},
    "hybrid-decay": HYBRID | {"rule": "decay"},
    "delta": {"feature_map": "elu+1", "rule": "delta"},
}
# Both ways of seeing need a map and an order-free rule; a delta rule has no window.
CASES = [
    (name, way)
    for name in MODELS
    for way in WAYS
    if (name in DECODERS or way not in ("window", "delta"))
    and not (way == "delta" and name in ("mistral", "gemma3"))
]


def make(name, **options):
    """A model in float64, so that what is compared differs by rounding alone, if by anything."""
    torch.manual_seed(0)
    return MODELS[name](**options).double().eval()


def converted(name, way="codebook", *, layers=None, **options):
    """Converted, with kernel parameters moved away from where they start."""
    from reassoc import hf

    model = hf.convert(make(name, **options), layers=layers, **(WAYS[way] if isinstance(way, str) else way))
    stir(model)
    return model


def stir(model):
    """Parameters of the kernel layers away from where they start, which hides mistakes."""
    from reassoc import hf

    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in hf.kernel_layers(model):
            for part, parameter in layer.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                # Rates of decay between a few and some hundred tokens.
                parameter.copy_(noise - 3 if part == "decay" else parameter + 0.3 * noise)
            layer.to(torch.float64)


def tokens(batch=2, length=TOKENS, seed=1):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs(name, left=0, right=0):
    """A batch of two; the first row has ``left`` or ``right`` tokens of padding."""
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": pixels.double()}
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    mask[0, TOKENS - right :] = 0
    found = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    if name in DECODERS:  # as generate() makes them
        found["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if name == "bart":
        found["decoder_input_ids"] = tokens(length=13, seed=2)
    return found


def logits(model, x):
    with torch.no_grad():
        return model(**x).logits
