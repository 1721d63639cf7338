"""The C++ tests of the kernels, for every instruction set of this machine: `make native-test`.

Each way of building finds its own faults: optimized as installed; with memory and arithmetic watched; with
threads watched (std::thread then stands in for OpenMP, whose runtime the thread sanitizer cannot see into).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

CSRC = Path(__file__).parent.parent / "csrc"
BUILDS = {"optimized": "", "memory": "address,undefined", "threads": "thread"}


# The environment's own CMake and Ninja (extra `dev`), so that a machine needs a compiler only.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def run(*command, cwd=None):
    print("$", *command, flush=True)
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": PATH},
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def gcc():
    """The C++ compiler that an installation takes, if it is GCC; else None."""
    name = os.environ.get("CXX") or "g++"
    if not shutil.which(name):
        return None
    command = [name, "-E", "-dM", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True).stdout
    return name if "__GNUC__" in macros and "__clang__" not in macros else None


def compiler(folder, sanitizers):
    """GCC with these sanitizers, or a skip that says what is missing."""
    found = gcc()
    if not found:
        pytest.skip("no GCC (g++, or what CXX names): the C++ tests were not run")
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    command = [found, *([f"-fsanitize={sanitizers}"] if sanitizers else []), probe, "-o", folder / "probe"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(
            f"{found} does not build programs with {sanitizers or 'its defaults'}: {done.stderr[-300:]}"
        )
    return found


def without_address_randomization():
    """A command to run under: older thread sanitizers stop where the kernel randomizes addresses far."""
    fixed = ["setarch", "-R"]
    allowed = (
        shutil.which("setarch") and subprocess.run([*fixed, "true"], capture_output=True).returncode == 0
    )
    return fixed if allowed else []


@pytest.fixture(params=BUILDS, scope="module")
def built(request, tmp_path_factory):
    """(name, folder) of each build."""
    folder = tmp_path_factory.mktemp(request.param)
    sanitizers = BUILDS[request.param]
    options = {
        "CMAKE_CXX_COMPILER": compiler(folder, sanitizers),
        "CMAKE_COMPILE_WARNING_AS_ERROR": "ON",
        "REASSOC_MODULE": "OFF",
        "REASSOC_TESTS": "ON",
        "REASSOC_SANITIZE": sanitizers,
    }
    configure = [f"-D{name}={value}" for name, value in options.items()]
    run(shutil.which("cmake", path=PATH), "-G", "Ninja", "-S", str(CSRC), "-B", str(folder), *configure)
    run(shutil.which("cmake", path=PATH), "--build", str(folder))
    return request.param, folder


def test_cpp(built):
    name, folder = built
    under = without_address_randomization() if name == "threads" else []
    print(
        run(*under, shutil.which("ctest", path=PATH), "--output-on-failure", "--no-tests=error", cwd=folder)
    )


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
@pytest.mark.parametrize("built", ["optimized"], indirect=True)
def test_no_code_is_shared_between_instruction_sets(built):
    """A linker keeps one of equal inline functions; that for AVX-512 would stop a lesser machine."""
    _, folder = built
    objects = {f.parent.name[len("kernels_") : -len(".dir")]: f for f in folder.rglob("kernels.cpp.o")}
    assert "plain" in objects
    for isa, file in objects.items():
        lines = run("nm", "-C", "--defined-only", str(file)).splitlines()
        symbols = [line.split(maxsplit=2)[1:] for line in lines]
        visible = [symbol for kind, symbol in symbols if kind in "TWVuBDR"]
        assert visible
        # DW.ref: pointers to what exceptions need from the C++ library, no code.
        foreign = [s for s in visible if f"reassoc::{isa}::" not in s and not s.startswith("DW.ref.")]
        assert isa == "plain" or not foreign, foreign
