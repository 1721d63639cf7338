"""Capturing activations: run a pretrained model over a text and keep what its softmax attention received."""

import contextlib
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .._errors import InputError
from ._pretrained import Pretrained, file_sha256, find_pretrained
from ._recorder import Recorder, recording
from ._sites import Site
from ._text import read_text, token_sequences
from .activations import Activations, load_activations, save_activations

_BATCH_TOKENS = 1024  # keeps the score matrices of a batch small beside the model itself


def capture(
    model: str | os.PathLike[str],
    source_file: str | os.PathLike[str],
    layers: Sequence[int] | Literal["all"],
    tokens: int,
    *,
    out: str | os.PathLike[str],
    gguf: str | None = None,
    images: bool = False,
    sequence_length: int = 256,
    heads: Sequence[int] | None = None,
    prefix: str | None = None,
    progress: bool | None = None,
) -> Activations:
    """Run a model over a text, or images, and write what its attention layers received to a file.

    ```python
    capture("models/all-MiniLM-L6-v2", "text.txt", layers=[0, 5], tokens=4096, out="minilm.safetensors")
    ```

    Works for every transformers model whose attention goes through the library's attention interface (of an
    encoder-decoder, the encoder). Queries and keys are kept after the rotary embedding, grouped key heads
    are not repeated. Sequences are never padded. Values are stored in float16; a layer that has values
    beyond float16's range is stored in float32. Nothing is downloaded and no code that comes with a model is
    run.

    **Arguments**

    - `model`: folder with configuration, safetensors weights and tokenizer, or a name in the Hugging Face
      cache.
    - `source_file`: UTF-8 text; its beginning is used. With `images` a safetensors file that holds
        `pixel_values` (images, channels, height, width), floating point, as the model takes them.
    - `layers`: indices of the layers, or "all".
    - `tokens`: number of tokens to keep, special tokens included; of images, whole ones until there are so
        many.
    - `out`: the file to write, replaced in one step at the end.
    - `gguf`: name of a GGUF file in the folder, to load instead of safetensors weights.
    - `images`: whether `source_file` holds images.
    - `sequence_length`: tokens of each sequence of text; the last sequence may be shorter.
    - `heads`: indices of key heads to keep, each with all its query heads; None keeps all.
    - `prefix`: what site names begin with, `{prefix}.layer{i}`; the model's name if not given.
    - `progress`: whether to show a progress bar on standard error; None shows it on a terminal.

    **Returns** the written file, loaded.

    **Raises** `InputError`: for anything in the arguments, the model or the text that makes this impossible.
    """
    chosen = None if isinstance(layers, str) and layers == "all" else _indices("layers", layers)
    kept = None if heads is None else _indices("heads", heads)
    for name, number in (("tokens", tokens), ("sequence_length", sequence_length)):
        if number < 1:
            raise InputError(f"{name} is {number}; expected at least 1")
    out, path = Path(out), Path(source_file)
    _check_out(out, path)
    text = "" if images else read_text(path)
    source = find_pretrained(model, gguf)
    longest = _max_positions(source.load_config())
    if not images and longest is not None and min(sequence_length, tokens) > longest:
        raise InputError(
            f"{source.name}: sequence_length is {sequence_length}; this model takes at most {longest}"
        )
    if images:
        batches = _pixels(path)
    else:
        found = token_sequences(source.load_tokenizer(), text, path.name, tokens, sequence_length)
        batches = _batches(found)
    recorder = Recorder(None if chosen is None else frozenset(chosen), kept)
    with _progress_bar(progress, tokens) as advance:
        _run(source, batches, recorder, advance, tokens)
    sites = _sites(source.name, prefix or source.name.split("/")[-1], recorder)
    options = [
        *("--model", source.argument, *(["--gguf", gguf] if gguf else [])),
        *(
            "--images" if images else "--text",
            path.name,
            "--layers",
            "all" if chosen is None else ",".join(map(str, chosen)),
        ),
        *("--tokens", str(tokens), *([] if images else ["--sequence-length", str(sequence_length)])),
        *(["--heads", ",".join(map(str, kept))] if kept else []),
        *(["--prefix", prefix] if prefix else []),
        *("--out", out.name),
    ]
    provenance = {
        "model": source.name,
        "model_sha256": source.sha256(),
        "images" if images else "text": path.name,
        "images_sha256" if images else "text_sha256": file_sha256(path),
        "tokens": tokens,
        "sequence_length": None if images else sequence_length,
        "stored_as_float32": [site.name for site in sites if site.query.dtype == torch.float32],
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "command": shlex.join(["reassoc", "capture", *options]),
    }
    save_activations(out, sites, provenance)
    return load_activations(out)


