"""What the page says whatever the numbers: definitions and limits."""

from __future__ import annotations

DEFINITIONS = (
    ("Recipe",
     "MAP[:RULE][:NORMALIZATION][:OPTION...]. softmax is softmax attention itself; every other model has "
     "kernel attention with that feature map. Rule sum unless named; division by the normalizer "
     "(attention) for additive rules, features divided by their own sum for delta rules, unless named."),
    ("Perplexity",
     "exp of the mean negative log probability of a token, over all tokens of the part but its first. Lower "
     "is better. Bits per byte is the same on a scale that does not depend on the tokenizer."),
    ("Truncated and carried",
     "Truncated: the context is dropped at every segment, in training or judging. Carried: the state goes "
     "on from segment to segment; no gradient goes back through it, and it starts afresh where the text "
     "begins again and when random features are redrawn. Both see the same tokens in the same order. Judged "
     "carried, one state goes over the whole part, and has read as much of the text before it."),
    ("Change",
     "Of test perplexity against the other recipe of the pair, seed by seed, the median over seeds, in "
     "brackets the least and the largest."),
    ("Told apart",
     "Yes: every seed of one recipe is better than every seed of the other. No: their seeds overlap, and the "
     "difference may be chance. With one seed there is no telling."),
    ("Diverged",
     "The loss or its gradient became infinite or NaN; training ended there, the weights as they were."),
    ("Largest rise",
     "After the warm-up, the most that the loss of one step lay above the lowest loss before it, in nats: "
     "how much training jumped. Clipped steps are those whose gradient was longer than the clip."),
    ("State",
     "Bytes that one sequence carries on after a segment; for softmax, keys and values of that segment."),
    ("Tokens a second",
     "Of training: tokens of a step divided by the median time of a step (forward, backward, clipping and "
     "optimizer), on one machine under whatever load it had."),
)  # fmt: skip

LIMITS = (
    "Small models on a short text for a short time: the order of recipes can change with size, data and "
    "training time.",
    "One learning rate and one schedule for all recipes; each might gain from its own.",
    "Spread over seeds comes from weights and random features only: all seeds read the same text in the same "
    "order.",
    "Test and validation are the end of the same text, not other kinds of text.",
)
