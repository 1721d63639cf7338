"""The explorer: one page on which a person sees kernel attention work, every number from this library.

`reassoc explore` serves it on this machine (server.py), `reassoc explore --export FILE.html` writes it as one
file (export.py).
"""
