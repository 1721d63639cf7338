"""`reassoc capture`: activations of a pretrained model into a file."""

from pathlib import Path
from typing import Annotated

import typer


def capture(
    model: Annotated[
        str,
        typer.Option(
            help="Model folder: config.json, tokenizer and safetensors weights (or --gguf). A name works if "
            "it is already in the local Hugging Face cache; nothing is downloaded.",
            metavar="FOLDER",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="File to write, usually NAME.safetensors. Replaced if it exists.", metavar="FILE"),
    ],
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text file to run the model over; its beginning is used.", metavar="FILE"),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            help="Instead of text: safetensors file with pixel_values (images, channels, height, width).",
            metavar="FILE",
        ),
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(help="Name of a GGUF file in the model folder, to load instead.", metavar="NAME"),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(help="Layers to keep, counted from 0: a list such as 0,2,5, or all.", metavar="LIST"),
    ] = "all",
    tokens: Annotated[int, typer.Option(help="Tokens to keep, special tokens included.", metavar="N")] = 2048,
    sequence_length: Annotated[
        int,
        typer.Option(
            help="Tokens in each sequence. Sequences do not see each other; the last may be shorter.",
            metavar="N",
        ),
    ] = 256,
    heads: Annotated[
        str | None,
        typer.Option(
            help="Key heads to keep, such as 0,3, each with all its query heads. Default: all.",
            metavar="LIST",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="Site names become PREFIX.layer0 and so on. Default: the model's name.", metavar="PREFIX"
        ),
    ] = None,
) -> None:
    """Record queries, keys and values of a model's attention layers in an activation file.

    Runs a Hugging Face model over a text, on this machine and offline, and keeps what softmax attention
    received: after the rotary embedding, grouped key heads not repeated. The file takes, per token, layer
    and key head, about 2 x head size x (query heads per key head + 2) bytes.

    For an encoder:

    $ reassoc capture --model models/all-MiniLM-L6-v2 --text text.txt --layers 0,2,5 --tokens 4096 --out minilm.safetensors

    For a GGUF file:

    $ reassoc capture --model models/smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf --text text.txt --layers 0,10,20 --out smollm2.safetensors
    """  # noqa: E501 (a command that can be copied stays on one line)
    from reassoc._errors import InputError
    from reassoc.lab.capture import capture as run

    def indices(option: str, value: str) -> list[int]:
        try:
            return [int(item) for item in value.split(",")]
        except ValueError:
            example = "0,2,5 or all" if option == "--layers" else "0,3"
            raise InputError(
                f"{option} is {value!r}; expected numbers with commas, such as {example}"
            ) from None

    source = images if text is None else text
    if source is None or (text is not None and images is not None):
        raise InputError("give one of --text FILE and --images FILE to run the model over")
    written = run(
        model,
        source,
        "all" if layers == "all" else indices("--layers", layers),
        tokens,
        out=out,
        gguf=gguf,
        images=text is None,
        sequence_length=sequence_length,
        heads=None if heads is None else indices("--heads", heads),
        prefix=prefix,
    )
    first = written.sites[0]
    count = f"{len(written.sites)} site{'s' if len(written.sites) > 1 else ''}"
    typer.echo(
        f"{out}: {count}, {first.query.shape[1]} tokens each, from {first.name} to {written.sites[-1].name}"
    )
