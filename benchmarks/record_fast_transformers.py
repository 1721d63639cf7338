"""Record what pytorch-fast-transformers 0.4.0 gives, for machines where it is not built.

    sh benchmarks/build_fast_transformers.sh FOLDER
    FOLDER/bin/python benchmarks/record_fast_transformers.py tests/compat/fast/data

Each case of tests/compat/fast/fast_cases.py that is to be recorded becomes a safetensors file of its inputs,
weights, outputs and gradients, below 1 MB in all. tests/compat/fast/test_fast_recorded.py compares.
"""

import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "compat" / "fast"))
import fast_cases

warnings.filterwarnings("ignore", message="torch.qr is deprecated")  # the original's own call


def record(name: str, folder: Path) -> int:
    """One file; its size in bytes."""
    case = fast_cases.CASES[name]
    model = fast_cases.build(fast_cases.ORIGINAL, case)
    given = fast_cases.inputs(case)
    parts = {
        "input": given,
        "weight": model.state_dict(),
        "result": fast_cases.run(fast_cases.ORIGINAL, model, case, given),
    }
    tensors = {f"{part} {key}": t.contiguous().clone() for part, of in parts.items() for key, t in of.items()}
    path = folder / f"{name.replace(' ', '_')}.safetensors"
    save_file(tensors, path)
    return path.stat().st_size


def main() -> None:
    """Record all."""
    if len(sys.argv) != 2:
        sys.exit("usage: record_fast_transformers.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    total = sum(record(name, folder) for name in fast_cases.RECORDED)
    print(f"{len(fast_cases.RECORDED)} cases, {total / 1000:.0f} kB in {folder}")


if __name__ == "__main__":
    main()
