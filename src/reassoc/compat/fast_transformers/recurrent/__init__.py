"""Transformers one token at a time."""