def _run(
    source: Pretrained,
    batches: Iterator[dict[str, Tensor]],
    recorder: Recorder,
    advance: Callable[[int], None],
    tokens: int,
) -> None:
    model = source.load_model()
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    with recording(model, recorder), torch.inference_mode():
        done = 0
        for batch in batches:
            recorder.start_batch()
            try:
                model(**batch)
            except (InputError, MemoryError):
                raise
            except Exception as error:  # whatever foreign modeling code does not like about plain text
                reason = " ".join(str(error).split())
                raise InputError(
                    f"{source.name}: {type(model).__name__} failed on the input ({type(error).__name__}: "
                    f"{reason:.300}); expected a model of text alone, or --images for one of images. A "
                    "smaller --sequence-length may help"
                ) from error
            if not recorder.seen:
                raise InputError(
                    f"{source.name}: nothing was captured, {type(model).__name__} does not send its "
                    "attention through the attention interface of transformers; this model cannot be captured"
                )
            missing = sorted((recorder.layers or frozenset()) - recorder.seen.keys())
            if missing:
                raise InputError(
                    f"{source.name}: no attention in layer {missing[0]}; layers are {_ranges(recorder.seen)}"
                )
            before, done = done, recorder.tokens
            advance(done - before)
            if done >= tokens:
                break


def _pixels(path: Path) -> Iterator[dict[str, Tensor]]:
    """One image after the other; `InputError` if the file holds none."""
    try:
        with safe_open(path, framework="pt") as file:
            pixels = file.get_tensor("pixel_values")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file of images") from error
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: no safetensors file with pixel_values ({error}); write one with "
            'safetensors.torch.save_file({"pixel_values": ...}, path)'
        ) from error
    if pixels.ndim != 4 or not pixels.is_floating_point() or not len(pixels):
        raise InputError(
            f"{path}: pixel_values is {pixels.dtype} of shape {tuple(pixels.shape)}; expected floating point "
            "(images, channels, height, width)"
        )
    return ({"pixel_values": image[None].float()} for image in pixels)


def _batches(sequences: list[list[int]]) -> Iterator[dict[str, Tensor]]:
    # Only the last sequence can be shorter. By itself it needs no padding, and so no padding is ever seen.
    full = [ids for ids in sequences if len(ids) == len(sequences[0])]
    size = max(1, _BATCH_TOKENS // len(full[0]))
    for start in range(0, len(full), size):
        yield _batch(full[start : start + size])
    if len(full) < len(sequences):
        yield _batch(sequences[len(full) :])


def _batch(rows: list[list[int]]) -> dict[str, Tensor]:
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _sites(model: str, prefix: str, recorder: Recorder) -> list[Site]:
    sites = []
    for layer, rows in sorted(recorder.sequences.items()):
        bounds = torch.tensor([0, *(row[0].shape[1] for row in rows)]).cumsum(0)
        query, key, value = (torch.cat(part, dim=1) for part in zip(*rows, strict=True))
        dtype = torch.float16 if all(map(_fits_float16, (query, key, value))) else torch.float32
        sites.append(
            Site(
                name=f"{prefix}.layer{layer}",
                query=query.to(dtype),
                key=key.to(dtype),
                value=value.to(dtype),
                cu_seqlens=bounds.to(torch.int32),
                causal=recorder.causal[layer],
                scale=recorder.scale[layer],
                model=model,
                layer=layer,
                key_heads=recorder.key_heads[layer],
                query_heads=recorder.query_heads[layer],
            )
        )
    return sites


def _fits_float16(x: Tensor) -> bool:
    return bool((x.abs() <= torch.finfo(torch.float16).max).all())


def _max_positions(config: Any) -> int | None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _indices(name: str, values: Sequence[int] | str) -> tuple[int, ...]:
    if (
        isinstance(values, str)
        or not all(type(value) is int and value >= 0 for value in values)
        or not values
    ):
        raise InputError(f"{name} is {values!r}; expected a list of indices from 0 up, such as [0, 2]")
    return tuple(sorted(set(values)))


def _ranges(layers: Sequence[int] | dict[int, Any]) -> str:
    found = sorted(layers)
    if found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def _check_out(out: Path, text: Path) -> None:
    # Before minutes of work, not after them.
    if out.is_dir():
        raise InputError(
            f"{out}: is a folder; --out takes the file to write, such as activations.safetensors"
        )
    if not out.parent.is_dir():
        raise InputError(f"{out}: the folder {out.parent} does not exist; create it first")
    if out.exists() and text.exists() and out.samefile(text):
        raise InputError(f"{out}: is the text file itself; choose another --out")


@contextlib.contextmanager
def _progress_bar(show: bool | None, total: int) -> Iterator[Callable[[int], None]]:
    show = sys.stderr.isatty() if show is None else show
    if not show:
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("capturing tokens", total=total)
        yield lambda tokens: bar.advance(task, tokens)
