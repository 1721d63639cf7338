"""What a recall experiment has to say: accuracy against the size of the state."""

from __future__ import annotations

from .._lines import Line, line_figure, spread
from .._page import columns, count, many
from .._study import Section, Study
from ..fidelity import Row
from ..figures import Plot
from ..recipes import recipe
from .answer import answer, by, mean, of_size
from .data import Size
from .run import DIVERGED, Results
from .words import DEFINITIONS, LIMITS

_HEADS = columns("<recipe, head size, features, state bytes, parameters, steps")


def study(results: Results) -> Study:
    """The results as tables, figures and sentences."""
    settings = results.manifest["settings"]
    tests = [Size(*map(int, text.split(":"))) for text in settings["test"]]
    hardest = max(tests, key=lambda size: (size.pairs, size.tokens))
    trained = [size for size in tests if str(size) in settings["train"]] or tests
    focus = max(trained, key=lambda size: (size.pairs, size.tokens))
    lead = (
        f"Models of {settings['layers']} layers, width {settings['width']} and {settings['heads']} heads "
        "learned to answer questions about pairs that they had read (multi-query associative recall, Arora "
        f"et al. 2023). Vocabulary {settings['vocabulary']}; trained on {', '.join(settings['train'])} "
        f"(tokens:pairs) for at most {settings['steps']:,} steps of {settings['batch']} sequences, with "
        f"{many(len(settings['seeds']), 'seed')}; outputs of attention "
        f"{'' if settings['output_norm'] else 'not '}normalized per head. The size of a head, and with it of "
        "the state, varies; the width of the model does not."
    )
    chosen = [row for row in results.rows if row["chosen"]]
    return Study(
        name="recall",
        title="How much can each kind of attention recall, for the memory it keeps?",
        lead=lead,
        answer=answer(results, chosen, focus, hardest),
        rows=results.rows,
        manifest=results.manifest,
        sections=_sections(results, chosen, tests),
        figures=_figures(results, chosen, focus),
        definitions=DEFINITIONS,
        limits=LIMITS,
        more={"curves": results.curves},
    )


def _sections(results: Results, chosen: list[Row], tests: list[Size]) -> list[Section]:
    lines: list[tuple[str, list[object]]] = []
    several = len(results.manifest["settings"]["seeds"]) > 1
    for text in dict.fromkeys(row["recipe"] for row in chosen):
        for dim in sorted({row["head_dim"] for row in chosen if row["recipe"] == text}):
            mine = [row for row in chosen if row["recipe"] == text and row["head_dim"] == dim]
            some = of_size(mine, tests[-1])
            steps = sorted({row["steps"] for row in some})
            note = " diverged" if DIVERGED in {row["ended"] for row in some} else ""
            cells: list[object] = [
                text, dim, some[0]["features"], count(some[0]["state_bytes"]), count(some[0]["parameters"]),
                (count(steps[0]) if len(steps) == 1 else f"{steps[0]:,}–{steps[-1]:,}") + note,
            ]  # fmt: skip
            for size in tests:
                values = [row["accuracy"] for row in of_size(mine, size)]
                cell = f"{mean(values):.1%}"
                cells.append(f"{cell} ±{50 * (max(values) - min(values)):.1f}" if several else cell)
            lines.append(("reference" if recipe(text).softmax else "", cells))
    chance: list[object] = [
        "naming any value of the sequence",
        *[""] * (len(_HEADS) - 1),
        *(f"{1 / s.pairs:.1%}" for s in tests),
    ]
    lines.append(("reference", chance))
    heads = [*_HEADS, *columns(", ".join(map(str, tests)))]
    about = "Mean over seeds, ± half the distance between the best and the worst seed. " if several else ""
    text = f"{about}Columns TOKENS:PAIRS are test sizes. State bytes at {tests[-1].tokens} tokens."
    return [Section("Accuracy of every recipe and size", text, heads, lines)]


def _figures(results: Results, chosen: list[Row], focus: Size) -> list[Plot]:
    texts = list(dict.fromkeys(row["recipe"] for row in chosen))
    sizes = [
        Line(text, spread(by(of_size(chosen, focus, text), "state_bytes")), recipe(text).softmax)
        for text in texts
    ]
    largest = max(row["head_dim"] for row in chosen)
    pairs = []
    for text in texts:
        mine = [row for row in chosen if row["recipe"] == text and row["head_dim"] == largest]
        longest: dict[int, int] = {}
        for row in mine:  # of two sizes with as many pairs, the shorter: the others show length, not pairs
            longest[row["pairs"]] = min(longest.get(row["pairs"], row["tokens"]), row["tokens"])
        rows = [row for row in mine if row["tokens"] == longest[row["pairs"]]]
        pairs.append(Line(text, spread(by(rows, "pairs")), recipe(text).softmax))
    curves = []
    rates = {row["recipe"]: row["rate"] for row in chosen if row["head_dim"] == largest}
    for text in texts:
        points = [
            row
            for row in results.curves
            if (row["recipe"], row["head_dim"], row["rate"]) == (text, largest, rates[text])
        ]
        curves.append(Line(text, spread(by(points, "step")), recipe(text).softmax))
    drawn = (
        ("state", "Accuracy against the size of the state",
         f"Sequences of {focus}. Up and to the left is better. Bars from the worst to the best seed. Dashed: "
         "softmax attention, whose memory grows with the sequence.",
         line_figure(sizes, x="bytes kept of one sequence", y="accuracy", log_x=True, share=True,
                     level=("any value of the sequence", 1 / focus.pairs))),
        ("pairs", "Accuracy against the number of pairs",
         f"Heads of size {largest}. Where a line falls, there are more pairs than the model can keep apart.",
         line_figure(pairs, x="pairs in a sequence", y="accuracy", log_x=True, share=True,
                     at=sorted({point[0] for line in pairs for point in line.points}))),
        ("training", "How fast each one learns",
         f"Validation accuracy during training, heads of size {largest}; a line ends where training stopped.",
         line_figure(curves, x="training steps", y="validation accuracy", share=True)),
    )  # fmt: skip
    return [
        Plot(name, "", title, caption, figure) for name, title, caption, figure in drawn if figure is not None
    ]
