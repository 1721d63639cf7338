"""Names of pytorch-fast-transformers that lead to reassoc.compat, to run the original's own tests against it.

    git clone --branch v0.4.0 https://github.com/idiap/fast-transformers
    PYTHONPATH=benchmarks python -m pytest -p alias_fast_transformers fast-transformers/tests --legacy exact

A plugin of pytest. What `reassoc.compat.fast_transformers` does not have is there by name, so that a file is
collected, and fails when it is used: the failure then tells what was missing.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import reassoc.compat.fast_transformers as ours
from reassoc.compat.fast_transformers import attention
from reassoc.compat.fast_transformers.attention._elsewhere import CLASSES
from reassoc.compat.fast_transformers.causal_product import causal_dot_product

OLD = "fast_transformers"
ABSENT = (
    "aggregate", "attention.local_attention", "causal_product.causal_product_cuda", "clustering",
    "clustering.hamming", "hashing", "local_product", "local_product.local_product_cpu",
    "local_product.local_product_cuda", "sparse_product",
)  # fmt: skip


def absent(name: str) -> type:
    """A class, or what is called as a function, that says its name and fails."""

    def refuse(self: object, *args: object, **options: object) -> None:
        raise NotImplementedError(f"absent: {name}")

    return type(name.rpartition(".")[2], (), {"__init__": refuse})


class Absent(ModuleType):
    """A module in which every name is absent."""

    __path__: list[str] = []  # noqa: RUF012  # what makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__.removeprefix(OLD + '.')}.{name}")


class Compiled(ModuleType):
    """The original's compiled extension, whose functions write into the caller's tensors."""

    @staticmethod
    def causal_dot_product(Q: Tensor, K: Tensor, V: Tensor, product: Tensor) -> None:
        """As ours, into ``product``."""
        product.copy_(causal_dot_product(Q, K, V))

    @staticmethod
    def causal_dot_backward(Q: Tensor, K: Tensor, V: Tensor, d_product: Tensor, *into: Tensor) -> None:
        """Gradients of the three, into three."""
        inputs = [t.detach().requires_grad_() for t in (Q, K, V)]
        gradients = torch.autograd.grad(causal_dot_product(*inputs), inputs, d_product)
        for target, gradient in zip(into, gradients, strict=True):
            target.copy_(gradient)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The mode that the tests, which know nothing of it, run in."""
    parser.addoption(
        "--legacy", choices=["exact"], help="the original's arithmetic; default: the clean operator"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Put the names in place before any test is imported."""
    modules = {
        m.name: import_module(m.name) for m in pkgutil.walk_packages(ours.__path__, f"{ours.__name__}.")
    }
    for name, module in {ours.__name__: ours, **modules}.items():
        sys.modules[name.replace(ours.__name__, OLD)] = module
        if config.getoption("--legacy") and hasattr(module, "check_mode"):
            vars(module)["check_mode"] = lambda library, legacy: "exact"
    for name in ABSENT:
        sys.modules[f"{OLD}.{name}"] = Absent(f"{OLD}.{name}")
    compiled = f"{OLD}.causal_product.causal_product_cpu"
    sys.modules[compiled] = Compiled(compiled)
    for name in CLASSES:
        setattr(attention, name, absent(f"attention.{name}"))
