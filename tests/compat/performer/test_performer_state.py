"""Checkpoints of either load in the other, those of older copies too; projections change when asked."""

import copy
import importlib
import io

import pytest
import torch
from performer_cases import OPTIONS, SIZES, distance, original, quietly

import reassoc.compat.performer_pytorch as ours


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("legacy", [None, "exact"])
def test_checkpoints_load_strictly_in_either_direction(name, legacy):
    package, _ = original()
    theirs = quietly(package.PerformerLM, **SIZES, **OPTIONS[name])
    mine = ours.PerformerLM(**SIZES, **OPTIONS[name], legacy=legacy)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    for source, target in ((theirs, mine), (mine, theirs)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.uniform_(-1, 1)
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True), strict=True)
        for key, tensor in source.state_dict().items():
            assert torch.equal(target.state_dict()[key], tensor), key


def older(model):
    """The state dict of a copy before 1.0.9: layers once, and the counter of the performer itself."""
    state = {k: v for k, v in model.state_dict().items() if ".proj_updater." not in k}
    return state | {"performer.calls_since_last_redraw": torch.tensor(7)}


def test_older_checkpoints():
    torch.manual_seed(0)
    source, model = (
        ours.PerformerLM(**SIZES, rotary_position_emb=False, legacy="exact").eval() for _ in "ab"
    )
    state = older(source)
    before = dict(state)
    model.load_state_dict(state)
    assert state == before  # the caller's own is not touched
    assert model.performer.proj_updater.calls_since_last_redraw == 7
    tokens = torch.randint(20, (1, 10))
    for attention in ours.find_modules(source, ours.FastAttention):
        attention.older = True
    assert torch.equal(model(tokens), source(tokens))


def test_a_saved_model_keeps_the_older_arithmetic():
    torch.manual_seed(0)
    new, model, other = (
        ours.PerformerLM(**SIZES, rotary_position_emb=False, legacy="exact").eval() for _ in "abc"
    )
    state = older(new)
    model.load_state_dict(state)
    saved = model.state_dict()
    assert set(saved) == set(state) and saved["performer.calls_since_last_redraw"] == 7
    other.load_state_dict(saved)
    tokens = torch.randint(20, (1, 10))
    assert torch.equal(other(tokens), model(tokens))
    assert distance(other(tokens), new(tokens)) > 1e-5
    other.load_state_dict(new.state_dict())  # and names of later releases bring theirs
    assert torch.equal(other(tokens), new(tokens))
    assert list(other.state_dict()) == list(new.state_dict())
    model.load_state_dict({}, strict=False)  # says nothing about layers
    assert torch.equal(model.state_dict()["performer.calls_since_last_redraw"], torch.tensor(7))


@pytest.mark.parametrize("tokens", [30, 700])
def test_older_checkpoints_bring_the_older_arithmetic(tokens):
    # Before 1.1.1: one maximum over the keys of all heads and sequences, not detached.
    torch.manual_seed(0)
    model = ours.Performer(32, 1, 4, 8, legacy="exact").double()
    attention = ours.find_modules(model, ours.FastAttention)[0]
    model.load_state_dict({k: v for k, v in model.state_dict().items() if "proj_updater" not in k})
    assert attention.older
    inputs = [torch.randn(2, 4, tokens, 8, dtype=torch.float64) * 2 for _ in range(3)]
    for t in inputs:
        t.requires_grad_()
    q, k, v = inputs

    def features(x, top):
        x = x * 8**-0.25
        u = x @ attention.projection_matrix.mT
        return (u - x.square().sum(-1, keepdim=True) / 2 - top(u)).exp() + 1e-4

    left, right = features(q, lambda u: u.amax(-1, keepdim=True)), features(k, torch.max)
    kernel = left @ right.mT
    expected = (kernel / kernel.sum(-1, keepdim=True)) @ v
    with torch.no_grad():
        assert distance(attention(q, k, v), expected) < 1e-10
        attention.older = False
        assert distance(attention(q, k, v), expected) > 1e-4
        attention.older = True
    weight = torch.randn_like(expected)
    results = [torch.autograd.grad((o * weight).sum(), inputs) for o in (attention(q, k, v), expected)]
    for got, wanted in zip(*results, strict=True):
        assert distance(got, wanted) < 1e-9


def test_older_checkpoints_of_two_models_in_one_and_new_ones():
    pair = torch.nn.ModuleDict({n: ours.PerformerLM(**SIZES) for n in ("a", "b")})
    state = {f"{n}.{k}": v for n in pair for k, v in older(pair[n]).items()}
    first = pair.state_dict()
    pair.load_state_dict(state)
    assert all(m.older for m in ours.find_modules(pair, ours.FastAttention))
    assert set(pair.state_dict()) == set(state)
    pair.load_state_dict(first)
    assert not any(m.older for m in ours.find_modules(pair, ours.FastAttention))


def test_a_part_of_a_state_dict_tells_no_release():
    model = ours.PerformerLM(**SIZES, legacy="exact")
    state, attentions = model.state_dict(), ours.find_modules(model, ours.FastAttention)
    parts = [
        {k: t for k, t in state.items() if k.startswith("performer.net.layers.0")},
        dict(model.named_parameters()),
        {k: t for k, t in state.items() if not k.endswith("calls_since_last_redraw")},
    ]
    for older_now in (False, True):
        for part in parts[: 3 - older_now]:
            for attention in attentions:
                attention.older = older_now
            model.load_state_dict(part, strict=False)
            assert {attention.older for attention in attentions} == {older_now}


