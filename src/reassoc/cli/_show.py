"""Fidelity results on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from ..lab import Results, answers
from ..lab.answer import WORTHLESS
from ..lab.timing import Time


def show(results: Results, times: list[Time]) -> None:
    """Print a table and the answer for each model; it fits 80 columns."""
    console = Console(soft_wrap=True, highlight=False)
    measured = {(t.model, t.map, t.features): t for t in times}
    target = results.manifest["target_error"]
    for answer in answers(results):
        heads = answer.lines[0].heads
        console.print(
            f"{answer.model}: output error against softmax, {heads} heads", style="bold", markup=False
        )
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("map", no_wrap=True)
        for column in ("r", "error", "over heads", f"<={target:g}", "op/tok", "state"):
            table.add_column(column, justify="right", no_wrap=True, min_width=5)  # a cut number misleads
        if times:
            table.add_column("time", justify="right", no_wrap=True, min_width=5)
        doubtful = False
        for line in answer.lines:
            unreliable = line.predicted_variance is not None and line.predicted_variance > WORTHLESS
            doubtful |= unreliable
            row = [
                line.map + (" *" if unreliable else ""),
                f"{line.features}",
                f"{line.median:.2f}",
                f"{line.best:.2g}-{line.worst:.2g}",
                f"{line.within}/{line.heads}",
                _short(line.operations),
                _short(line.state_bytes) + "B",
            ]
            if times:
                time = measured.get((answer.model, line.map, line.features))
                row.append("" if time is None else f"{time.ratio:.2g}x")
            table.add_row(*row)
        console.print(table)
        console.print("r: features; error: median over heads; op/tok: operations per token and query head")
        if times:
            console.print(f"time: forward, {times[0].length:,} tokens, relative to softmax on this machine")
        if doubtful:
            console.print("* the kernel estimate's predicted relative variance is above 1")
        for sentence in answer.sentences:
            console.print(f"- {sentence}", markup=False)
        console.print()


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"
