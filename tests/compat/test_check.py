"""`reassoc.compat.check`: who wrote a checkpoint, what it relies on, and how far the two modes are apart."""

import io
import math
import pickle
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from reassoc._errors import InputError
from reassoc.compat._checkpoint import read_checkpoint
from reassoc.compat._compare import relative
from reassoc.compat._feed import read_batch, runner
from reassoc.compat._quirks import quirks
from reassoc.compat._rebuild import rebuild
from reassoc.compat._recognize import recognize
from reassoc.compat.check import check
from reassoc.compat.fast_transformers import feature_maps as fast_maps
from reassoc.compat.fast_transformers.builders import TransformerDecoderBuilder, TransformerEncoderBuilder
from reassoc.compat.fast_transformers.masking import LengthMask
from reassoc.compat.fast_transformers.rotary import RotaryEncoderBuilder
from reassoc.compat.performer_pytorch import Performer, PerformerEncDec, PerformerLM
from reassoc.compat.torch_geometric import PerformerAttention

LM = {"num_tokens": 30, "max_seq_len": 24, "dim": 16, "depth": 2, "heads": 2, "dim_head": 8}
FAST = {
    "n_layers": 2, "n_heads": 2, "query_dimensions": 8, "value_dimensions": 8, "feed_forward_dimensions": 24,
    "attention_type": "linear",
}  # fmt: skip
STACK = {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def kept(tmp_path, state, name="model.pt"):
    path = tmp_path / name
    torch.save(state, path)
    return path


def batch(tmp_path, **tensors):
    path = tmp_path / "batch.safetensors"
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    return path


def tokens(count=24):
    return torch.randint(30, (2, count))


def mask(count=24, real=10):
    return torch.arange(count) < torch.tensor([[count], [real]])


def fast(**options):
    model = TransformerEncoderBuilder.from_kwargs(**{**FAST, **options}, legacy="exact").get()
    model.eval()(torch.zeros(1, 3, 16))  # draws its map
    return model


# ---------------------------------------------------------------------------------------------------------
# What shapes tell
# ---------------------------------------------------------------------------------------------------------

PERFORMERS = {
    "plain": {},
    "features": {"nb_features": 11},
    "heads": {"heads": 3, "dim_head": 4},
    "wide": {"ff_mult": 3},
    "gated": {"ff_glu": True, "ff_mult": 2},
    "reversible": {"reversible": True},
    "rezero": {"use_rezero": True},
    "scalenorm": {"use_scalenorm": True},
    "shifted": {"shift_tokens": True},
    "reversible, shifted, gated": {"reversible": True, "shift_tokens": True, "ff_glu": True},
    "without biases": {"qkv_bias": False, "attn_out_bias": False},
}


@pytest.mark.parametrize("name", PERFORMERS)
def test_a_performer_is_rebuilt_from_its_shapes(name):
    options = {**STACK, **PERFORMERS[name]}
    options["dim"] = 24 if name == "heads" else 16
    made = Performer(**options, legacy="exact").eval()
    [found] = recognize(made.state_dict())
    assert found.library == "performer-pytorch" and found.version == "1.0.9 to 1.1.4"
    assert {n: found.sizes[n] for n in options} == options
    defaults = {
        "causal": False, "cross_attend": False, "features": "favor", "local_heads": 0, "local_window": 256,
        "older": False,
    }  # fmt: skip
    again = rebuild(found, "exact", defaults)
    x = torch.randn(2, 9, options["dim"])
    assert torch.equal(again(x), made(x))


def test_an_older_release_is_told_by_what_it_lacks():
    state = Performer(**STACK).state_dict()
    older = {name: t for name, t in state.items() if not name.startswith("proj_updater.")}
    [found] = recognize(older)
    assert found.version == "before 1.0.9" and found.before_updater and found.sizes["depth"] == 2


def test_older_arithmetic_is_that_of_the_file_or_said(tmp_path):
    model = PerformerLM(**LM, rotary_position_emb=False, legacy="exact").eval()
    new = kept(tmp_path, model.state_dict())
    state = {name: t for name, t in model.state_dict().items() if ".proj_updater." not in name}
    given = batch(tmp_path, tokens=tokens())
    reports = [check(new, given)[0], check(new, given, older=True)[0], check(kept(tmp_path, state), given)[0]]
    assert reports[0].gap != reports[1].gap == reports[2].gap
    assert "release: 1.1.1 or later" in reports[0].assumed and "release: before 1.1.1" in reports[1].assumed
    assert not any("release" in words for words in reports[2].assumed)  # the file tells
    told = [{q.name: q.original for q in report.quirks}["stabilizer of keys"] for report in reports]
    assert "FastAttention.older" not in told[0] and all("FastAttention.older" in words for words in told[1:])


def test_rotary_layers_are_rebuilt(tmp_path):
    model = RotaryEncoderBuilder.from_kwargs(
        **FAST, feature_map=fast_maps.Favor.factory(n_dims=20, deterministic_eval=True), legacy="exact"
    ).get()
    x, real = torch.randn(2, 24, 16), mask()
    model(x)
    path = kept(tmp_path, {f"blocks.{name}": t for name, t in model.eval().state_dict().items()})
    [found] = recognize(read_checkpoint(path))
    assert found.sizes["rotary"] and found.root == "blocks."
    settings = {
        "causal": False, "features": "favor", "heads": None, "activation": "relu", "stabilize": False,
        "softmax_temp": None,
    }  # fmt: skip
    run = runner(found, read_batch(batch(tmp_path, x=x, mask=real), found))
    expected = model(x, length_mask=LengthMask(torch.tensor([24, 10])))
    assert torch.equal(run(rebuild(found, "exact", settings)), expected)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, {"queries": 16, "values": 16, "n_layers": 2, "feed_forward_dimensions": 24}),
        (
            {"feature_map": fast_maps.Favor.factory(n_dims=20)},
            {"n_heads": 2, "query_dimensions": 8, "value_dimensions": 8, "omega": 10},
        ),
        (
            {"feature_map": fast_maps.Favor.factory(), "query_dimensions": 4, "final_normalization": False},
            {"n_heads": 2, "query_dimensions": 4, "value_dimensions": 8, "final_normalization": False},
        ),
    ],
)
def test_fast_transformers_is_told_by_its_shapes(options, sizes):
    [found] = recognize(fast(**options).state_dict())
    assert found.library == "pytorch-fast-transformers"
    assert {n: found.sizes[n] for n in sizes} == sizes
    for matrix in found.matrices.values():
        assert matrix.shape == (sizes.get("omega", 2), sizes["query_dimensions"])


