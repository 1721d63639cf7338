import errno
import hashlib
import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from reassoc._errors import InputError
from reassoc._files import atomic_write
from reassoc.lab.activations import (
    Site,
    load_activations,
    merge_activations,
    sample_path,
    save_activations,
)


def make_site(name="tiny.layer3", H=4, G=2, N=7, d=5, e=6, dtype=torch.float16, **changes):
    generator = torch.Generator().manual_seed(0)
    site = Site(
        name=name,
        query=torch.randn(H, N, d, generator=generator).to(dtype),
        key=torch.randn(G, N, d, generator=generator).to(dtype),
        value=torch.randn(G, N, e, generator=generator).to(dtype),
        cu_seqlens=torch.tensor([0, 3, 3, N], dtype=torch.int32),
        causal=True,
        scale=d**-0.5,
        model="tiny",
        layer=3,
        key_heads=(1, 5),
        query_heads=(2, 3, 10, 11),
    )
    return replace(site, **changes)


def raw_file(path, tensors=None, sites=None, **metadata):
    """Write a file that may be wrong in one way, past the checks of save_activations."""
    site = make_site()
    parts = {f"x.{part}": getattr(site, part) for part in ("query", "key", "value", "cu_seqlens")}
    for name, tensor in (tensors or {}).items():
        parts[name] = tensor
        if tensor is None:
            del parts[name]
    info = {"causal": False, "scale": 0.5, "model": "m", "layer": 0}
    metadata = {
        "format": "reassoc-activations-1",
        "sites": sites if isinstance(sites, str) else json.dumps({"x": info} if sites is None else sites),
        "provenance": "{}",
        **metadata,
    }
    save_file(parts, path, metadata={k: v for k, v in metadata.items() if v is not None})
    return path


# Round trips


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_round_trip(tmp_path, dtype):
    sites = [
        make_site("b.layer10", dtype=dtype),
        make_site("b.layer2", dtype=dtype, causal=False, layer=None),
    ]
    path = tmp_path / "a.safetensors"
    save_activations(path, sites, {"text": "t", "n": [1, 2]})
    loaded = load_activations(path)
    assert loaded.provenance == {"text": "t", "n": [1, 2]}
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [site.name for site in loaded.sites] == ["b.layer10", "b.layer2"]  # the order given
    for before, after in zip(sites, loaded.sites):
        for field in before.__dataclass_fields__:
            old, new = getattr(before, field), getattr(after, field)
            if isinstance(old, torch.Tensor):
                assert new.dtype == old.dtype and torch.equal(old, new)
            else:
                assert new == old


def test_same_data_same_bytes(tmp_path):
    # The metadata of safetensors itself comes in random order, different in each call.
    paths = [tmp_path / f"{i}.safetensors" for i in range(8)]
    for path in paths:
        save_activations(path, [make_site()], {"b": 1, "a": 2})
    assert len({path.read_bytes() for path in paths}) == 1
    assert set(load_file(paths[0])) == {f"tiny.layer3.{p}" for p in ("query", "key", "value", "cu_seqlens")}


def test_views_and_shared_memory_are_saved(tmp_path):
    site = make_site(e=5)
    site = replace(site, value=site.key, query=site.query.transpose(0, 1).contiguous().transpose(0, 1))
    save_activations(tmp_path / "a.safetensors", [site], {})
    loaded = load_activations(tmp_path / "a.safetensors").sites[0]
    assert torch.equal(loaded.query, site.query) and torch.equal(loaded.value, site.key)


def test_sequences_are_the_packed_ones():
    site = make_site()
    lengths = [query.shape[1] for query, _, _ in site.sequences()]
    assert lengths == [3, 0, 4]
    _, key, value = list(site.sequences())[2]
    assert torch.equal(key, site.key[:, 3:]) and torch.equal(value, site.value[:, 3:])


def test_loaded_tensors_outlive_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_activations(path, [make_site()], {})
    site = load_activations(path).sites[0]
    path.write_bytes(b"\0" * path.stat().st_size)  # in place, as an editor would
    assert torch.equal(site.query, make_site().query)


