"""Old models on new machines: the names of two unmaintained libraries, on this library's operator.

- :mod:`reassoc.compat.performer_pytorch` for performer-pytorch 1.1.4,
- :mod:`reassoc.compat.fast_transformers` for pytorch-fast-transformers 0.4.0.

Change the import, and checkpoints load as they are. ``legacy="exact"`` repeats the original's arithmetic, on
which trained weights may rely; ``legacy=None`` is this library's own (docs/howto/migrate.md).
"""
