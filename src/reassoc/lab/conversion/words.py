"""What a report of an evaluation says in fixed words."""

from __future__ import annotations

DEFINITIONS = (
    (
        "perplexity",
        "The exponential of the mean negative log likelihood of a token, within blocks of that length, which "
        "do not see each other; the first token of a block is given. Lower is better.",
    ),
    (
        "ratio",
        "Perplexity divided by the first model's on the same blocks, with a 95 % interval from the "
        "differences block by block.",
    ),
    (
        "state bytes",
        "What a model keeps of one sequence so long in order to write its next token: keys and values of "
        "softmax layers, states of converted ones.",
    ),
    (
        "recall",
        "A sentence names a key word, so many tokens of text follow, then the key is asked for. Right: of 20 "
        "words, the one named has the most probable first token. A guess: 5 %. Intervals: Wilson, 95 %.",
    ),
    (
        "cosine",
        "Between the mean of the last layer's outputs over a line's tokens and that of the first model, mean "
        "over lines; and its 5th percentile.",
    ),
)
LIMITS = (
    "Perplexity on these texts says little about tasks, and nothing about texts of another kind.",
    "A model that was tuned on such text has an advantage over one that was not: compare with a "
    "softmax model tuned alike.",
    "Intervals know the spread over blocks only, not that over seeds of a training.",
)
