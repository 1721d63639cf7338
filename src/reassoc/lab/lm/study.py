"""What a comparison of language models says: sentences, tables, figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from .._page import columns, count, many, number
from .._study import Section, Study
from ..fidelity import Row
from .contrasts import Contrast, against_first, contrasts, scores
from .evaluate import bits_per_byte, perplexity
from .figures import plots
from .rows import LAST, curves, difference, run_row, written
from .run import JUDGED, WAYS, Results
from .words import DEFINITIONS, LIMITS

_TOLD = 6  # pairs with the first recipe that are told in words; more are left to the table


def study(results: Results) -> Study:
    """The study of a comparison; tokens a second stand apart, because no run repeats them."""
    settings, text = results.manifest["settings"], results.manifest["text"]
    pairs, single = against_first(results), contrasts(results)
    seeds = results.manifest["seeds"]
    lead = (
        f"Decoder language models of width {settings['width']} with {many(settings['layers'], 'layer')} and "
        f"{many(settings['heads'], 'head')} were trained on “{text['name']}” "
        f"({count(text['tokens']['training'])} tokens, a vocabulary of {count(text['vocabulary'])}) for "
        f"{count(settings['steps'])} steps of "
        f"{settings['batch']} × {settings['segment']} tokens. They differ in their attention only. "
        f"{many(len(seeds), 'seed')} each."
    )
    return Study(
        name="lm",
        title="Which attention predicts this text best?",
        lead=lead,
        answer=answer(results, pairs, single),
        rows=[run_row(results, run) for run in results.runs],
        manifest=results.manifest,
        sections=[
            _recipes(results, pairs),
            *([_contrasts(single)] if single else []),
            _ways(results),
            _training(results),
            _samples(results),
        ],
        figures=plots(results),
        definitions=DEFINITIONS,
        limits=LIMITS,
        more={
            "curves": curves(results),
            "differences": [difference(pair) for pair in (*pairs, *single)],
            "samples": written(results),
            "times": [
                {"recipe": r["recipe"], "seed": r["seed"], "tokens_per_second": _speed(results, r)}
                for r in results.runs
            ],
        },
    )


def answer(results: Results, pairs: Sequence[Contrast], single: Sequence[Contrast]) -> list[str]:
    """Sentences, the result first; a difference that may be chance is called so."""
    ranked = sorted(
        (median(found), recipe.name)
        for recipe in results.recipes
        if (found := list(scores(results, recipe.name).values()))
    )
    sentences = []
    if ranked:
        best = ranked[0][1]
        sentences.append(f"Lowest test perplexity: {best}, {_spread(results, best)}.")
        close = [name for _, name in ranked[1:] if _overlap(results, best, name)]
        if close:
            sentences.append(f"Not told apart from it by these seeds: {', '.join(close)}.")
        if len(results.manifest["seeds"]) == 1:
            sentences.append("One seed: how much of a difference is chance is not known.")
    else:
        sentences.append("No model was trained to the end.")
    for run in results.runs:
        if run["diverged"] is not None:
            sentences.append(
                f"{run['recipe']}, seed {run['seed']}: diverged at step {run['diverged'] + 1:,} of "
                f"{results.manifest['settings']['steps']:,}."
            )
    sentences += [_sentence(pair) for pair in single if pair.changes]
    if len(pairs) <= _TOLD:
        sentences += [f"{pair.other} against {pair.base}: {_words(pair)}." for pair in pairs if pair.changes]
    return sentences


def _sentence(pair: Contrast) -> str:
    kinds = {"position": "Positions", "redraw": "Random features"}
    what = f"{kinds.get(pair.choice, pair.choice.capitalize())} {pair.now} instead of {pair.was}"
    if pair.choice == "context":
        what += " in training, both judged carried"
    return f"{what} ({pair.other} against {pair.base}): {_words(pair)}."


def _words(pair: Contrast) -> str:
    change = pair.change
    text = f"{_percent(abs(change))} {'lower' if change < 0 else 'higher'} perplexity"
    if pair.apart is None:
        return f"{text} (one seed)"
    return text if pair.apart else f"{text}, which is within the spread over seeds"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 10 else f"{number(1 + share)} times"


def _changes(pair: Contrast) -> str:
    if not pair.changes:
        return "–"

    def signed(share: float) -> str:
        return f"{100 * share:+.1f} %".replace("-", "−") if abs(share) < 10 else number(1 + share) + " ×"

    found = signed(pair.change)
    if len(pair.changes) > 1:
        found += f" [{signed(min(pair.changes))} to {signed(max(pair.changes))}]"
    return found


def _apart(pair: Contrast | None) -> str:
    return "–" if pair is None or pair.apart is None else "yes" if pair.apart else "no"


def _spread(results: Results, name: str) -> str:
    """``4.21 (4.18 to 4.25)``: the median and the ends over seeds, of perplexity."""
    found = sorted(perplexity(value) for value in scores(results, name).values())
    if not found:
        return "–"
    middle = number(median(found), 4)
    return middle if len(found) == 1 else f"{middle} ({number(found[0], 4)} to {number(found[-1], 4)})"


def _overlap(results: Results, first: str, second: str) -> bool:
    one, other = scores(results, first).values(), scores(results, second).values()
    return min(len(one), len(other)) > 1 and max(one) >= min(other) and max(other) >= min(one)


def _runs(results: Results, name: str) -> list[Row]:
    return [run for run in results.runs if run["recipe"] == name]


def _speed(results: Results, run: Row) -> float:
    settings = results.manifest["settings"]
    return float(settings["batch"] * settings["segment"] / median(run["seconds"]))


def _recipes(results: Results, pairs: Sequence[Contrast]) -> Section:
    by_name = {pair.other: pair for pair in pairs}
    best = min(
        ((median(s), r.name) for r in results.recipes if (s := list(scores(results, r.name).values()))),
        default=(math.nan, ""),
    )[1]
    lines = []
    for recipe in results.recipes:
        runs = _runs(results, recipe.name)
        found = list(scores(results, recipe.name).values())
        bits = bits_per_byte(median(found), results.text.test) if found else math.nan
        pair = by_name.get(recipe.name)
        cells = [
            recipe.name, _spread(results, recipe.name), number(bits, 4),
            "–" if pair is None else _changes(pair), _apart(pair),
            count(median(_speed(results, run) for run in runs)), count(runs[0]["state_bytes"]),
            count(runs[0]["parameters"]),
        ]  # fmt: skip
        lines.append(("chosen" if recipe.name == best else "", cells))
    first = results.recipes[0].name
    heads = columns(
        "<recipe, test perplexity, bits per byte, change, told apart, tokens a second, state, parameters"
    )
    return Section(
        "Recipes",
        "Judged as trained: medians over seeds, in brackets the best and the worst. Change is against "
        f"{first}.",
        heads,
        lines,
    )


def _contrasts(single: Sequence[Contrast]) -> Section:
    lines = [("", [p.choice, p.now, p.was, p.other, _changes(p), _apart(p)]) for p in single]
    return Section(
        "One choice at a time",
        "Recipes that differ in one choice only. A change below zero is a gain of the first over the second.",
        columns("<choice, <this, <instead of, <recipe, change of perplexity, told apart"),
        lines,
    )


def _ways(results: Results) -> Section:
    lines = []
    for recipe in results.recipes:
        cells = [recipe.name, "carried" if recipe.carried else "truncated"]
        for part in JUDGED:
            for way in WAYS:
                values = [run["nats"][part][way] for run in _runs(results, recipe.name)]
                values = [v for v in values if v is not None and v == v]
                cells.append(number(median(map(perplexity, values)), 4) if values else "–")
        lines.append(("", cells))
    return Section(
        "Judged both ways",
        "Perplexity with the context dropped at every segment, and with one state over the whole text, "
        "where the model can.",
        columns("<recipe, <trained, validation truncated, validation carried, test truncated, test carried"),
        lines,
    )


def _training(results: Results) -> Section:
    fewest = min(run["parameters"] for run in results.runs)
    lines = []
    for recipe in results.recipes:
        rows = [run_row(results, run) for run in _runs(results, recipe.name)]
        ends = [row["diverged_at_step"] for row in rows if row["diverged_at_step"] is not None]
        cells = [recipe.name]
        for name, digits in (("training_loss", 4), ("largest_rise", 2), ("largest_gradient", 2)):
            values = [row[name] for row in rows if row[name] == row[name]]
            cells.append(number(median(values), digits) if values else "–")
        cells.append(f"{100 * median(row['clipped_share'] for row in rows):.0f} %")
        cells.append(f"{100 * (rows[0]['parameters'] / fewest - 1):.2f} %")
        cells.append(", ".join(f"step {end:,}" for end in ends) or "–")
        lines.append(("", cells))
    return Section(
        "Training",
        f"Final loss is the mean of the last {LAST} steps. All recipes have the same width and layers; "
        "gates and write strengths add the parameters of the column before the last.",
        columns(
            "<recipe, final loss, largest rise, largest gradient, clipped steps, more parameters, diverged"
        ),
        lines,
    )


def _samples(results: Results) -> Section:
    found = written(results)
    if not found:
        return Section("What the models write", "No model was trained to the end.")
    lines = [("", [row["recipe"], row["continuation"]]) for row in found]
    return Section(
        "What the models write",
        f"After “{found[0]['prompt']}”, sampled at temperature 0.7.",
        columns("<recipe, <continuation"),
        lines,
    )
