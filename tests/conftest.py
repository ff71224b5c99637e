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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="I/N: the I-th of N parts of the tests, as 1/4")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks heavy cells slow. Where all tests are collected, UNMATCHED are lines of heavy.txt that
    name none, for a test in test_house.py.
    """
    names = [f"{item.path.name}::{item.nodeid.split('::', 1)[1]}" for item in items]
    for item, name in zip(items, names, strict=True):
        if heavy.heavy(name):
            item.add_marker(pytest.mark.slow)
    everything = len({item.path for item in items}) == len(list(HERE.rglob("test_*.py")))
    if everything:
        config.stash[heavy.UNMATCHED] = heavy.unmatched(names)
    if shard := config.getoption("--shard"):
        _keep_shard(config, items, shard)


def _keep_shard(config: pytest.Config, items: list[pytest.Item], shard: str) -> None:
    """Deselects what is not in this part. Tests are dealt out in the order of their names; those of
    a file that share what a fixture launches stay together.
    """
    number, count = map(int, shard.split("/"))
    units = sorted({_unit(item) for item in items})
    own = {unit for place, unit in enumerate(units) if place % count == number - 1}
    config.hook.pytest_deselected(items=[item for item in items if _unit(item) not in own])
    items[:] = [item for item in items if _unit(item) in own]


def _unit(item: pytest.Item) -> str:
    """Return what runs in one process: the file of a test that uses a fixture of the file, or the
    test.
    """
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    shared = any(found[-1].scope == "module" for found in fixtures)
    return item.nodeid.split("::")[0] if shared else item.nodeid
