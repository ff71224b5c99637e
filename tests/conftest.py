"""What every test runs under: one thread, no network, the same random examples each time."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from hypothesis import HealthCheck, settings

import heavy

torch.set_num_threads(1)
HERE = Path(__file__).parent

# No deadline: the first call of a torch operator may take longer than all the others together.
settings.register_profile(
    "autopar",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("autopar")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks heavy cells slow; where all tests are collected, each line of heavy.txt names one."""
    names = [f"{item.path.name}::{item.nodeid.split('::', 1)[1]}" for item in items]
    for item, name in zip(items, names, strict=True):
        if heavy.heavy(name):
            item.add_marker(pytest.mark.slow)
    everything = len({item.path for item in items}) == len(list(HERE.rglob("test_*.py")))
    if everything and (gone := heavy.unmatched(names)):
        raise pytest.UsageError(f"tests/support/heavy.txt names tests that are not there: {gone}")
