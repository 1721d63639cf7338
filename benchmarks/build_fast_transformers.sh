#!/bin/sh
# Builds pytorch-fast-transformers 0.4.0 (2021, its last release) for the CPU, into a fresh environment that
# also has reassoc's present torch: what tests/compat/fast compares with where it is installed, and what
# benchmarks/record_fast_transformers.py records.
#
#     sh benchmarks/build_fast_transformers.sh FOLDER [PYTHON]
#     PYTHONPATH=src FOLDER/bin/python benchmarks/record_fast_transformers.py tests/compat/fast/data
#
# Needs a C++ compiler; takes some minutes. Its setup.py builds CUDA extensions wherever it finds nvcc, and with
# the torch of an isolated build environment where pip makes one. So: no nvcc on the PATH, no CUDA_HOME, and no
# build isolation.
set -eu

folder=${1:?usage: build_fast_transformers.sh FOLDER [PYTHON]}
python=${2:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)

"$python" -m venv "$folder"
folder=$(cd "$folder" && pwd)
pip="$folder/bin/python -m pip install -c $here/constraints.txt"
$pip setuptools wheel numpy torch safetensors einops pytest hypothesis

unset CUDA_HOME CUDA_PATH 2>/dev/null || true
PATH=$folder/bin:/usr/bin:/bin
if command -v nvcc >/dev/null; then
    echo "nvcc is in $(dirname "$(command -v nvcc)"): this script builds for the CPU only" >&2
    exit 1
fi
export PATH MAX_JOBS="${MAX_JOBS:-1}"
$pip --no-build-isolation --no-deps pytorch-fast-transformers==0.4.0
# From outside the repository, so that what is imported is what was installed.
cd "$folder" && bin/python -c "import fast_transformers.builders; print('fast_transformers', fast_transformers.__version__)"