def test_plain_file(tmp_path):
    site = make_site(dtype=torch.float32)
    parts = {"query": site.query, "key": site.key, "value": site.value}
    save_file(parts, tmp_path / "plain.safetensors", metadata={"format": "pt"})
    (loaded,) = load_activations(tmp_path / "plain.safetensors").sites
    assert (loaded.name, loaded.causal, loaded.scale) == ("input", False, 5**-0.5)
    assert loaded.cu_seqlens.tolist() == [0, 7] and loaded.cu_seqlens.dtype == torch.int32
    assert loaded.key_heads == (0, 1) and loaded.query_heads == (0, 1, 2, 3)
    save_file({**parts, "cu_seqlens": torch.tensor([0, 2, 7])}, tmp_path / "plain.safetensors")
    (loaded,) = load_activations(tmp_path / "plain.safetensors").sites
    assert loaded.cu_seqlens.tolist() == [0, 2, 7] and loaded.cu_seqlens.dtype == torch.int32
    save_file({**parts, "key": site.key[0]}, tmp_path / "plain.safetensors")
    with pytest.raises(
        InputError, match=r"plain.safetensors: tensor 'key' has shape \(7, 5\); expected three"
    ):
        load_activations(tmp_path / "plain.safetensors")


def test_merge(tmp_path):
    a, b, out = (tmp_path / f"{name}.safetensors" for name in "abo")
    save_activations(a, [make_site("a")], {"text": "a"})
    save_activations(b, [make_site("b")], {"text": "b"})
    merge_activations([b, a], out)
    merged = load_activations(out)
    assert [site.name for site in merged.sites] == ["b", "a"]
    assert merged.provenance == {"captures": [{"text": "b"}, {"text": "a"}]}
    with pytest.raises(InputError, match="two sites are named 'a'"):
        merge_activations([a, a], out)
    assert load_activations(out).sha256 == merged.sha256


# Refusals


def test_unusable_paths(tmp_path, monkeypatch):
    for path, message in [
        (tmp_path / "none.safetensors", "no such file; make one with `reassoc capture`"),
        (tmp_path, "is a folder"),
    ]:
        with pytest.raises(InputError, match=message):
            load_activations(path)
    path = tmp_path / "a.safetensors"
    path.touch()
    with pytest.raises(InputError, match="empty"):
        load_activations(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not an ordinary file"):
        load_activations(tmp_path / "pipe")
    path.write_bytes(b"x")

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(InputError, match=r"cannot read the file .Permission denied"):
        load_activations(path)


@pytest.mark.parametrize("damage", ["text", "truncated", "huge header", "pickle"])
def test_damaged_file(tmp_path, damage):
    path = raw_file(tmp_path / "a.safetensors")
    content = path.read_bytes()
    path.write_bytes(
        {
            "text": b"not a tensor file at all",
            "truncated": content[:-10],
            "huge header": b"\xff" * 8 + content[8:],
            "pickle": b"\x80\x04K\x01." + content,
        }[damage]
    )
    with pytest.raises(InputError, match=r"a.safetensors: not a readable safetensors file") as caught:
        load_activations(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": None}, "its format is None; expected 'reassoc-activations-1'"),
        ({"format": "reassoc-activations-9"}, "its format is 'reassoc-activations-9'"),
        ({"sites": "{"}, "metadata 'sites' is not valid JSON"),
        ({"sites": "[" * 100_000}, "metadata 'sites' is not valid JSON"),
        ({"sites": "[]"}, "metadata 'sites' is a JSON list; expected an object"),
        ({"sites": "{}"}, "lists no site"),
        ({"sites": '{"x": 3}'}, "site 'x' is described by 3"),
        ({"provenance": "no"}, "metadata 'provenance' is not valid JSON"),
        ({"provenance": "1"}, "metadata 'provenance' is a JSON int"),
    ],
)
def test_bad_metadata(tmp_path, metadata, message):
    path = raw_file(tmp_path / "a.safetensors", **metadata)
    with pytest.raises(InputError, match=message) as caught:
        load_activations(path)
    assert "\n" not in str(caught.value) and "a.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"causal": 1}, "has causal 1; expected true or false"),
        ({"causal": None}, "has causal None; expected true or false"),
        ({"scale": "1"}, "has scale '1'; expected a positive number"),
        ({"scale": 0}, "has scale 0; expected a positive number"),
        ({"scale": True}, "has scale True; expected"),
        ({"scale": float("nan")}, "has scale nan; expected"),
        ({"scale": 10**400}, "has scale 10+; expected"),
        ({"model": 3}, "has model 3; expected a string"),
        ({"layer": 1.5}, "has layer 1.5; expected an integer"),
        ({"key_heads": [0]}, "lists 1 key_heads; expected 2"),
        ({"key_heads": [0, True]}, r"has key_heads \[0, True\]; expected a list of integers"),
        ({"query_heads": "0123"}, "has query_heads '0123'; expected a list of integers"),
    ],
)
def test_bad_site_entry(tmp_path, entry, message):
    path = raw_file(tmp_path / "a.safetensors", sites={"x": {"causal": False, "scale": 0.5, **entry}})
    with pytest.raises(InputError, match=message):
        load_activations(path)


