"""`reassoc convert`: a pretrained model with kernel attention, in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

MODEL_HELP = (
    "Model folder: config.json, tokenizer and safetensors weights (or --gguf). A name works if it is already "
    "in the local Hugging Face cache; nothing is downloaded, and nothing in the folder is changed."
)
ENCODER_LENGTH = 256


def convert(
    model: Annotated[str, typer.Option(help=MODEL_HELP, metavar="FOLDER")],
    text: Annotated[
        list[Path],
        typer.Option(help="UTF-8 text to learn from; may be repeated.", metavar="FILE"),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must be missing or empty.", metavar="FOLDER")],
    gguf: Annotated[
        str | None,
        typer.Option(help="Name of a GGUF file in the model folder, to load instead.", metavar="NAME"),
    ] = None,
    part: Annotated[
        str, typer.Option(help="The part of each text to use, as fractions of its bytes.", metavar="A:B")
    ] = "0:0.9",
    test_text: Annotated[
        list[Path] | None,
        typer.Option(help="Text to judge every stage on; may be repeated.", metavar="FILE"),
    ] = None,
    test_part: Annotated[
        str, typer.Option(help="The part of each test text to use.", metavar="A:B")
    ] = "0.95:1",
    feature_map: Annotated[
        str,
        typer.Option(
            help="Kernel of the far keys: codebook, hedgehog, favor+, landmark, elu+1, ...; none: window and "
            "sinks alone.",
            metavar="NAME",
        ),
    ] = "codebook",
    features: Annotated[
        int | None, typer.Option(help="Features of a map with a choice. [256]", metavar="N")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Recent positions that stay exact, the query's own included; 0: none. [64; encoders 0]",
            metavar="N",
        ),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(help="First tokens that stay exact. [4 with a window, otherwise 0]", metavar="N"),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            help="Layers to convert, counted from 0: a list such as 0,2,5; all; none: softmax "
            "everywhere: a control for stage 2.",
            metavar="LIST",
        ),
    ] = "all",
    rule: Annotated[
        str,
        typer.Option(help="sum or decay; without a window also delta or gated-delta.", metavar="NAME"),
    ] = "sum",
    length: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of an example. [1024; encoders at most {ENCODER_LENGTH} of a line]", metavar="N"
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(help="Tokens to calibrate on, taken evenly from the texts.", metavar="N")
    ] = 65536,
    transfer_steps: Annotated[
        int, typer.Option(help="Steps of stage 1: every layer's map learns softmax's output.", metavar="N")
    ] = 100,
    transfer_rate: Annotated[float, typer.Option(help="Learning rate of stage 1.")] = 1e-3,
    tune_steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of stage 2: maps and low-rank adapters learn the text. [100; encoders 0]", metavar="N"
        ),
    ] = None,
    tune_rate: Annotated[float, typer.Option(help="Learning rate of the adapters.")] = 3e-4,
    kernel_rate: Annotated[float, typer.Option(help="Learning rate of the maps in stage 2.")] = 1e-3,
    objective: Annotated[
        str,
        typer.Option(
            help="Of stage 2: next-token, or teacher: the model's own predictions with softmax.",
            metavar="NAME",
        ),
    ] = "next-token",
    batch: Annotated[int, typer.Option(help="Examples of a step.", metavar="N")] = 1,
    bfloat16: Annotated[
        bool,
        typer.Option("--bfloat16/--no-bfloat16", help="Train in mixed precision; maps stay in float32."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of random maps, adapters and the order of examples.")] = 0,
    eval_tokens: Annotated[
        int, typer.Option(help="Tokens of each test text to judge on, taken evenly.", metavar="N")
    ] = 16384,
    checkpoint: Annotated[
        int, typer.Option(help="Steps between checkpoints of an unfinished stage.", metavar="N")
    ] = 50,
) -> None:
    """Replace softmax attention of a pretrained model by kernel attention, and teach it what it lost.

    Four stages, each judged on the test texts: the maps are calibrated on text, without training; stage 1
    (transfer) trains each layer's map towards softmax attention's output; stage 2 (tune) trains maps and
    low-rank adapters on the text, for decoders; the result is saved. For an encoder, lines of the text are
    the examples, and it is judged by the cosine to its original embeddings.

    Writes into the folder: the model, which transformers' from_pretrained loads after `import reassoc.hf`,
    its tokenizer, and conversion.json: settings, hashes of the inputs, versions, and of every stage the
    seconds, the peak memory, the losses and the test figures. An interrupted run is continued by the same
    command.

    Examples:
    `reassoc convert --model smollm2 --text book.txt --test-text book.txt --out smollm2-linear`

    `reassoc convert --model minilm --text book.txt --test-text book.txt --out minilm-linear`

    Controls, without which a figure says little: `--feature-map none` (window and sinks alone) and
    `--layers none` (softmax), with the same steps on the same text.
    """
    from ..lab._pretrained import import_transformers

    import_transformers()  # or say what to install
    from ..hf.evaluate import decodes
    from ..hf.pipeline import check_out, run
    from ..hf.plan import Plan
    from ..lab import InputError
    from ..lab._machine import machine, processor, versions
    from ..lab._pretrained import file_sha256, find_pretrained, quiet_log
    from ._texts import disjoint, texts
    from ._texts import part as fractions

    check_out(out)
    used, kept = fractions("--part", part), fractions("--test-part", test_part)
    disjoint(text, used, test_text or [], kept)
    learned, tests = texts(text, used), texts(test_text or [], kept)
    found = find_pretrained(model, gguf)
    tokenizer, loaded = found.load_tokenizer(), found.load_model(head=True)
    decoder = decodes(loaded)
    near = (64 if decoder else 0) if window is None else window
    far = None if feature_map == "none" else feature_map
    plan = Plan(
        feature_map=far, map_options=_options(far, features, seed), window=near or None,
        sinks=(4 if near else 0) if sinks is None else sinks, layers=_layers(layers), rule=rule,
        length=(1024 if decoder else ENCODER_LENGTH) if length is None else length,
        calibration_tokens=calibration_tokens, transfer_steps=transfer_steps, transfer_rate=transfer_rate,
        tune_steps=(100 if decoder else 0) if tune_steps is None else tune_steps, tune_rate=tune_rate,
        kernel_rate=kernel_rate, objective=objective, batch=batch, bfloat16=bfloat16, seed=seed,
        save_every=checkpoint, eval_tokens=eval_tokens,
    )  # fmt: skip
    about: dict[str, Any] = {
        "model": {"name": found.name, "sha256": found.sha256()},
        "texts": [{"name": p.name, "part": part, "sha256": file_sha256(p)} for p in text],
        "test_texts": [
            {"name": p.name, "part": test_part, "sha256": file_sha256(p)} for p in test_text or []
        ],
        "versions": versions() | {"transformers": import_transformers().__version__},
        "machine": machine() | processor(),
    }
    if far is None and plan.window is None and plan.layers != ():
        raise InputError("--feature-map none with --window 0 leaves no attention; name one of them")
    with quiet_log():
        record = run(loaded, tokenizer, learned, plan, out, tests=tests, about=about, say=typer.echo)
    seconds = sum(stage.get("seconds", 0) + stage.get("test_seconds", 0) for stage in record["stages"])
    typer.echo(f"{out}: written, {seconds:,.0f} s in all")


def _options(feature_map: str | None, features: int | None, seed: int) -> dict[str, Any]:
    """Options of a map: the number of features and the seed, where it takes them."""
    from ..feature_maps import takes
    from ..lab import InputError

    if feature_map is None:
        taken: tuple[str, ...] = ()
    else:
        try:
            taken = takes(feature_map)
        except ValueError as error:
            raise InputError(f"--feature-map: {error}") from None
    if features is not None and "num_features" not in taken:
        raise InputError(
            f"--features: the map {feature_map or 'none'!r} does not let one choose their number"
        )
    wanted = {"num_features": 256 if features is None else features, "seed": seed}
    return {name: value for name, value in wanted.items() if name in taken}


def _layers(text: str) -> tuple[int, ...] | None:
    from ._lists import numbers

    if text in ("all", "none"):
        return None if text == "all" else ()
    return tuple(sorted(set(numbers("--layers", text, int) or [])))
