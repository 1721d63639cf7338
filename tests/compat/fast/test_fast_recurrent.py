"""One token at a time: equal to the batch form, with states that users may keep, pick and copy."""

import copy
import pickle

import pytest
import torch

from reassoc.compat.fast_transformers import feature_maps as maps
from reassoc.compat.fast_transformers.builders import (
    RecurrentDecoderBuilder,
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)
from reassoc.compat.fast_transformers.masking import LengthMask, TriangularCausalMask
from reassoc.compat.fast_transformers.recurrent.attention import (
    RecurrentAttentionLayer,
    RecurrentLinearAttention,
)
from reassoc.compat.fast_transformers.utils import make_mirror

N, T, M = 3, 15, 7
MAPS = {
    "elu": None,
    "favor": maps.Favor.factory(n_dims=16, deterministic_eval=True),
    "smoothed": maps.SmoothedRandomFourierFeatures.factory(n_dims=9, deterministic_eval=True),
    "relu": maps.GeneralizedRandomFeatures.factory(n_dims=24, deterministic_eval=True),
}
each_map = pytest.mark.parametrize("name", MAPS)
each_mode = pytest.mark.parametrize("legacy", [None, "exact"])
OPTIONS = {
    "n_layers": 2, "n_heads": 2, "query_dimensions": 8, "value_dimensions": 6, "feed_forward_dimensions": 10,
    "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def pair(name, legacy, decoder=False, kind=None):
    """Batch and recurrent model of the same weights and matrices."""
    if decoder:
        builders = TransformerDecoderBuilder, RecurrentDecoderBuilder
        kinds = {"self_attention_type": kind or "causal-linear", "cross_attention_type": kind or "linear"}
    else:
        builders = TransformerEncoderBuilder, RecurrentEncoderBuilder
        kinds = {"attention_type": kind or "causal-linear"}
    torch.manual_seed(0)
    more = {} if MAPS[name] is None else {"feature_map": MAPS[name]}
    models = [b.from_kwargs(**OPTIONS, **kinds, **more, legacy=legacy).get().eval() for b in builders]
    for buffer_name, buffer in models[0].named_buffers():
        if buffer_name.endswith("omega"):
            buffer.normal_()
    models[1].load_state_dict(models[0].state_dict(), strict=True)
    return models


def stepped(model, x, *extra):
    state, out = None, []
    for token in x.unbind(1):
        y, state = model(token, *extra, state=state)
        out.append(y)
    return torch.stack(out, 1), state


@each_map
@each_mode
@pytest.mark.parametrize("gradients", [True, False])
def test_encoder_equals_the_batch_form(name, legacy, gradients):
    """Outputs, and gradients through all steps."""
    batch, recurrent = pair(name, legacy)
    x, same = (torch.randn(N, T, 12, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    with torch.set_grad_enabled(gradients):
        x.requires_grad_(gradients), same.requires_grad_(gradients)
        want = batch(x, attn_mask=TriangularCausalMask(T))
        got, _ = stepped(recurrent, same)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        if gradients:
            want.pow(3).sum().backward(), got.pow(3).sum().backward()
            torch.testing.assert_close(same.grad, x.grad, rtol=1e-4, atol=1e-4)


@each_mode
@pytest.mark.parametrize("kind", [None, "full"])
def test_full_attention_and_decoders_equal_the_batch_form(legacy, kind):
    """With a memory whose padding is hidden."""
    x, memory = torch.randn(N, T, 12), torch.randn(N, M, 12)
    lengths = LengthMask(torch.tensor([7, 4, 1]))
    for name in MAPS if kind is None else ["elu"]:
        batch, recurrent = pair(name, legacy, decoder=True, kind=kind)
        want = batch(x, memory, x_mask=TriangularCausalMask(T), memory_length_mask=lengths)
        got, _ = stepped(recurrent, x, memory, lengths)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    batch, recurrent = pair("elu", legacy, kind="full")
    want = batch(x, attn_mask=TriangularCausalMask(T))
    torch.testing.assert_close(stepped(recurrent, x)[0], want, rtol=1e-5, atol=1e-5)


@each_map
@each_mode
def test_states_are_lists_of_tensors(name, legacy):
    """[S, Z]; log_scale as a third where features are logarithms, and then exp of it is what is left out."""
    _, recurrent = pair(name, legacy)
    x = torch.randn(N, T, 12)
    with torch.no_grad():
        _, state = stepped(recurrent, x)
        layer = recurrent.layers[0].attention
        phi = layer.inner_attention.feature_map
        k = phi.forward_keys(layer.key_projection(x).unflatten(-1, (2, 8)))
        v = layer.value_projection(x).unflatten(-1, (2, 6))
    total, z, *scale = state[0]
    assert len(scale) == (name == "favor" and legacy is None)
    factor = scale[0].exp() if scale else torch.ones_like(z)
    torch.testing.assert_close(z * factor, k.sum(1), rtol=1e-4, atol=1e-5)
    want = torch.einsum("nshc,nshd->nhcd", k, v)
    torch.testing.assert_close(total * factor[..., None], want, rtol=1e-4, atol=1e-4)


@each_map
@each_mode
@pytest.mark.parametrize("decoder", [False, True])
def test_states_may_be_picked_copied_and_pickled(name, legacy, decoder):
    """Beam search: other sequences, as plain lists, go on as those sequences would have."""
    _, recurrent = pair(name, legacy, decoder)
    x = torch.randn(N, T, 12)
    extra = (torch.randn(N, M, 12), LengthMask(torch.tensor([7, 4, 1]))) if decoder else ()
    index = torch.tensor([2, 2, 0])
    pick = (
        (lambda s: [[t[index] for t in part] for part in s]) if decoder else (lambda s: [t[index] for t in s])
    )
    chosen = (extra[0][index], LengthMask(torch.tensor([1, 1, 7]), M)) if decoder else ()
    with torch.no_grad():
        _, state = stepped(recurrent, x, *extra)
        copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
        picked = [pick(layer) for layer in state]
        token = torch.randn(N, 12)
        moved, _ = recurrent(token[index], *chosen, state=picked)
        want, _ = recurrent(token, *extra, state=state)
        torch.testing.assert_close(moved, want[index], rtol=1e-5, atol=1e-5)
        for other in copies:
            torch.testing.assert_close(recurrent(token, *extra, state=other)[0], want, rtol=1e-5, atol=1e-5)


def test_an_entry_that_was_replaced_counts():
    """Emptying the state by hand starts anew."""
    attention = RecurrentLinearAttention(8)
    q, k, v = torch.randn(N, 2, 8), torch.randn(N, 2, 8), torch.randn(N, 2, 5)
    with torch.no_grad():
        _, state = attention(q, k, v)
        state[0], state[1] = torch.zeros_like(state[0]), torch.zeros_like(state[1])
        got, _ = attention(q, k * 2, v + 1, state)
    torch.testing.assert_close(got, v + 1)  # one key: its value


def test_earlier_name_of_the_state_and_another_batch():
    """memory= still works, and warns; a batch does not change its size."""
    torch.manual_seed(0)
    layer = RecurrentAttentionLayer(RecurrentLinearAttention(8), 16, 2)
    x = torch.randn(N, 16)
    _, state = layer(x, x, x)
    want, _ = layer(x, x, x, state=copy.deepcopy([t.detach() for t in state]))
    with pytest.warns(DeprecationWarning, match="use state="):
        got, _ = layer(x, x, x, memory=state)
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="a batch of 3, query of 2"):
        layer(x[:2], x[:2], x[:2], state=state)


@each_map
def test_evaluation_never_draws_between_sequences(name):
    """The original draws at the start of each sequence."""
    _, recurrent = pair(name, None)
    x = torch.randn(N, 4, 12)
    first, second = stepped(recurrent, x)[0], stepped(recurrent, x)[0]
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@each_map
def test_other_dtypes(name, dtype):
    """States of half precision are float32; outputs keep the dtype."""
    attention = RecurrentLinearAttention(8, MAPS[name]).to(dtype).eval()
    state = None
    for _ in range(3):
        y, state = attention(*(torch.randn(N, 2, d).to(dtype) for d in (8, 8, 5)), state)
    assert y.dtype == dtype and y.isfinite().all()
    assert state[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_mirrors_share_parameters():
    """What is trained in one is used by the other."""
    batch, recurrent = pair("elu", None)
    make_mirror(batch, recurrent)
    assert all(a is b for a, b in zip(batch.parameters(), recurrent.parameters(), strict=True))
