"""What a recall report says in fixed words."""

from __future__ import annotations

DEFINITIONS = (
    (
        "recipe",
        "Feature map, update rule and options of the attention, as `--models` takes them. conv=N is a causal "
        "depthwise convolution of N tokens on queries, keys and values.",
    ),
    (
        "TOKENS:PAIRS",
        "A sequence of so many tokens that begins with so many pairs of a key and its value. Later each key "
        "is asked once, and the model must name its value.",
    ),
    (
        "accuracy",
        "Share of questions answered with the right value, out of all tokens there are. Naming any value of "
        "the sequence gives 1 / PAIRS.",
    ),
    (
        "state bytes",
        "What the whole model keeps of one sequence in order to go on: states of linear attention, keys and "
        "values of softmax attention, recent inputs of convolutions; float32.",
    ),
    (
        "head size, features",
        "Size of a query, a key and a value of one head, and the number of features that the map makes of a "
        "key. The width of the model stays.",
    ),
    ("steps", "Training steps. Training stops early once the validation accuracy is good enough."),
    (
        "validation accuracy",
        "On other sequences of the training sizes. It ends training, and chooses the learning rate where "
        "there are several; every other accuracy is of yet other sequences.",
    ),
)
LIMITS = (
    "Small models on a small task: the order of recipes here need not be their order in language modelling.",
    "A low accuracy may be a memory that is too small or training that was too short. The figure of the "
    "validation accuracy helps: a curve that still rises was too short.",
    "Every recipe has the same learning rates, steps and seeds; none was tuned by itself.",
    "Training sequences are drawn anew for every step, where the original experiment repeats a fixed set.",
)
