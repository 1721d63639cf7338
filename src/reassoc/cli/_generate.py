"""`reassoc generate`: text as a model writes it, and what it takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer


def generate(
    model: Annotated[
        str, typer.Option(help="Model folder, converted or not; nothing is downloaded.", metavar="FOLDER")
    ],
    prompt: Annotated[str | None, typer.Option(help="What to go on from.", metavar="TEXT")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="UTF-8 file with the prompt, however long.", metavar="FILE")
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(help="Name of a GGUF file in the model folder, to load instead.", metavar="NAME"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to write, at most.", metavar="N")] = 100,
    temperature: Annotated[
        float, typer.Option(help="Of sampling from all tokens; 0: always the most probable one.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    beams: Annotated[
        int, typer.Option(help="Beams of a beam search, whose text comes at the end.", metavar="N")
    ] = 1,
) -> None:
    """Write text with a pretrained model, converted or not.

    Text goes to standard output as it comes, without the prompt. At the end one line on standard error:
    tokens a second, of the prompt and of the text, and the bytes that the model keeps of the sequence: they
    grow with every token for softmax attention, and do not once every layer is converted.

    Examples:
    `reassoc generate --model smollm2-linear --prompt "In the beginning"`

    `reassoc generate --model smollm2-linear --prompt-file long.txt --tokens 200 --temperature 0.8`
    """
    from ..lab._pretrained import import_transformers

    import_transformers()  # or say what to install
    from ..hf import cache_bytes
    from ..hf.evaluate import check_length, decodes
    from ..lab import InputError
    from ..lab._pretrained import find_pretrained, quiet_log
    from ..lab._text import read_text

    if (prompt is None) == (prompt_file is None):
        raise InputError("expected one of --prompt and --prompt-file")
    if tokens < 1 or beams < 1 or not 0 <= temperature < float("inf"):
        raise InputError(
            "expected --tokens and --beams of at least 1 and a --temperature of at least 0, got "
            f"{tokens}, {beams} and {temperature:g}"
        )
    if beams > 1 and temperature:
        raise InputError("--beams looks for the most probable text, --temperature samples: name one of them")
    text = read_text(prompt_file) if prompt_file is not None else str(prompt)
    source = find_pretrained(model, gguf)
    tokenizer, loaded = source.load_tokenizer(), source.load_model(head=True)
    if not decodes(loaded):
        raise InputError(
            f"{source.name}: {type(loaded).__name__} does not write text one token after another"
        )
    inputs = tokenizer(text, return_tensors="pt", padding=False, truncation=False, verbose=False)
    count = inputs["input_ids"].shape[1]
    if not count:
        raise InputError("the prompt is empty: give at least one token to go on from")
    check_length(loaded, count + tokens)
    with quiet_log():
        output, times = _write(loaded, tokenizer, inputs, tokens, temperature, seed, beams)
    if beams > 1:
        typer.echo(tokenizer.decode(output.sequences[0, count:], skip_special_tokens=True))
    prefill = times[1] - times[0]
    told = [f"{count:,} tokens of prompt, {count / prefill:,.1f} a second"]
    if len(times) > 2:
        told.append(f"{len(times) - 2:,} more, {(len(times) - 2) / (times[-1] - times[1]):,.1f} a second")
    kept = cache_bytes(output["cache" if "cache" in output else "past_key_values"])
    typer.echo(f"{'; '.join(told)}; {kept:,} bytes of state", err=True)


def _write(
    model: Any, tokenizer: Any, inputs: Any, tokens: int, temperature: float, seed: int, beams: int
) -> tuple[Any, list[float]]:
    """What transformers' generate gives, and the times of its start and of every step's end."""
    import torch
    import transformers

    times: list[float] = []

    class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    own = model.generation_config
    # A configuration of its own: what the model's says about sampling is not what was asked for.
    config = transformers.GenerationConfig(
        max_new_tokens=tokens, num_beams=beams, do_sample=temperature > 0,
        eos_token_id=own.eos_token_id, bos_token_id=own.bos_token_id,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else tokenizer.eos_token_id,
        return_dict_in_generate=True, **({"temperature": temperature, "top_k": 0} if temperature else {}),
    )  # fmt: skip
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    ids = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}
    times.append(time.perf_counter())
    output = model.generate(
        **ids, generation_config=config, stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
        **({} if beams > 1 else {"streamer": streamer}),
    )  # fmt: skip
    return output, times
