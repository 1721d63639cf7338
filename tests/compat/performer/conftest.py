"""Small models take the way of large ones from some length on, so that it is looked at."""

import pytest

from reassoc.compat.performer_pytorch import fast_attention


@pytest.fixture(autouse=True)
def many(monkeypatch):
    monkeypatch.setattr(fast_attention, "_MANY", 0)
