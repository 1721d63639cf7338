"""The native library: loaded or explained, one OpenMP runtime; what an installation contains."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import reassoc
from reassoc.kernels import _library
from test_native_cpp import gcc

ROOT = Path(__file__).parent.parent
# By their metadata: to look for the module pip would make setuptools give up its distutils, which torch's
# compiler then misses in this process.
INSTALLED = {d.metadata["Name"].lower().replace("_", "-") for d in metadata.distributions()}
NOT_INSTALLED = "reassoc" not in INSTALLED
needs_library = pytest.mark.skipif(_library.library() is None, reason=f"native library: {_library.reason()}")
needs_builder = pytest.mark.skipif(
    not {"scikit-build-core", "pip"} <= INSTALLED,
    reason="needs the extra dev",
)


def python(code, **variables):
    """What a fresh process prints, as JSON."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---------------------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(NOT_INSTALLED, reason="reassoc runs from its source folder")
@pytest.mark.skipif(os.environ.get("REASSOC_NATIVE") == "0", reason="REASSOC_NATIVE=0")
@pytest.mark.skipif(not gcc(), reason="no GCC")
def test_a_machine_with_a_compiler_has_the_library():
    """A C++ error only makes an install slower: here it fails."""
    assert _library.library() is not None, _library.reason()


@needs_library
def test_the_library_is_of_this_version():
    module = _library.library()
    assert module.version == reassoc.__version__
    assert module.isa in ("avx512", "avx2", "neon", "plain")
    assert isinstance(module.openmp, bool)
    assert _library.reason() == "available"


@needs_library
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_one_openmp_runtime_in_the_process():
    before, after, loaded = python("""
import json, torch
def mapped():
    files = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
    return sorted(f for f in files if f.split("/")[-1].startswith(("libgomp", "libomp", "libiomp")))
before = mapped()
from reassoc.kernels import _library
torch.ones(1 << 20).exp().sum()
print(json.dumps([before, mapped(), _library.library() is not None]))
""")
    assert loaded and len(after) <= 1
    assert after == before or not before  # torch's own, where it has one


@needs_library
@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_the_library_asks_for_no_runtime_of_its_own():
    """Under the name that this torch happens to use, a second runtime would not show in the test above."""
    dynamic = subprocess.run(["readelf", "-d", _library.library().__file__], capture_output=True, text=True)
    needed = [line for line in dynamic.stdout.splitlines() if "NEEDED" in line]
    assert needed and not [line for line in needed if "omp" in line]


@needs_library
def test_an_instruction_set_can_be_asked_for():
    code = "import json; from reassoc.kernels._library import library; print(json.dumps(library().isa))"
    assert python(code, REASSOC_ISA="plain") == "plain"


def test_disabled_when_it_runs():
    code = """
import json, sys
from reassoc.kernels import _library
print(json.dumps([_library.library() is None, _library.reason(), "reassoc._native" in sys.modules]))
"""
    missing, reason, imported = python(code, REASSOC_NATIVE="0")
    assert missing and not imported
    assert "REASSOC_NATIVE=0" in reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ModuleNotFoundError("No module named 'reassoc._native'"),
            ["not built", "install GCC (g++), then reassoc again"],
        ),
        (ImportError("undefined symbol: GOMP_parallel"), ["failed to load", "GOMP_parallel"]),
        (RuntimeError("nanobind: initialization failed"), ["failed to load", "initialization failed"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_library_that_does_not_load_is_explained(monkeypatch, error, words):
    def fail(name):
        raise error

    monkeypatch.delenv("REASSOC_NATIVE", raising=False)
    monkeypatch.setattr(_library, "import_module", fail)
    module, reason = _library._load()
    assert module is None
    for word in words:
        assert word in reason


# ---------------------------------------------------------------------------------------------------------
# What is installed
# ---------------------------------------------------------------------------------------------------------


@needs_builder
@pytest.mark.slow
@pytest.mark.parametrize(
    "without", [{"REASSOC_NATIVE": "0"}, {"CXX": "/bin/false"}], ids=["asked", "no compiler"]
)
def test_without_a_compiler_the_wheel_is_complete_and_pure(without, tmp_path):
    if "CXX" in without and not shutil.which("cmake", path=str(Path(sys.executable).parent)):
        pytest.skip("needs the extra dev")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(tmp_path),
        ".",
    ]
    variables = {**os.environ, "PATH": path, "REASSOC_NATIVE": "1", **without}
    done = subprocess.run(build, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"reassoc-{reassoc.__version__}-py3-none-any.whl"
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    package = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/reassoc").rglob("*.py")}
    files = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    data = {f"reassoc/lab/data/{name}" for name in ("king-james.txt.xz", "sample.safetensors", "sample.txt")}
    assert files >= package | data | {"reassoc/py.typed"}
    assert not [f for f in files if f.endswith((".so", ".cpp", ".pyc"))]
    place, reason = python(
        "import json, sys\n"
        # An editable installation would be found first.
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
        f"sys.path.insert(0, {str(unpacked)!r})\n"
        "import reassoc\n"
        "from reassoc.kernels._library import reason\n"
        "print(json.dumps([reassoc.__file__, reason()]))",
        REASSOC_NATIVE="1",
    )
    assert place.startswith(str(unpacked)) and reason.startswith("not built")


@needs_builder
def test_the_source_archive_has_what_a_build_needs(tmp_path):
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {name.split("/", 1)[1] for name in tar.getnames()}
    sources = {
        str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".txt")
    }
    assert files >= sources | {"LICENSE", "README.md", "Makefile", "constraints.txt", "tests/oracle.py"}
    junk = (".so", ".pyc", ".o", ".whl")
    assert not [f for f in files if f.endswith(junk) or f.startswith((".", "build/", "dist/"))]
