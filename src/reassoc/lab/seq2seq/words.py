"""What a translation report says in fixed words."""

from __future__ import annotations

DEFINITIONS = (
    (
        "recipe",
        "Feature map, update rule and options of the attention, as `--models` has them. The rule and conv=N "
        "are of the decoder's own attention; a whole source has no order to forget by, so the encoder and "
        "the attention between them sum.",
    ),
    ("exact match", "Share of test sources whose translation is right in every byte."),
    (
        "BLEU",
        "Overlap of runs of up to four words (or characters, as the signature under the table says) with "
        "the reference, 0 to 100.",
    ),
    ("test loss", "Nats for each byte of the target, its end included, given the bytes before it."),
    (
        "translation",
        "The most probable byte, one after the other, up to the end or the longest text of the data.",
    ),
)
LIMITS = (
    "Small models, trained for minutes: what a recipe reaches with more of either is not said.",
    "Every recipe has the same learning rate, steps and seeds; none was tuned by itself.",
    "Texts are read as bytes. Languages with several bytes for a letter need more steps for as much text.",
)
