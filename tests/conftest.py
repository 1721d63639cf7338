"""Shared test set-up: new memory is poisoned with NaN, threads are few, hypothesis is repeatable."""

import os

import hypothesis
import torch

# Deterministic algorithms make torch.empty, new_empty, empty_like and resize_ fill memory with NaN
# (the largest value for integers), so that an element which nobody writes cannot pass for a zero.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "laws",
    deadline=None,
    derandomize=True,
    max_examples=15,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("laws")


def pytest_configure(config):
    """Fail at once if the poison is not in force: several tests rely on it."""
    if not torch.empty(3).isnan().all():
        raise RuntimeError("torch.empty is not filled with NaN: the poison of tests/conftest.py is off")
