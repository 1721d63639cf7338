"""Make the activation file that comes with the library, `src/reassoc/lab/data/sample.safetensors`.

Needs `pip install reassoc[hf]` and the two models on disk; PROVENANCE.md beside the file says where they come
from and what they must hash to. Takes about half a minute and 3 GB of memory:

    python benchmarks/make_sample.py --minilm models/all-MiniLM-L6-v2 --smollm2 models/smollm2

The same machine and versions give the same bytes. Elsewhere the last bits of a matrix product may differ, and
with them a few float16 values by one unit.
"""

import argparse
import tempfile
from pathlib import Path

from reassoc.lab.activations import load_activations, merge_activations
from reassoc.lab.capture import capture

DATA = Path(__file__).parents[1] / "src" / "reassoc" / "lab" / "data"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minilm", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--smollm2", type=Path, required=True, help="folder of the SmolLM2-135M GGUF file")
    parser.add_argument("--gguf", default="SmolLM2-135M-Instruct.Q4_1.gguf", help="its name (%(default)s)")
    parser.add_argument("--text", type=Path, default=DATA / "sample.txt", help="text to run over")
    parser.add_argument("--out", type=Path, default=DATA / "sample.safetensors", help="file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / "minilm.safetensors", Path(folder) / "smollm2.safetensors"]
        # Every layer of the encoder, every third head; three depths of the decoder, one group of three heads.
        capture(
            options.minilm,
            options.text,
            "all",
            384,
            out=parts[0],
            sequence_length=96,
            heads=[0, 3, 6, 9],
            prefix="minilm",
        )
        capture(
            options.smollm2,
            options.text,
            [0, 10, 20],
            512,
            out=parts[1],
            gguf=options.gguf,
            sequence_length=256,
            heads=[1],
            prefix="smollm2",
        )
        merge_activations(parts, options.out)
    made = load_activations(options.out)
    names = ", ".join(site.name for site in made.sites)
    print(f"{options.out}: {options.out.stat().st_size} bytes, sha256 {made.sha256}\n{names}")


if __name__ == "__main__":
    main()
