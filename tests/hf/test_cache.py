"""Generation with a cache of constant size: the same tokens as without one, and never more bytes."""

import copy
import inspect

import pytest
import torch

pytest.importorskip("transformers")
import transformers as T
from hf_models import CASES, DECODERS, HYBRID, TOKENS, WRITERS, converted, inputs, logits, make, tokens

from reassoc import AttentionState, HybridState, hf
from reassoc._errors import InputError

NEW = 12  # more than WINDOW, so that keys that were generated leave it
DECODING = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 1.5},
    "beam": {"do_sample": False, "num_beams": 4},
    "several": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
}


def generate(model, x, new=NEW, **options):
    """New tokens only; nothing stops early, so that every one of them is compared."""
    torch.manual_seed(11)
    kept = {key: value for key, value in x.items() if key in ("input_ids", "attention_mask")}
    common = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0, "eos_token_id": 2}
    common["no_repeat_ngram_size"] = 2  # a random model repeats itself, which many mistakes would do too
    found = model.generate(**kept, **(common | options))
    return found[:, 1:] if model.config.is_encoder_decoder else found[:, kept["input_ids"].shape[1] :]


@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize(("name", "way"), [case for case in CASES if case[0] in WRITERS])
def test_generation_equals_the_one_without_a_cache(name, way, decoding):
    model = converted(name, way)
    x = inputs(name, right=5) if name == "bart" else inputs(name, left=7)
    options = DECODING[decoding]
    got = generate(model, x, **options)
    wanted = generate(model, x, use_cache=False, **options)
    assert torch.equal(got, wanted)
    assert len(got.unique()) > 5


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_with_one_layer_converted_generates_alike(name):
    model = converted(name, layers=[3 if name == "bart" else 1])
    x = inputs(name, right=5) if name == "bart" else inputs(name, left=7)
    assert torch.equal(generate(model, x), generate(model, x, use_cache=False))
    beams = {"num_beams": 3}
    assert torch.equal(generate(model, x, **beams), generate(model, x, use_cache=False, **beams))


def cache_of(model):
    return T.DynamicCache(config=model.config)


def run(model, cache, ids, mask=None):
    """Logits of a piece, continuing from a cache by whatever name this version of transformers has."""
    options = {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask, ids.shape[1])}
    with torch.no_grad():
        return model(ids, **{slot(model): cache}, use_cache=True, **options).logits


def positions(mask, count):
    return (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]


def slot(model):
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@pytest.mark.parametrize(("name", "way"), [case for case in CASES if case[0] in DECODERS])
def test_pieces_of_any_size_equal_the_whole(name, way):
    model, x = converted(name, way), inputs(name, left=7)
    wanted = logits(model, x)
    cache, mask, found = cache_of(model), x["attention_mask"], []
    for start, end in ((0, 3), (3, 4), (4, 21), (21, 22), (22, 22 + 13), (35, TOKENS)):
        found.append(run(model, cache, x["input_ids"][:, start:end], mask[:, :end]))
    real = mask.bool()
    assert ((torch.cat(found, 1) - wanted)[real].abs().max() / wanted[real].abs().max()).item() < 1e-9


@pytest.mark.parametrize("name", DECODERS)
def test_chunked_prefill_gives_the_same_tokens(name):
    model, x = converted(name), inputs(name, left=7)
    assert torch.equal(generate(model, x, prefill_chunk_size=9), generate(model, x, use_cache=False))


@pytest.mark.parametrize("name", DECODERS)
def test_a_chat_that_goes_on_equals_one_long_run(name):
    model, ids = converted(name), tokens(1)
    cache = cache_of(model)
    common = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    first = model.generate(ids, **{slot(model): cache}, **common)
    more = torch.cat([first, tokens(1, 11, seed=7)], 1)
    got = model.generate(more, **{slot(model): cache}, **common)
    assert torch.equal(got, model.generate(more, use_cache=False, **common))


@pytest.mark.parametrize(("name", "way"), [case for case in CASES if case[0] in DECODERS])
def test_the_cache_does_not_grow(name, way):
    model = converted(name, way)
    cache, ids = cache_of(model), tokens(1, 400)
    sizes = []
    for piece in (*ids[:, :20].split(1, 1), ids[:, 20:390], *ids[:, 390:].split(1, 1)):
        run(model, cache, piece)
        sizes.append(hf.cache_bytes(cache))
    # A state that has been stepped also carries the rounding errors of its sums.
    assert sizes[19] == sizes[-1] == max(sizes) and len(set(sizes)) <= 2 and cache.get_seq_length() == 400


