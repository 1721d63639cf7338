"""What the report says whatever the numbers: definitions and limits."""

DEFINITIONS = (
    ("Map and features",
     "A feature map phi turns a key or query into r numbers, the features; kernel attention weighs value j "
     "by phi(q)·phi(k_j). Its cost grows with r and not with the number of tokens. Options follow a colon: "
     "calibrated (centred and balanced on the calibration half), hyperbolic (antithetic pairs), iid "
     "(independent projections). The map named softmax takes a softmax over the coordinates of one vector; "
     "it is not softmax attention."),
    ("Relative output error",
     "|o − o*| / |o*|: o are the outputs of the kernel, o* those of softmax, both over all judged rows of a"
     " head (Frobenius norm). 0 is equal; 1 is as far off as an output of zeros. Of a random map: the "
     "median over seeds. Median, best and worst are over heads."),
    ("Mean of the values",
     "The baseline: every visible value with the same weight. A map that does no better has learned nothing"
     " from queries and keys."),
    ("Calibration half and judged half",
     "Calibrated maps see one half of the tokens (half of the sequences, or the first half of a single "
     "one). All maps are judged on the other half only."),
    ("Operations per token",
     "Multiplications and additions per token and head: features of query and key, then 4 r (e + 1) to "
     "write and read the state, e being the size of a value. An exponential counts as 10."),
    ("Break-even tokens",
     "The number n of visible keys at which softmax attention takes as many operations, n (2 d + 2 e + 11) "
     "per token with d the head size. With shorter sequences the map saves nothing."),
    ("State bytes", "4 r (e + 1): what a head carries from token to token, in float32."),
    ("Predicted variance",
     "Variance of the random estimate of the kernel divided by its square, from the closed form for this "
     "width, averaged by softmax's weights; the median over rows. Above 1 the estimate is worthless: its "
     "error is larger than what it estimates. “Observed” is the same over the seeds drawn here; rare "
     "projections that carry most of the variance are then usually missing, so a small observed value "
     "proves nothing."),
    ("Squared bias and variance of the output",
     "Of the normalized output over seeds, divided by |o*|². Variance shrinks with more features; bias is "
     "what the mean over draws still gets wrong. Dividing a random sum by a random sum is biased even where"
     " the kernel estimate is not. Squared bias is estimated and can come out slightly negative. Needs two "
     "seeds."),
    ("Gradient errors",
     "As the output error, for the gradients of a fixed random loss by queries, keys and values."),
    ("KL divergence",
     "Mean over rows of sum p log(p / p'), in nats: p are softmax's weights and p' the kernel's. Over "
     "the rows whose weights are all positive; the share of the others stands beside it."),
    ("Total variation",
     "Mean over rows of half the sum of |p − p'|. 0 is equal; above 1 only with negative weights."),
    ("Negative weights", "Share of weights below zero. Such outputs are no averages of values."),
    ("Undefined rows", "Share of rows whose denominator is exactly zero; they are given an output of zero."),
    ("Smallest denominator",
     "|sum of weights| / sum of |weights| before they are divided, smallest over rows. 1 without negative "
     "weights; near 0 positive and negative weights cancel and errors explode."),
    ("Smallest mass ratio",
     "The kernel's denominator divided by softmax's, smallest over rows. Far below 1: the draw missed "
     "nearly all of that row's weight."),
    ("Effective features",
     "(sum c)² / sum c² of each feature's share c of the denominator; the median over rows. 1 means that a "
     "single feature decides, however many were paid for."),
    ("A dash", "No number: it has no meaning for this map, or could not be computed."),
)  # fmt: skip

LIMITS = (
    "Maps are untrained. A learned map, or a model finetuned with a map, can do far better than the rows"
    " here.",
    "Errors are of single heads given softmax's inputs. They are not the quality of a model: errors add up "
    "over layers, and finetuning removes some of them.",
    "Everything is computed in float64, so that the kernel is judged and not rounding. float32 and bfloat16"
    " add their own errors.",
    "The input is one sample. Other text, longer sequences and other layers give other norms, and with them "
    "other errors.",
    "Operations are counted, not timed.",
)  # fmt: skip

BESIDE = (
    "results.csv (a row per seed), heads.csv (over seeds), manifest.json, and figures/ with every figure as "
    "PNG and SVG. Times are in times.csv and not here: they differ from run to run, and "
    "the bytes of this file do not."
)