def test_a_name_in_an_older_state_dict_leads_to_its_tensor():
    model = ours.PerformerLM(**SIZES)
    model.load_state_dict({k: t for k, t in model.state_dict().items() if ".proj_updater." not in k})
    for name, tensor in model.state_dict().items():
        found = model
        for part in name.split("."):
            found = getattr(found, part)
        assert found.data_ptr() == tensor.data_ptr()
    with torch.device("meta"):
        empty = ours.PerformerLM(**SIZES)
    empty.load_state_dict(older(model) | model.state_dict(), assign=True)
    assert not any(t.is_meta for t in [*empty.parameters(), *empty.performer.buffers()])


@pytest.mark.parametrize("change", ["missing", "left over"])
def test_what_else_is_wrong_with_a_checkpoint_is_an_error(change):
    model = ours.PerformerLM(**SIZES)
    state = older(model)
    if change == "missing":
        del state["performer.net.layers.0.0.fn.to_q.weight"]
    else:
        state["performer.net.layers.0.0.fn.to_p.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"fn\.to_[qp]\.weight"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    "module", ["performer_pytorch", "autoregressive_wrapper", "performer_enc_dec", "reversible"]
)
def test_names_are_where_the_original_has_them(module):
    original()
    theirs = importlib.import_module(f"performer_pytorch.{module}")
    mine = importlib.import_module(f"reassoc.compat.performer_pytorch.{module}")
    public = {n for n, thing in vars(theirs).items() if getattr(thing, "__module__", "") == theirs.__name__}
    known = {n for n in public if n in ours.__all__}
    assert known and all(hasattr(mine, name) for name in known)


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_two_calls_in_evaluation_give_the_same(legacy):
    model = ours.PerformerLM(**SIZES, feature_redraw_interval=0, legacy=legacy).eval()
    tokens = torch.randint(20, (1, 30))
    first = model(tokens)
    assert torch.equal(model(tokens), first)
    assert model.performer.proj_updater.calls_since_last_redraw == 0


@pytest.mark.parametrize("legacy", [None, "exact"])
def test_redraws_in_training_come_at_the_originals_calls(legacy):
    package, _ = original()
    options = SIZES | {"feature_redraw_interval": 2}
    redrawn = []
    for model in (package.PerformerLM(**options), ours.PerformerLM(**options, legacy=legacy)):
        model.train()
        matrices = [m.projection_matrix for m in model.modules() if hasattr(m, "projection_matrix")]
        calls = []
        for _ in range(8):
            before = [m.clone() for m in matrices]
            model(torch.randint(20, (1, 30)))
            changed = [not torch.equal(a, b) for a, b in zip(matrices, before, strict=True)]
            assert len(set(changed)) == 1
            calls.append((changed[0], int(model.performer.proj_updater.calls_since_last_redraw)))
        redrawn.append(calls)
    assert redrawn[0] == redrawn[1]
    assert [changed for changed, _ in redrawn[0]] == [False, False, True] * 2 + [False, False]


def test_redraw_when_asked_and_never_when_fixed():
    torch.manual_seed(0)
    model = ours.PerformerLM(**SIZES, feature_redraw_interval=0, auto_check_redraw=False)
    attention = ours.find_modules(model, ours.FastAttention)[0]
    tokens, before = torch.randint(20, (1, 30)), attention.projection_matrix.clone()
    out = model(tokens)
    assert torch.equal(attention.projection_matrix, before)
    model.check_redraw_projections()
    assert not torch.equal(attention.projection_matrix, before)
    assert distance(model(tokens), out) > 1e-4  # and the new one is used
    model.fix_projection_matrices_()
    before = attention.projection_matrix.clone()
    model.check_redraw_projections()
    assert torch.equal(attention.projection_matrix, before)
    model.eval()
    attention.redraw_projection_matrix("cpu")
    assert not torch.equal(attention.projection_matrix, before)


def test_a_matrix_written_past_the_module_is_used():
    torch.manual_seed(0)
    attention = ours.FastAttention(8)
    x = torch.randn(1, 2, 9, 8)
    before = attention(x, x, x)
    attention.projection_matrix.data.copy_(attention.create_projection())
    assert distance(attention(x, x, x), before) > 1e-4


@pytest.mark.parametrize("scaling", [0, 1])
def test_clean_draws_are_orthogonal_with_unbiased_signs(scaling):
    torch.manual_seed(0)
    attention = ours.FastAttention(6, 8, ortho_scaling=scaling)
    signs = torch.zeros(8, 6)
    for _ in range(400):
        attention.redraw_projection_matrix()
        rows = attention.projection_matrix
        gram = rows[:6] @ rows[:6].mT
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5
        if scaling:
            assert torch.allclose(rows.norm(dim=1), torch.tensor(6.0).sqrt())
        signs += rows.sign()
    # LAPACK's own signs make the first entry of the first row negative at every draw.
    assert (signs / 400).abs().max() < 5 / 400**0.5


def test_models_can_be_copied_and_pickled_and_moved():
    import pickle

    model = ours.PerformerLM(**SIZES).eval()
    tokens = torch.randint(20, (1, 30))
    out = model(tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens), out)
    assert distance(model.double()(tokens), out.double()) < 1e-5