def with_bad(part, index, *values):
    tensor = getattr(make_site(), part).clone()
    tensor.view(-1)[index : index + len(values)] = torch.tensor(values)
    return {f"x.{part}": tensor}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x.value": None}, "tensor 'x.value' is missing, though the file lists site 'x'"),
        ({"x.cu_seqlens": None}, "tensor 'x.cu_seqlens' is missing"),
        ({"x.query": torch.zeros(4, 35)}, r"'x.query' has shape \(4, 35\); expected three dimensions"),
        ({"x.query": torch.tensor(1.0)}, r"'x.query' has shape \(\); expected three dimensions"),
        (
            {"x.query": torch.zeros(3, 7, 5).half()},
            "'x.query' has 3 heads, which is not a multiple .* 2 heads",
        ),
        ({"x.key": torch.zeros(2, 8, 5).half()}, r"'x.key' has shape \(2, 8, 5\); expected \(2, 7, 5\)"),
        ({"x.key": torch.zeros(2, 7, 4).half()}, r"'x.key' has shape \(2, 7, 4\); expected \(2, 7, 5\)"),
        (
            {"x.value": torch.zeros(2, 6, 6).half()},
            r"'x.value' has shape \(2, 6, 6\); expected \(2, 7, any\)",
        ),
        (
            {"x.value": torch.zeros(1, 7, 6).half()},
            r"'x.value' has shape \(1, 7, 6\); expected \(2, 7, any\)",
        ),
        ({"x.key": torch.zeros(2, 7, 5, dtype=torch.int8)}, "'x.key' is int8; expected float16, bfloat16"),
        ({"x.key": torch.zeros(2, 7, 5)}, "'x.key' is float32 but the query is float16"),
        ({"x.query": torch.zeros(4, 0, 5).half()}, r"'x.query' is empty, shape \(4, 0, 5\)"),
        (with_bad("value", 4, float("nan"), float("nan"), float("inf")), "'x.value' holds 2 NaN and 1 inf"),
        (with_bad("query", 0, float("-inf")), "'x.query' holds 0 NaN and 1 infinite values among 140"),
        ({"x.cu_seqlens": torch.tensor([1, 7], dtype=torch.int32)}, "'x.cu_seqlens' starts at 1; expected 0"),
        (
            {"x.cu_seqlens": torch.tensor([0, 5, 4, 7], dtype=torch.int32)},
            "'x.cu_seqlens' decreases from 5 to 4 at position 2",
        ),
        ({"x.cu_seqlens": torch.tensor([0, 6], dtype=torch.int32)}, "'x.cu_seqlens' ends at 6; expected 7"),
        ({"x.cu_seqlens": torch.tensor([0.0, 7.0])}, "'x.cu_seqlens' is float32 .* expected int32"),
        ({"x.cu_seqlens": torch.tensor([[0, 7]])}, r"'x.cu_seqlens' is int64 of shape \(1, 2\)"),
        ({"x.cu_seqlens": torch.tensor([0])}, r"'x.cu_seqlens' is int64 of shape \(1,\)"),
    ],
)
def test_bad_tensors(tmp_path, tensors, message):
    path = raw_file(tmp_path / "a.safetensors", tensors)
    with pytest.raises(InputError, match=message) as caught:
        load_activations(path)
    assert str(caught.value).startswith(f"{path}: tensor 'x.") and "\n" not in str(caught.value)


