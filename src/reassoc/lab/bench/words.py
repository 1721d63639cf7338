"""What report and terminal say whatever the numbers: definitions, limits, cells."""

from __future__ import annotations

from .ratios import MEASURED, WRONG, Row

DEFINITIONS = (
    ("Ours",
     "reassoc through its public functions, all checks included. Named by feature map and update rule; in "
     "brackets the backend, where one was asked for."),
    ("softmax (SDPA)",
     "torch.nn.functional.scaled_dot_product_attention. It computes another function than linear attention: "
     "the ratio says what is saved, not that one can replace the other. As a step: a key-value cache, "
     "allocated beforehand, takes the new key and value and is read whole."),
    ("Yardstick",
     "ELU+1 attention as one would write it in PyTorch: chunks of 64, batched products, cumulative sums. "
     "It never changes, so ratios to it can be compared between machines and versions."),
    ("Peers",
     "Other libraries where installed, each in its own tensor layout, converted before the clock starts. "
     "fla-* are flash-linear-attention's naive forms, the only ones that run without a GPU; they are "
     "written to be read, not to be fast. performer-pytorch adds an epsilon to every feature and is judged "
     "by its own kernel."),
    ("forward and backward",
     "A forward pass that records, then gradients of every input (gates included) of a sum of outputs with "
     "fixed random weights."),
    ("One decode step", "One token through reassoc.step, after so many keys: time for a whole layer."),
    ("Taking turns",
     "All contenders of a length run in one process, one after the other, in every round; the order is "
     "rotated and every other round reversed. Calls below a millisecond are repeated within a round. Each "
     "round gives one ratio of two calls moments apart, so that other load on the machine hits both."),
    ("Judged",
     "Before it is timed, each contender's result is compared with float64 by the quadratic specification "
     "(softmax: exactly): outputs at the length timed, or 1,024 tokens for what is quadratic; gradients at "
     "up to 1,024 tokens. Errors are relative to the terms of an output, or to the largest of a head. "
     "Ours and softmax are held to this library's error budget, others to a hundred times that. Beyond "
     "it there is “wrong” and no time."),
    ("Never slower",
     "The shortest length from which ours is not slower at any length measured. Between two measured "
     "lengths it is interpolated: log ratio against log length."),
    ("Counted arithmetic",
     "Multiplications and additions by formula, per token and head, r features, e values, d head size: sum "
     "and decay rules 65 (r + e) + 4 r e (chunks of 64, lower triangle); delta rules 6 r e; causal softmax "
     "(N + 1)(d + e). Feature maps and exponentials are not counted. Forward and backward together count "
     "three times."),
    ("Limit",
     "Which takes longer at its ceiling: the counted arithmetic, or moving inputs and outputs once. The "
     "share of the limit can exceed 100 % when data stays in cache."),
    ("Peak memory",
     "Resident memory at its highest during one call, beyond inputs and results, each case in a fresh "
     "process; to about half a megabyte."),
)  # fmt: skip

LIMITS = (
    "One machine, as busy as it was: quartiles show how much times varied. Compare ratios, not times, "
    "between machines.",
    "Random inputs of one shape. Other head sizes and batch sizes give other ratios.",
    "A layer is more than its attention: projections and gates are not timed.",
    "Speed says nothing about quality: `reassoc fidelity` measures how far a kernel is from softmax.",
)

BUSY = 0.05  # of a quiet machine, rounds differ by one or two percent


def ratio_text(row: Row) -> str:
    """A cell: the median and quartiles, ``wrong`` with the error, or a dash."""
    if row["status"] == WRONG:
        return "wrong"
    if row["status"] != MEASURED:
        return "–"
    return f"{short_ratio(row['ratio'])}x [{short_ratio(row['lower'])}-{short_ratio(row['upper'])}]"


def unrest(rows: list[Row]) -> str:
    """A warning where times varied much: half the distance of the quartiles, the median over rows."""
    spreads = sorted((r["upper"] - r["lower"]) / 2 / r["seconds"] for r in rows if r["status"] == MEASURED)
    if not spreads or spreads[len(spreads) // 2] <= BUSY:
        return ""
    return (
        f"Times varied by ±{100 * spreads[len(spreads) // 2]:.0f}% in the median: this machine was busy. "
        "Close other programs and repeat before you quote a number."
    )


def short_ratio(value: float) -> str:
    """Two digits, more only where they are whole."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}" if value < 0.995 else f"{value:.1f}"
