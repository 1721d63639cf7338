"""What an evaluation has to say: what is lost, and at which length."""

from __future__ import annotations

from .._lines import Line, line_figure
from .._page import columns, count, many
from .._study import Section, Study
from ..fidelity import Row
from ..figures import Plot
from .run import Results
from .words import DEFINITIONS, LIMITS


def study(results: Results) -> Study:
    """The results as tables, figures and sentences."""
    models = [model["name"] for model in results.manifest["models"]]
    settings = results.manifest["settings"]
    lead = (
        f"{many(len(models), 'pretrained model')} read the same tokens: about {settings['tokens']:,} of each "
        "text, taken evenly from it. Nothing was trained here."
    )
    sections = [_cosines(results) if results.encoder else _perplexities(results)]
    sections += [_recall(results)] if results.recall else []
    more = {"times": results.times}
    if results.recall:
        more["recall"] = results.recall
    return Study(
        name="evaluate",
        title="What does kernel attention cost these models?"
        if len(models) > 1
        else "How good is this model?",
        lead=lead,
        answer=[*_answer(results, models)],
        rows=results.rows,
        manifest=results.manifest,
        sections=sections,
        figures=_figures(results, models),
        definitions=DEFINITIONS,
        limits=LIMITS,
        more=more,
    )


def _answer(results: Results, models: list[str]) -> list[str]:
    sentences = []
    longest = max(row["length"] for row in results.rows)
    for text in dict.fromkeys(row["text"] for row in results.rows):
        rows = [row for row in results.rows if row["text"] == text and row["length"] == longest]
        if results.encoder:
            told = ", ".join(
                f"{row['model']} {row['cosine']:.4f} (5th percentile {row['cosine_5']:.4f})"
                for row in rows
                if row["model"] != models[0] or len(models) == 1
            )
            sentences.append(f"{text}: cosine to the embeddings of {models[0]}: {told}.")
        else:
            first, *others = rows
            told = "; ".join(f"{row['model']} {row['perplexity']:.2f}, {_ratio(row)}" for row in others)
            sentences.append(
                f"{text}, {longest:,} tokens of context: {first['model']} perplexity "
                f"{first['perplexity']:.2f}" + (f"; {told}." if told else ".")
            )
    for distance in dict.fromkeys(row["distance"] for row in results.recall):
        rows = [row for row in results.recall if row["distance"] == distance]
        told = ", ".join(f"{row['model']} {_share(row)}" for row in rows)
        sentences.append(f"A key named {distance:,} tokens ago is known again: {told}; a guess 5%.")
    return sentences


def _ratio(row: Row) -> str:
    if row["ratio_low"] != row["ratio_low"]:
        return f"{row['ratio']:.3f} times"
    return f"{row['ratio']:.3f} times ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"


def _share(row: Row) -> str:
    return f"{row['right'] / row['trials']:.0%} ({row['low']:.0%} to {row['high']:.0%})"


def _perplexities(results: Results) -> Section:
    lines = []
    for row in results.rows:
        cells = [
            row["text"], row["length"], row["model"], f"{row['perplexity']:.2f}", _ratio(row), row["blocks"],
            count(row["state_bytes"]),
        ]  # fmt: skip
        lines.append(("" if row["converted"] else "reference", cells))
    lines.sort(key=lambda line: (str(line[1][0]), line[1][1]))
    heads = columns("<text, tokens, <model, perplexity, ratio, blocks, state bytes")
    return Section("Perplexity at each length of context", "", heads, lines)


def _cosines(results: Results) -> Section:
    lines = [
        ("" if row["converted"] else "reference",
         [row["text"], row["length"], row["model"], f"{row['cosine']:.4f}", f"{row['cosine_5']:.4f}",
          row["lines"]])
        for row in results.rows
    ]  # fmt: skip
    heads = columns("<text, tokens at most, <model, cosine, 5th percentile, lines")
    return Section("Cosine to the first model's embeddings", "", heads, lines)


def _recall(results: Results) -> Section:
    lines = [
        ("" if row["converted"] else "reference",
         [row["model"], row["distance"], f"{row['right']} of {row['trials']}", _share(row)])
        for row in results.recall
    ]  # fmt: skip
    return Section(
        "A key named early, asked for later", "", columns("<model, tokens between, right, share"), lines
    )


def _figures(results: Results, models: list[str]) -> list[Plot]:
    converted = {row["model"]: bool(row["converted"]) for row in results.rows}
    drawn = []
    column = "cosine" if results.encoder else "perplexity"
    for index, text in enumerate(dict.fromkeys(row["text"] for row in results.rows)):
        lines = []
        for model in models:
            mine = [row for row in results.rows if (row["text"], row["model"]) == (text, model)]
            points = sorted((row["length"], row[column]) for row in mine)
            lines.append(Line(model, [(x, y, y, y) for x, y in points], not converted[model]))
        at = sorted({row["length"] for row in results.rows})
        figure = line_figure(lines, x="tokens of context", y=column, log_x=True, at=at)
        name = f"{column}-{index + 1}" if index else column
        caption = "Dashed: softmax attention. Blocks of each length are cut from the same tokens."
        drawn.append((name, f"{column.capitalize()}, {text}", caption, figure))
    if results.recall:
        lines = [
            Line(
                model,
                [(row["distance"], row["right"] / row["trials"], row["low"], row["high"])
                 for row in results.recall if row["model"] == model],
                not converted[model],
            )
            for model in models
        ]  # fmt: skip
        at = sorted({row["distance"] for row in results.recall})
        figure = line_figure(
            lines, x="tokens between key and question", y="share of keys known again", log_x=True, at=at,
            share=True, level=("a guess", 0.05),
        )  # fmt: skip
        drawn.append(("recall", "Recall over a distance", "Bars: 95 % intervals. Dashed: softmax.", figure))
    return [Plot(name, "", title, caption, fig) for name, title, caption, fig in drawn if fig is not None]