def test_the_cache_of_a_decoder_does_not_grow_and_holds_its_encoder():
    model = converted("bart")
    cache = T.EncoderDecoderCache(T.DynamicCache(), T.DynamicCache())
    with torch.no_grad():
        options = {"encoder_outputs": model.get_encoder()(tokens(1)), "use_cache": True, slot(model): cache}
        sizes = []
        for piece in tokens(1, 60).split([18, 1, 1, 38, 1, 1], 1):
            model(decoder_input_ids=piece, **options)
            sizes.append(hf.cache_bytes(cache))
    crossed = 2 * 2 * TOKENS * 32 * 8  # layers, k and v, tokens, heads times d, bytes
    assert sizes[2] == sizes[-1] == max(sizes) > crossed == hf.cache_bytes(cache.cross_attention_cache)


def test_softmax_layers_are_counted_in_full():
    model = converted("llama", layers=[])
    cache = cache_of(model)
    run(model, cache, tokens(1, 30))
    assert hf.cache_bytes(cache) == 2 * 2 * 30 * 2 * 8 * 8  # layers, k and v, tokens, key heads, d, bytes
    mixed, smaller = converted("llama", layers=[0]), cache_of(model)
    run(mixed, smaller, tokens(1, 30))
    state = smaller.layers[0].state
    assert isinstance(state, HybridState)
    assert hf.cache_bytes(smaller) == 2 * 30 * 2 * 8 * 8 + state.nbytes


def test_states_are_those_of_the_library():
    for way, kind in (("pure", AttentionState), ("codebook", HybridState)):
        model = converted("llama", way)
        cache = cache_of(model)
        run(model, cache, tokens(1, 30))
        assert all(isinstance(layer, hf.KernelCacheLayer) for layer in cache.layers)
        assert isinstance(cache.layers[1].state, kind)
        assert cache.get_seq_length() == 30 and cache.layers[1].state.length.tolist() == [30]


def test_what_needs_to_forget_is_refused_in_one_line():
    model, ids = converted("llama"), tokens(1)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": make("llama")}):
        # transformers asks the cache, and refuses in its own words where it does.
        with pytest.raises(ValueError, match=r"can be cropped|cannot forget its last tokens") as caught:
            model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)
        assert "\n" not in str(caught.value)
    cache = cache_of(model)
    run(model, cache, ids)
    with pytest.raises(InputError, match="deepcopy"):
        cache.crop(-3)


def test_a_converted_model_drafts_for_another_or_says_why_not():
    with pytest.raises(InputError, match="cannot forget its last tokens"):
        make("llama").generate(
            tokens(1), assistant_model=converted("llama"), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )


def test_reset_forgets():
    model = converted("llama")
    cache = cache_of(model)
    first = run(model, cache, tokens())
    run(model, cache, tokens(seed=3))
    cache.reset()
    assert cache.get_seq_length() == 0 and torch.equal(run(model, cache, tokens()), first)


def test_a_used_cache_of_another_model_is_refused():
    cache = T.DynamicCache()
    run(make("llama"), cache, tokens())
    with pytest.raises(InputError, match="another model") as caught:
        run(converted("llama"), cache, tokens())
    assert "\n" not in str(caught.value)
    cache = T.DynamicCache()
    run(converted("llama"), cache, tokens())
    with pytest.raises(ValueError, match="made with"):  # another window is another state
        run(converted("llama", HYBRID | {"window": 9}), cache, tokens())


def test_a_copied_cache_is_a_way_back():
    model = converted("llama")
    cache = cache_of(model)
    run(model, cache, tokens())
    kept = copy.deepcopy(cache)
    wanted = run(model, cache, tokens(length=1, seed=4))
    for _ in range(3):
        run(model, cache, tokens(length=1, seed=5))
    assert torch.equal(run(model, kept, tokens(length=1, seed=4)), wanted)


@pytest.mark.parametrize("layers", [None, [0]])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bart"])
def test_a_cache_of_fixed_length_is_refused(name, layers):
    model, x = converted(name, layers=layers), inputs(name)
    with pytest.raises(InputError, match="static") as caught:
        generate(model, x, cache_implementation="static")
    assert "\n" not in str(caught.value)


def test_batches_are_selected_and_repeated():
    model = converted("llama")
    cache = cache_of(model)
    run(model, cache, tokens(3))
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    got = run(model, cache, tokens(4, 5, seed=9))
    rows = torch.cat([tokens(3)[[2, 2, 0, 0]], tokens(4, 5, seed=9)], 1)
    wanted = logits(model, {"input_ids": rows})[:, -5:]
    assert ((got - wanted).abs().max() / wanted.abs().max()).item() < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_generates(dtype):
    model = converted("llama").to(dtype)
    x = inputs("llama", left=7)
    assert generate(model, x).shape == (2, NEW)
    cache, found = cache_of(model), []
    for piece in x["input_ids"].split(13, 1):
        found.append(run(model, cache, piece))
    whole = logits(model, {"input_ids": x["input_ids"]}).float()
    # Activations are rounded to 8 or 11 bits in both runs, at other places: a few roundings a layer.
    tolerance = 16 * torch.finfo(dtype).eps
    assert ((torch.cat(found, 1).float() - whole).norm() / whole.norm()).item() < tolerance