@pytest.mark.parametrize("reversible", [False, True])
def test_layers_come_in_order_whatever_that_of_the_file(reversible):
    state = Performer(**{**STACK, "depth": 11}, reversible=reversible).state_dict()
    [found] = recognize({name: state[name] for name in sorted(state)})  # as safetensors keeps them: 1, 10, 2
    for i, matrix in enumerate(found.matrices.values()):
        name = f"net.blocks.{i}.f.net." if reversible else f"net.layers.{i}.0."
        assert matrix is state[f"{name}fn.fast_attention.projection_matrix"]


def original(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the originals' imports: distutils, torch.cuda.amp
        return pytest.importorskip(name)


@pytest.mark.parametrize("options", [{}, {"rotary_position_emb": False, "use_rezero": True}], ids=str)
def test_a_checkpoint_of_performer_pytorch_runs_as_it_did(tmp_path, options):
    theirs = original("performer_pytorch").PerformerLM(**LM, **options).eval()
    path, given, real = kept(tmp_path, theirs.state_dict()), tokens(), mask()
    [found] = recognize(read_checkpoint(path))
    settings = {
        "causal": False, "cross_attend": False, "features": "favor", "local_heads": 0, "local_window": 256,
        "older": False,
    }  # fmt: skip
    run = runner(found, read_batch(batch(tmp_path, tokens=given, mask=real), found))
    expected = theirs(given, mask=real)
    assert (run(rebuild(found, "exact", settings)) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:.*torch.qr is deprecated")
def test_a_checkpoint_of_fast_transformers_runs_as_it_did(tmp_path):
    builders, maps = (original(f"fast_transformers.{name}") for name in ("builders", "feature_maps"))
    masking = original("fast_transformers.masking")
    phi = maps.Favor.factory(n_dims=20, deterministic_eval=True)
    theirs = builders.TransformerEncoderBuilder.from_kwargs(**FAST, feature_map=phi).get()
    theirs(torch.zeros(1, 3, 16))
    path, x, real = kept(tmp_path, theirs.eval().state_dict()), torch.randn(2, 24, 16), mask()
    [found] = recognize(read_checkpoint(path))
    settings = {
        "causal": False, "features": "favor", "heads": None, "activation": "relu", "stabilize": False,
        "softmax_temp": None,
    }  # fmt: skip
    run = runner(found, read_batch(batch(tmp_path, x=x, mask=real), found))
    expected = theirs(x, length_mask=masking.LengthMask(torch.tensor([24, 10])))
    assert (run(rebuild(found, "exact", settings)) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_models_within_models_are_found_by_their_roots():
    sizes = {f"{side}_{name}": n for name, n in LM.items() if name != "dim" for side in ("enc", "dec")}
    found = recognize(PerformerEncDec(dim=16, **sizes).state_dict())
    assert [model.root for model in found] == ["enc.performer.", "dec.net.performer."]
    assert [model.sizes["depth"] for model in found] == [2, 4]
    parallel = {f"module.{n}": t for n, t in PerformerLM(**LM).state_dict().items()}
    assert [model.root for model in recognize(parallel)] == ["module.performer."]


def test_a_checkpoint_of_something_else_is_refused():
    with pytest.raises(InputError, match="no attention of"):
        recognize(nn.Linear(2, 2).state_dict())


# ---------------------------------------------------------------------------------------------------------
# Quirks
# ---------------------------------------------------------------------------------------------------------


def rows(model, **options):
    [found] = recognize(model.state_dict())
    return {q.name: q.original for q in quirks(found, **{"causal": False, "features": "favor", **options})}


def test_row_norms_are_told_apart():
    model = Performer(**STACK, nb_features=64)
    buffers = [m.projection_matrix for m in model.modules() if hasattr(m, "projection_matrix")]
    assert "of Gaussian vectors, as" in rows(model)["row norms"]
    for norm, words in ((math.sqrt(8), "SMREG"), (1.0, "unless features only scale"), (0.3, "neither")):
        for buffer in buffers:
            buffer.copy_(buffer / buffer.norm(dim=1, keepdim=True) * norm)
        assert words in rows(model)["row norms"]
    for buffer in buffers:
        buffer.copy_(torch.rand_like(buffer))
    assert "not of Gaussian vectors" in rows(model)["row norms"]
    for buffer in buffers:
        buffer.zero_()
    assert "never drawn" in rows(model)["row norms"]


def test_directions_without_the_sign_fix_are_seen():
    exact = Performer(**STACK, nb_features=64, legacy="exact")  # the original's recipe
    assert "16 of 16" in rows(exact)["directions"] and "biased" in rows(exact)["directions"]
    assert "biased" not in rows(Performer(**STACK, nb_features=64))["directions"]


def test_epsilons_leaks_and_masks_are_named():
    model = Performer(**STACK)
    found = rows(model)
    assert "1e-4" in found["feature epsilon"] and "stay in the denominator" in found["mask"]
    assert found["denominator epsilon"] == "none" and "later keys" not in found["stabilizer of keys"]
    found = rows(model, causal=True)
    assert "1e-6" in found["denominator epsilon"] and "later keys" in found["stabilizer of keys"]
    found = rows(model, features="generalized")
    assert "1e-3" in found["feature epsilon"] and "stabilizer of keys" not in found
    found = rows(fast(feature_map=fast_maps.Favor.factory()))
    assert "in evaluation too" in found["redraw"] and found["mask"] == "hides keys"
    assert "1e-3" in rows(PerformerAttention(16, 2, 8), features="generalized")["feature epsilon"]


def test_molformers_layers_bring_molformers_choices(tmp_path):
    model = RotaryEncoderBuilder.from_kwargs(
        **FAST, feature_map=fast_maps.GeneralizedRandomFeatures.factory(n_dims=20)
    ).get()
    path = kept(tmp_path, model.state_dict())
    assert {"features: generalized", "activation: gelu"} < set(check(path)[0].assumed)
    said = check(path, features="favor", activation="relu")[0].assumed
    assert {"features: favor", "activation: relu"} < set(said)


@pytest.mark.parametrize(
    ("made", "options", "words"),
    [
        (lambda: Performer(**STACK), {"heads": 2}, "heads is an option for pytorch-fast-transformers"),
        (lambda: Performer(**STACK), {"activation": "gelu"}, "activation is an option"),
        (lambda: fast(), {"older": True}, "older is an option for performer-pytorch"),
        (lambda: fast(), {"softmax_temp": -1.0}, "softmax_temp must be a positive number"),
        (lambda: fast(), {"local_window": 3}, "local_window is an option"),
        (lambda: fast(), {"activation": "tanh"}, "activation must be one of"),
        (lambda: fast(), {"heads": -4}, "heads must be at least 1"),
        (lambda: fast(), {"stabilize": True}, "options for random features"),
        (lambda: Performer(**STACK), {"local_heads": -1}, "local_heads must be at least 0"),
        (lambda: PerformerAttention(16, 2, 8), {"causal": True}, "causal is an option"),
        (
            lambda: fast(feature_map=fast_maps.Favor.factory()),
            {"heads": 3},
            "3 was given, and the file has 2",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_that_would_do_nothing_are_refused(tmp_path, made, options, words):
    with pytest.raises(InputError, match=words):
        check(kept(tmp_path, made().state_dict()), **options)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.complex64, torch.uint16], ids=str)
def test_unusual_kinds_of_numbers_are_refused(tmp_path, kind):
    state = Performer(**STACK).state_dict()
    for name, tensor in (
        ("net.layers.0.0.fn.to_q.weight", None),
        ("proj_updater.calls_since_last_redraw", 1),
    ):
        odd = (state[name] if tensor is None else torch.tensor(tensor)).to(kind)
        with pytest.raises(InputError, match="a kind of number not known here"):
            check(kept(tmp_path, {**state, name: odd}))
    if kind != torch.float8_e4m3fn:
        given = batch(tmp_path, tokens=tokens().to(kind))
        with pytest.raises(InputError, match="tokens must be integer"):
            check(kept(tmp_path, PerformerLM(**LM).state_dict()), given)


def test_a_context_that_nobody_reads_is_refused(tmp_path):
    given = batch(tmp_path, tokens=tokens(), context=torch.randn(2, 5, 16))
    with pytest.raises(InputError, match="context, which only a model with cross_attend reads"):
        check(kept(tmp_path, PerformerLM(**LM).state_dict()), given)


def test_a_mask_without_a_real_token_is_refused(tmp_path):
    given = batch(tmp_path, tokens=tokens(), mask=torch.zeros(2, 24, dtype=torch.bool))
    with pytest.raises(InputError, match="mask has no real token"):
        check(kept(tmp_path, PerformerLM(**LM).state_dict()), given)


def test_duplicates_are_counted_and_compared():
    model = Performer(**STACK)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    [found] = recognize(state)
    copies = [n for n in state if n.startswith("proj_updater.instance.")]
    words = {q.name: q.original for q in quirks(found, causal=False, features="favor")}
    assert words["second copy of layers"].startswith(f"{len(copies)} tensors") and "differ" not in str(words)
    state[copies[3]] += 1
    [found] = recognize(state)
    words = {q.name: q.original for q in quirks(found, causal=False, features="favor")}
    assert f"1 differ from the first copy, {copies[3]}" in words["second copy of layers"]


# ---------------------------------------------------------------------------------------------------------
# Both modes on an input
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [{}, {"rotary_position_emb": False}, {"tie_embed": True}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_gap_is_that_of_the_models_themselves(tmp_path, causal, position):
    models = {}
    for legacy in ("exact", None):
        models[legacy] = PerformerLM(**LM, **position, causal=causal, legacy=legacy).eval()
        models[legacy].load_state_dict(models["exact"].state_dict())
    given, real = tokens(), mask()
    path = kept(tmp_path, models["exact"].state_dict())
    source = batch(tmp_path, tokens=given, mask=real)
    [report] = check(path, source, causal=causal)
    seconds = []
    for model in models.values():
        model.performer.net.layers[1][0].fn.register_forward_hook(
            lambda *call: seconds.append(call[-1].detach())
        )
    was, now = (models[legacy](given, mask=real).detach() for legacy in ("exact", None))
    # The same modules in the same order: what is left is the order of additions.
    assert report.gap.end == pytest.approx(relative(now, was, real), rel=1e-3)
    assert report.gap.changed == pytest.approx(
        float((was.argmax(-1) != now.argmax(-1))[real].double().mean())
    )
    assert [layer.name for layer in report.gap.layers] == ["net.layers.0.0.fn", "net.layers.1.0.fn"]
    first, second = report.gap.layers
    assert first.alone == first.so_far > 0
    assert second.so_far == pytest.approx(relative(seconds[1], seconds[0], real), rel=1e-3)
    assert second.alone != pytest.approx(second.so_far, rel=1e-3)
    # A causal query never reads the padding behind it, so there the mask changes nothing.
    assert report.safe is causal and ("masked keys that weigh" in report.reason) is not causal


def test_without_padding_it_is_safe(tmp_path):
    path = kept(tmp_path, PerformerLM(**LM).state_dict())
    [report] = check(path, batch(tmp_path, tokens=tokens()))
    assert report.safe is True and 0 < report.gap.end < 1e-3 and report.gap.unmasked is None
    [report] = check(path, batch(tmp_path, tokens=tokens()), tolerance=report.gap.end / 2)
    assert report.safe is False and "epsilons" in report.reason


def test_epsilons_that_do_the_work_are_not_safe(tmp_path):
    model = Performer(**STACK)
    for name, weight in model.named_parameters():
        if ".to_q." in name or ".to_k." in name:
            weight.data *= 12  # queries and keys of a norm at which 1e-4 is all that there is
    [report] = check(kept(tmp_path, model.state_dict()), batch(tmp_path, x=torch.randn(2, 24, 16)))
    assert report.safe is False and report.gap.layers[0].alone > 0.3 and report.gap.changed is None
    assert "epsilons" in report.reason and "net.layers" in report.reason


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("features", "made"),
    [
        ("elu", {}),
        ("favor", {"feature_map": fast_maps.Favor.factory(n_dims=20)}),
        ("generalized", {"feature_map": fast_maps.GeneralizedRandomFeatures.factory(n_dims=20)}),
        ("fourier", {"feature_map": fast_maps.RandomFourierFeatures.factory(n_dims=20)}),
    ],
)
def test_fast_transformers_in_both_modes(tmp_path, features, made, causal):
    source = batch(tmp_path, x=torch.randn(2, 24, 16), mask=mask())
    path = kept(tmp_path, {"state_dict": fast(**made).state_dict(), "epoch": 3})
    [report] = check(path, source, features=features, causal=causal, heads=2)
    # Fourier features are signed: denominators near zero magnify what 1e-6 changes.
    assert report.gap.end < (1 if features == "fourier" else 1e-4)
    assert [layer.name for layer in report.gap.layers] == ["layers.0.attention", "layers.1.attention"]
    assert (report.gap.redraw is None) == (features == "elu")
    if features == "favor":
        assert report.safe and report.gap.redraw > 100 * report.gap.end and "draws each time" in report.reason


def test_layers_of_torch_geometric_run_one_by_one(tmp_path):
    model = nn.ModuleDict({"a": PerformerAttention(16, 2, 8), "b": PerformerAttention(16, 2, 8)})
    given, real = torch.randn(2, 24, 16), mask()
    [report] = check(kept(tmp_path, model.state_dict()), batch(tmp_path, x=given, mask=real))
    assert [layer.name for layer in report.gap.layers] == ["a", "b"]
    clean, exact = (PerformerAttention(16, 2, 8, legacy=legacy) for legacy in (None, "exact"))
    for layer in (clean, exact):
        layer.load_state_dict(model["b"].state_dict())
    expected = relative(clean(given, real).detach(), exact(given, real).detach(), real)
    assert report.gap.layers[1].alone == pytest.approx(expected, rel=1e-3)
    assert report.safe is False and "masked keys" in report.reason


def test_cross_attention_takes_a_context(tmp_path):
    model = Performer(**STACK, cross_attend=True)
    given = {"x": torch.randn(2, 9, 16), "context": torch.randn(2, 7, 16)}
    [report] = check(kept(tmp_path, model.state_dict()), batch(tmp_path, **given), cross_attend=True)
    assert len(report.gap.layers) == 4 and report.safe


def test_the_callers_random_numbers_are_left_alone(tmp_path):
    path, source = kept(tmp_path, PerformerLM(**LM).state_dict()), batch(tmp_path, tokens=tokens())
    before = torch.get_rng_state()
    check(path, source)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_that_are_undefined_are_counted_not_hidden():
    was, now = torch.ones(1, 3, 2), torch.ones(1, 3, 2)
    was[0, 0] = float("nan")
    assert relative(now, was, None) == 0
    now[0, 1] = float("nan")
    assert relative(now, was, None) == float("inf")
    assert relative(now, was * float("nan"), None) == float("inf")


# ---------------------------------------------------------------------------------------------------------
# Wrong and hostile files
# ---------------------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self):
        return (open, ("harm", "w"))


def raw(data):
    def write(path):
        path.write_bytes(data)

    return write


def saved(value):
    return lambda path: torch.save(value, path)


CLAIM = torch.zeros(1).expand(10**9, 10**9)
FILES = {
    "nothing": (raw(b""), "neither"),
    "text": (raw(b"hello, world, this is no checkpoint"), "neither"),
    "half a header": (raw(b"\xff\xff\xff\xff\xff\xff\xff\x7f{"), "safetensors"),
    "a header of nonsense": (raw((9).to_bytes(8, "little") + b'{"a": 1}]'), "safetensors"),
    "a pickle that runs code": (raw(pickle.dumps(Harmful())), "holds more than tensors"),
    "a zip that runs code": (saved({"net": Harmful()}), "holds more than tensors"),
    "a whole module": (saved(nn.Linear(2, 2)), "holds more than tensors"),
    "a number": (saved(3), "no state dict"),
    "no tensors": (saved({"a": 1, "b": {}}), "no state dict"),
    "a tensor that claims more": (saved({"a": CLAIM}), "claims more"),
    "a sparse one": (saved({"a": torch.eye(2).to_sparse()}), "not an ordinary one"),
    "a name with escapes": (saved({"\x1b[2J": torch.ones(1)}), "not printable"),
    "not a number": (saved({"a": torch.tensor([float("nan")])}), "NaN"),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, when it saves a sparse tensor
@pytest.mark.parametrize("name", FILES)
def test_wrong_files_are_one_line_and_run_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write, words = FILES[name]
    path = tmp_path / "file"
    write(path)
    with pytest.raises(InputError, match=words) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value) and not (tmp_path / "harm").exists()


def test_folders_and_missing_files(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_checkpoint(tmp_path / "gone")
    with pytest.raises(InputError, match="not an ordinary file"):
        read_checkpoint(tmp_path)


def test_safetensors_and_torch_files_read_the_same(tmp_path):
    state = fast(feature_map=fast_maps.Favor.factory()).state_dict()
    save_file(state, tmp_path / "a")
    one, two = read_checkpoint(tmp_path / "a"), read_checkpoint(kept(tmp_path, state))
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "old").write_bytes(buffer.getvalue())
    assert read_checkpoint(tmp_path / "old").keys() == one.keys()


def broken(change):
    state = PerformerLM(**LM).state_dict()
    change(state)
    return state


ATTENTION, FEED = "performer.net.layers.0.0.fn.", "performer.net.layers.0.1.fn.fn."
LATER = "performer.net.layers.1.0.fn."
STATES = {
    "without queries": (lambda s: s.pop(ATTENTION + "to_q.weight"), "to_q.weight is missing"),
    "odd heads": (lambda s: s.update({ATTENTION + "to_q.weight": torch.ones(15, 16)}), "no number of heads"),
    "one axis": (lambda s: s.update({ATTENTION + "to_q.weight": torch.ones(16)}), "2 axes"),
    "a huge head": (
        lambda s: s.update({ATTENTION + "fast_attention.projection_matrix": torch.ones(1, 5000)}), "at most",
    ),
    "of integers": (
        lambda s: s.update({ATTENTION + "fast_attention.projection_matrix": torch.ones(16, 8).int()}),
        "floating point",
    ),
    "a number for projections": (
        lambda s: s.update({LATER + "fast_attention.projection_matrix": torch.ones(())}), "2 axes",
    ),
    "three axes": (lambda s: s.update({FEED + "w1.weight": torch.ones(2, 2, 2)}), "2 axes"),
    "something more": (lambda s: s.update({"performer.net.layers.0.0.fn.extra": torch.ones(1)}), "extra"),
    "another shape": (lambda s: s.update({ATTENTION + "to_v.weight": torch.ones(3, 3)}), "to_v.weight"),
    "zeros": (
        lambda s: s.update({ATTENTION + "fast_attention.projection_matrix": torch.zeros(16, 8)}),
        "never drawn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_weights_that_do_not_fit_are_named(tmp_path, name):
    change, words = STATES[name]
    with pytest.raises(InputError, match=words) as caught:
        check(kept(tmp_path, broken(change)), batch(tmp_path, tokens=tokens()))
    assert "\n" not in str(caught.value)


INPUTS = {
    "nothing known": ({"y": torch.ones(2, 3)}, {}, "expected tokens or x"),
    "both": ({"tokens": torch.ones(2, 3).long(), "x": torch.ones(2, 3, 16)}, {}, "expected tokens or x"),
    "float tokens": ({"tokens": torch.ones(2, 3)}, {}, "integer"),
    "tokens beyond": ({"tokens": torch.full((2, 3), 30)}, {}, "0..29"),
    "negative tokens": ({"tokens": torch.full((2, 3), -1)}, {}, "0..29"),
    "too many": ({"tokens": torch.ones(2, 25).long()}, {}, "24 positions"),
    "too many rows of x": ({"x": torch.ones(2, 25, 16)}, {}, "24 positions"),
    "another size": ({"x": torch.ones(2, 3, 15)}, {}, "16 numbers a token"),
    "not finite": ({"x": torch.full((2, 3, 16), float("inf"))}, {}, "finite"),
    "two axes": ({"x": torch.ones(2, 16)}, {}, "floating point"),
    "a mask of numbers": ({"x": torch.ones(2, 3, 16), "mask": torch.ones(2, 3)}, {}, "bool"),
    "a mask of another size": ({"x": torch.ones(2, 3, 16), "mask": mask(4, 2)}, {}, "does not fit"),
    "empty": ({"x": torch.ones(2, 0, 16)}, {}, "floating point"),
    "an unknown feature": ({"x": torch.ones(2, 3, 16)}, {"features": "elu"}, "favor, generalized, none"),
    "a negative tolerance": ({"x": torch.ones(2, 3, 16)}, {"tolerance": -1.0}, "tolerance"),
    "another root": ({"x": torch.ones(2, 3, 16)}, {"root": "x."}, "no model"),
    "more local heads than heads": ({"x": torch.ones(2, 3, 16)}, {"local_heads": 7}, "local"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_do_not_fit_are_named(tmp_path, name):
    tensors, options, words = INPUTS[name]
    with pytest.raises(InputError, match=words) as caught:
        check(kept(tmp_path, PerformerLM(**LM).state_dict()), batch(tmp_path, **tensors), **options)
    assert "\n" not in str(caught.value)


def test_what_fast_transformers_cannot_take(tmp_path):
    x = torch.randn(2, 24, 16)
    source = batch(tmp_path, x=x)
    path = kept(tmp_path, fast().state_dict())
    with pytest.raises(InputError, match="give --heads"):
        check(path, source)
    with pytest.raises(InputError, match="does not divide"):
        check(path, source, heads=3)
    with pytest.raises(InputError, match="activation"):
        check(path, source, heads=2, activation="tanh")
    with pytest.raises(InputError, match="no token_emb"):
        check(path, batch(tmp_path, tokens=tokens()), heads=2)
    with pytest.raises(InputError, match="padding must come last"):
        check(path, batch(tmp_path, x=x, mask=mask().flip(1)), heads=2)
    decoder = TransformerDecoderBuilder.from_kwargs(
        n_layers=1, n_heads=2, query_dimensions=8, value_dimensions=8, self_attention_type="linear",
        cross_attention_type="linear",
    ).get()  # fmt: skip
    decoder = kept(tmp_path, decoder.state_dict(), "decoder")
    assert check(decoder)[0].sizes["decoder"] is True
    with pytest.raises(InputError, match="not run"):
        check(decoder, batch(tmp_path, x=x), heads=2)
