"""Benchmark results on a terminal: ratios first."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..lab._series import short
from ..lab.bench import Results
from ..lab.bench.figures import way
from ..lab.bench.ratios import MEASURED, WRONG, Row, crossover_text
from ..lab.bench.words import ratio_text, unrest


def show(results: Results) -> None:
    """Print ratios, crossover lengths, times with shares and memory, and what was not measured."""
    console = Console(soft_wrap=True, highlight=False)
    settings = results.manifest["key"]["settings"]
    for direction in settings["directions"]:
        _ratios(console, results, direction)
    for direction in settings["directions"]:
        _times(console, results, direction)
    ceilings = results.manifest["ceilings"]
    if busy := unrest(results.rows):
        console.print(busy, style="red")
    console.print(
        f"ceilings: {ceilings['flops'] / 1e9:,.0f} GFLOP/s ({ceilings['flops_from']}), "
        f"{ceilings['bytes'] / 1e9:,.1f} GB/s copied",
        markup=False,
    )
    if results.manifest["memory"]:
        console.print(results.manifest["memory"], markup=False)
    for name, about in results.manifest["key"]["peers"].items():
        if not about[-1:].isdigit():
            console.print(f"- {name}: {about}", markup=False)
    for row in results.rows:
        if row["status"] != MEASURED:
            what = f"{row['contender']}, {way(row['direction'])}, {row['length']:,}"
            console.print(f"- {what}: {row['status']}, {row['reason']}", markup=False)


def _print(console: Console, heads: list[str], lines: list[list[str]], spread: str) -> None:
    """A table; where it is too wide for the terminal, without what follows ``spread`` in its cells."""
    rows = [line + [""] * (len(heads) - len(line)) for line in lines]

    def width() -> int:
        return sum(max(len(row[i]) for row in [heads, *rows]) + 2 for i in range(len(heads))) + 1

    if width() > console.width:
        rows = [[row[0], *(cell.split(spread)[0] for cell in row[1:])] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(heads):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        alone = not any(row[1:])
        table.add_row(*(escape(cell) for cell in row), style="bold" if alone else None)
    console.print(table)


def _ratios(console: Console, results: Results, direction: str) -> None:
    lengths = results.manifest["key"]["settings"]["lengths"]
    rows: dict[str, dict[str, dict[int, Row]]] = {}
    for row in results.ratios:
        if row["direction"] == direction:
            rows.setdefault(row["ours"], {}).setdefault(row["other"], {})[row["length"]] = row
    if not rows:
        return
    console.print(f"{way(direction)}: how many times longer the others take", style="bold")
    lines: list[list[str]] = []
    for mine, others in rows.items():
        lines.append([mine])
        for other, by_length in others.items():
            cells = [ratio_text(by_length[n]) if n in by_length else "–" for n in lengths]
            lines.append([f"  {short(other, 24)}", *cells])
    _print(console, ["ours, and the other", *(f"{length:,}" for length in lengths)], lines, " [")
    for row in results.crossovers:
        if row["direction"] == direction and row["other"].startswith("softmax"):
            console.print(f"{row['ours']} is never slower than softmax {crossover_text(row)}", markup=False)
    console.print()


def _times(console: Console, results: Results, direction: str) -> None:
    rows: dict[str, dict[int, Row]] = {}
    for row in results.rows:
        if row["direction"] == direction:
            rows.setdefault(row["contender"], {})[row["length"]] = row
    if not rows:
        return
    lengths = results.manifest["key"]["settings"]["lengths"]
    step = direction == "step"
    console.print(f"{way(direction)}: {'microseconds' if step else 'milliseconds'}", style="bold")
    lines: list[list[str]] = []
    for name, by_length in rows.items():
        cells = [_time(by_length.get(n), 1e6 if step else 1e3) for n in lengths]
        timed = [row for row in by_length.values() if row["status"] == MEASURED]
        share = f"{100 * timed[-1]['share']:.0f}%" if timed else "–"
        sizes = [row["held" if step else "memory"] for row in timed]
        size = next((s for s in reversed(sizes) if s is not None), None)
        memory = "–" if size is None else f"{size / 1e6:,.1f}M"
        lines.append([short(name, 30), *cells, share, memory])
    heads = ["", *(f"{n:,}" for n in lengths), "share", "kept" if step else "peak"]
    _print(console, heads, lines, " ±")
    console.print("share: of the multiply-add ceiling, at the longest length timed", end="")
    console.print("; kept: bytes between steps" if step else "; peak: bytes beyond inputs and results, there")
    console.print()


def _time(row: Row | None, unit: float) -> str:
    if row is None:
        return "–"
    if row["status"] == WRONG:
        return f"wrong {row['error']:.0e}"
    if row["status"] != MEASURED:
        return "–"
    value = unit * row["seconds"]
    spread = 50 * (row["upper"] - row["lower"]) / row["seconds"]
    return f"{value:.3g} ±{spread:.0f}%"
