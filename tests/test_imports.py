"""The import is light, and the public surface is what the design says."""

import functools
import inspect
import json
import subprocess
import sys

import pytest

import reassoc
from reassoc import nn

PUBLIC = [
    "AttentionState",
    "HybridState",
    "Summary",
    "attention_matrix",
    "backends",
    "citation",
    "compose",
    "feature_maps",
    "hybrid_attention",
    "hybrid_step",
    "linear_attention",
    "read",
    "rules",
    "step",
    "summarize",
]
HEAVY = ("matplotlib", "typer", "rich", "transformers", "safetensors", "scipy", "hypothesis", "numpy")
PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import reassoc
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "added": sorted(set(sys.modules) - before)}))
"""


@functools.cache
def probe(_attempt=0):
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_loads_torch_and_nothing_heavier():
    added = {name.split(".")[0] for name in probe()["added"]}
    assert "reassoc" in added
    third_party = added - {"reassoc"} - set(sys.stdlib_module_names)
    # Parts of torch that torch itself loads late are no new dependency.
    assert third_party <= {"torch"}, third_party
    assert not added & set(HEAVY)


def test_import_does_not_load_the_laboratory():
    upper = ("reassoc.lab", "reassoc.cli", "reassoc.nn", "reassoc.hf", "reassoc.explorer")
    assert not [name for name in probe()["added"] if name.startswith(upper)]


def test_import_is_quick():
    # 0.05 s on an idle core; the best of three, because other work on the machine only ever adds.
    best = min(probe(attempt)["seconds"] for attempt in range(3))
    assert best < 0.3, f"import reassoc takes {best:.2f} s beyond torch"


def test_public_surface():
    assert sorted(reassoc.__all__) == reassoc.__all__ == PUBLIC
    # Submodules appear as attributes once something imports them; nothing else may beside the surface.
    visible = {name for name, thing in vars(reassoc).items() if not inspect.ismodule(thing)}
    assert {name for name in visible if not name.startswith("_")} <= set(PUBLIC)
    assert reassoc.__version__.count(".") == 2


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    thing = getattr(reassoc, name)
    assert (inspect.getdoc(thing) or "").strip()
    if inspect.isclass(thing):
        members = [m for m in vars(thing) if not m.startswith("_") and callable(getattr(thing, m))]
        assert not [m for m in members if not (inspect.getdoc(getattr(thing, m)) or "").strip()]


@pytest.mark.parametrize("module", [reassoc.feature_maps, reassoc.rules, nn], ids=lambda m: m.__name__)
def test_submodule_names_are_documented(module):
    names = getattr(module, "__all__", ["Sum", "Decay"])
    assert len(set(names)) == len(names)
    for name in names:
        thing = getattr(module, name)
        # inspect.getdoc would take a docstring from a base class.
        assert (thing.__doc__ or "").strip(), name
        assert inspect.getmodule(thing).__name__.startswith("reassoc.")


def test_modules_need_nothing_beyond_torch():
    code = PROBE.replace("import reassoc", "import reassoc.nn")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = json.loads(done.stdout)["added"]
    assert "reassoc.nn" in added
    third_party = {name.split(".")[0] for name in added} - {"reassoc"} - set(sys.stdlib_module_names)
    assert third_party <= {"torch"}, third_party
    assert not [name for name in added if name.startswith(("reassoc.lab", "reassoc.cli"))]


def test_modules_are_sorted_and_document_their_methods():
    assert sorted(nn.__all__) == nn.__all__
    for name in nn.__all__:
        thing = getattr(nn, name)
        members = [m for m in vars(thing) if not m.startswith("_") and callable(getattr(thing, m))]
        assert not [m for m in members if not (inspect.getdoc(getattr(thing, m)) or "").strip()], name
