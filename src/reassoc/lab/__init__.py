"""Experiments: what softmax attention saw in a model, and how well kernel attention reproduces it."""