def test_saving_refuses_what_loading_would(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(InputError, match="nothing to save"):
        save_activations(path, [], {})
    with pytest.raises(InputError, match=r"tensor 'tiny.layer3.query' holds"):
        save_activations(path, [make_site(query=torch.full((4, 7, 5), float("nan")).half())], {})
    with pytest.raises(InputError, match="scale -1"):
        save_activations(path, [make_site(scale=-1.0)], {})
    with pytest.raises(InputError, match=r"cannot write the file .No such file or directory"):
        save_activations(tmp_path / "none" / "a.safetensors", [make_site()], {})
    with pytest.raises(InputError, match=r"cannot write the file .Is a directory"):
        save_activations(tmp_path, [make_site()], {})
    assert list(tmp_path.iterdir()) == []


# The sample


def test_sample():
    path = sample_path()
    assert path.stat().st_size < 3_000_000
    sample = load_activations(path)
    names = [f"minilm.layer{i}" for i in range(6)] + [f"smollm2.layer{i}" for i in (0, 10, 20)]
    assert [site.name for site in sample.sites] == names
    for site in sample.sites:
        assert site.query.dtype == torch.float16
        if site.name.startswith("minilm"):
            assert (site.causal, site.query.shape, site.key.shape) == (False, (4, 384, 32), (4, 384, 32))
            assert site.cu_seqlens.tolist() == [0, 96, 192, 288, 384] and site.scale == 32**-0.5
            assert site.key_heads == site.query_heads == (0, 3, 6, 9)
        else:
            assert (site.causal, site.query.shape, site.key.shape) == (True, (3, 512, 64), (1, 512, 64))
            assert site.cu_seqlens.tolist() == [0, 256, 512] and site.scale == 64**-0.5
            assert site.key_heads == (1,) and site.query_heads == (3, 4, 5)
    provenance = (path.parent / "PROVENANCE.md").read_text()
    text = (path.parent / "sample.txt").read_bytes()
    assert sample.sha256 in provenance and f"{path.stat().st_size:,} bytes" in provenance
    for part in sample.provenance["captures"]:
        assert part["text_sha256"] == hashlib.sha256(text).hexdigest()
        for digest in [part["text_sha256"], *part["model_sha256"].values()]:
            assert digest in provenance


# Atomic writing


def test_atomic_write_replaces(tmp_path):
    target = tmp_path / "a.json"
    with atomic_write(target) as temporary:
        assert temporary.parent == tmp_path and temporary.suffix == ".json" and temporary != target
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    target.chmod(0o640)
    with atomic_write(target) as temporary:
        temporary.write_text("newer")
    assert target.read_text() == "newer" and target.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()]
)
@pytest.mark.parametrize("exists", [True, False])
def test_atomic_write_keeps_the_old_file(tmp_path, error, exists):
    target = tmp_path / "a.json"
    if exists:
        target.write_text("old")
    with pytest.raises(type(error)), atomic_write(target) as temporary:
        temporary.write_text("half")
        raise error
    assert [path.read_text() for path in tmp_path.iterdir()] == (["old"] if exists else [])


def test_full_disk_while_saving(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_activations(path, [make_site()], {})
    before = path.read_bytes()

    def full(self, data):
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(InputError, match=r"cannot write the file .No space left on device"):
        save_activations(path, [make_site(N=9, cu_seqlens=torch.tensor([0, 9]))], {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_atomic_write_follows_links_and_refuses_devices(tmp_path):
    target, link = tmp_path / "real", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with atomic_write(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink() and target.read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError), atomic_write(path):
            raise AssertionError("not reached")
