"""The names of pytorch-fast-transformers 0.4.0 on this library's operator.

Submodules lie where they lay: ``from reassoc.compat.fast_transformers.builders import
TransformerEncoderBuilder``. Checkpoints load as they are, in either direction. Attention that is not linear
(clustered, reformer, local, ...) is not here and says so when asked for; full (softmax) attention is.

``legacy="exact"`` on an attention, a random feature map or a builder repeats the arithmetic of the original;
``None``, the default, differs from it in this:

- no epsilon beside the denominator; a row that sees nothing, or whose denominator is zero, gives zero;
- ``Favor`` travels in logarithms, for which ``stabilize`` has no meaning;
- a random matrix is drawn before its first use, then every ``redraw`` calls in training, never in evaluation;
- orthogonal matrices are Haar distributed.
"""

__version__ = "0.4.0"
