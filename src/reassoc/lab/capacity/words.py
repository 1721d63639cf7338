"""What the report says whatever the numbers: definitions and limits."""

from __future__ import annotations

DEFINITIONS = (
    ("The task",
     "A sequence stores pairs of a key and a value; then one key is asked for its value. Setting 1: N "
     "pairs, every key and every value once. Setting 2: 2N pairs drawn with replacement, so that keys come "
     "again with other values; the last one counts. Keys are learned embeddings, values one-hot vectors."),
    ("Loss",
     "Half the squared distance between the value read and the right one, the mean over all keys of "
     "20 sequences, at the last evaluation of the training. 0.5 is what a read of zeros scores, so "
     "that a key which is not kept costs 0.5/N."),
    ("Published",
     "The loss of the last evaluation in the logs of Schlag, Irie and Schmidhuber 2021, one run each. Their "
     "mean is over batches of 32 questions, a last smaller one weighing as much, and over 200 keys at most."),
    ("Floor",
     "½ (1 − r/N). With r features the reads of all N keys are a matrix of rank r at most; the right answers "
     "of setting 1 are a permutation. No rule and no training gets closer, in the mean over all keys."),
    ("Loss on 2N",
     "Setting 2 is trained on 2N pairs and judged on N pairs, as published; this is the loss at the end on "
     "2N pairs."),
    ("Ended",
     "“solved”: loss at most 0.001. “no gain”: 11 evaluations in a row, one every 100 steps, without a new "
     "least loss. “step limit”: training was cut off, and the loss might have fallen further. “no number”: "
     "the loss was not a number."),
    ("Features", "The number r of features of a key: the most associations a state can keep apart."),
    ("Signal, crosstalk, ratio",
     "A read of key i is a sum of all stored values; signal is the weight of its own value, crosstalk the "
     "sum of the others' absolute weights, means over keys; the ratio of both is a median over keys."),
    ("Error",
     "Expected squared error of a read, per coordinate, for independent values of mean 0 and variance 1, "
     "after one pass with strength 1. Reading zero scores 1."),
    ("Least error", "What the best scale of each read leaves of the error: crosstalk alone."),
    ("Rank and bound",
     "The rank of the features of all keys, and 1 − rank/N: the least mean error of any rule, however it "
     "writes."),
    ("After 64 passes; exact writes",
     "Of the delta rule only: the same pairs written 64 times over; and with strength 1/|phi|², so that a "
     "value can be read back exactly right after its write."),
)  # fmt: skip

LIMITS = (
    "One layer with one head and one question per sequence, trained with one learning rate: it shows where "
    "memory ends, not how good a model is.",
    "One number from one run can be off: training stops early, and the seeds decide when. Take more with "
    "--seeds.",
    "Below the floor nothing can come; above it the loss also depends on training. A failure below the "
    "number of features is a failure to learn, not of capacity.",
    "The closed form takes keys as they are. Learned keys are placed to be kept apart.",
)
