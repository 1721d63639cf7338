"""Sharing weights between a model and its recurrent form."""

from __future__ import annotations

from torch import nn


def make_mirror(src_module: nn.Module, dst_module: nn.Module) -> None:
    """Give ``dst_module`` the very parameters of ``src_module``, by name; changes it in place.

    Buffers stay: share a random map's ``omega`` as well where a recurrent model mirrors a batch one.
    """
    for name, parameter in src_module.named_parameters():
        path, _, last = name.rpartition(".")
        setattr(dst_module.get_submodule(path), last, parameter)
