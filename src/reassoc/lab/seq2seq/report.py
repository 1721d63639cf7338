"""What a translation experiment has to say: exact matches and BLEU against the softmax twin."""

from __future__ import annotations

from collections.abc import Sequence

from .._lines import Line, line_figure, spread
from .._page import columns, count, many, number
from .._seeds import SPREAD, compared
from .._study import Section, Study
from ..fidelity import Row
from ..figures import Plot
from ..recipes import recipe
from .run import Results
from .words import DEFINITIONS, LIMITS

_WITHIN = 0.02  # exact matches this close are told as level: two standard errors of 500 answers near 95 %


def study(results: Results) -> Study:
    """The results as tables, figures and sentences."""
    settings, pairs = results.manifest["settings"], results.manifest["pairs"]
    lead = (
        f"Encoder-decoders of {settings['layers']} + {settings['layers']} layers, width {settings['width']} "
        f"and {settings['heads']} heads, the same feature map in encoder, decoder and between them, learned "
        f"“{pairs['name']}” byte by byte: {pairs['train']:,} pairs, {settings['steps']:,} steps of "
        f"{settings['batch']} pairs, {many(len(settings['seeds']), 'seed')}; judged on {pairs['test']:,} "
        "pairs whose sources were never seen."
    )
    return Study(
        name="seq2seq",
        title=f"Does kernel attention translate “{pairs['name']}” as softmax attention does?",
        lead=lead,
        answer=_answer(results),
        rows=results.rows,
        manifest=results.manifest,
        sections=[_table(results), *_examples(results)],
        figures=_figures(results),
        definitions=DEFINITIONS,
        limits=LIMITS,
        more={"curves": results.curves, "examples": results.examples},
    )


def _of(results: Results, text: str) -> list[Row]:
    return [row for row in results.rows if row["recipe"] == text]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _exact(results: Results, text: str) -> float:
    return _mean([row["exact_match"] for row in _of(results, text)])


def _texts(results: Results) -> list[str]:
    """Recipes, softmax first."""
    texts = list(dict.fromkeys(row["recipe"] for row in results.rows))
    return sorted(texts, key=lambda text: not recipe(text).softmax)


def _answer(results: Results) -> list[str]:
    texts = _texts(results)
    order = sorted(texts, key=lambda text: -_exact(results, text))
    linear = [text for text in order if not recipe(text).softmax]
    twins = [text for text in order if recipe(text).softmax]
    sentences = []
    for text in linear[:1]:
        sentences.append(f"Of kernel attention {text} translates best: {_scores(results, text)}.")
    for twin in twins:
        sentences.append(f"Its twin with softmax attention ({twin}): {_scores(results, twin)}.")
    for text in linear[1:]:
        sentences.append(f"{text}: {_scores(results, text)}.")
    if twins and linear:
        best = [row["exact_match"] for row in _of(results, twins[0])]
        words: dict[str, list[str]] = {}
        for text in linear:
            mine = [row["exact_match"] for row in _of(results, text)]
            words.setdefault(compared(mine, best, _WITHIN), []).append(text)
        parts = [f"{word}: {', '.join(words[word])}" for word in ("better", SPREAD, "worse") if word in words]
        sentences.append(f"Exact matches against {twins[0]}, {'; '.join(parts)}.")
    bad = [
        f"{r['recipe']} (seed {r['seed']}, step {r['steps']})"
        for r in results.rows
        if r["ended"] == "diverged"
    ]
    if bad:
        sentences.append(f"Training diverged, and was judged as it stood before: {', '.join(bad)}.")
    return sentences


def _scores(results: Results, text: str) -> str:
    rows = _of(results, text)
    return f"{_exact(results, text):.1%} exactly right, BLEU {_mean([row['bleu'] for row in rows]):.1f}"


def _table(results: Results) -> Section:
    heads = columns("<recipe, exact match, BLEU, test loss, parameters, steps")
    lines: list[tuple[str, list[object]]] = []
    for text in _texts(results):
        rows = _of(results, text)
        exact, bleu = [100 * row["exact_match"] for row in rows], [row["bleu"] for row in rows]
        ended = " diverged" if any(row["ended"] == "diverged" for row in rows) else ""
        cells: list[object] = [
            text, _spread(exact, "%"), _spread(bleu), number(_mean([row["test_loss"] for row in rows]), 3),
            count(rows[0]["parameters"]), count(max(row["steps"] for row in rows)) + ended,
        ]  # fmt: skip
        lines.append(("reference" if recipe(text).softmax else "", cells))
    text = f"BLEU by sacrebleu: {results.manifest['bleu']}."
    if len(results.manifest["settings"]["seeds"]) > 1:
        text = f"Mean over seeds, ± half the distance between the best and the worst seed. {text}"
    return Section("Scores", text, heads, lines)


def _spread(values: list[float], unit: str = "") -> str:
    text = f"{_mean(values):.1f}{unit}"
    return text if len(values) < 2 else f"{text} ±{(max(values) - min(values)) / 2:.1f}"


def _examples(results: Results) -> list[Section]:
    """What each model wrote, right and wrong, with its first seed."""
    heads = columns("<recipe, <source, <target, <answer, <right")
    lines: list[tuple[str, list[object]]] = []
    first = results.manifest["settings"]["seeds"][0]
    for text in _texts(results):
        mine = [row for row in results.examples if (row["recipe"], row["seed"]) == (text, first)]
        for right in (1, 0):
            for row in [row for row in mine if row["right"] == right][:3]:
                word = "right" if right else "wrong"
                lines.append(("", [text, row["source"], row["target"], row["answer"], word]))
    return [Section("Some translations", "Up to three right and three wrong ones of each.", heads, lines)]


def _figures(results: Results) -> list[Plot]:
    lines = []
    for text in _texts(results):
        groups: dict[float, list[float]] = {}
        for row in results.curves:
            if row["recipe"] == text:
                groups.setdefault(row["step"], []).append(row["validation_loss"])
        lines.append(Line(text, spread(groups), recipe(text).softmax))
    figure = line_figure(lines, x="training steps", y="validation loss, nats per byte", log_y=True)
    caption = "Mean over seeds, from the best to the worst. Dashed: softmax attention. Lower is better."
    return [] if figure is None else [Plot("training", "", "How fast each one learns", caption, figure)]
