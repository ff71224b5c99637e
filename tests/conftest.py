"""What every test runs under: one thread, no network, the same random examples each time; and the
fixture that counts exports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ir.program import Program
from autopar.world import ranks

torch.set_num_threads(1)
HERE = Path(__file__).parent
STALE = pytest.StashKey[list[str]]()  # cells of slow_cells that are no test's

# No deadline: the first call of a torch operator may take longer than all the others together.
settings.register_profile(
    "autopar",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("autopar")


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that torch.export is called on from now on, one after the other: a model whose
    graph is reused or resized is not among them.
    """
    from autopar.passes import trace

    exported: list[nn.Module] = []

    def counted(export: Callable[..., Any]) -> Callable[..., Any]:
        def counted_export(model: nn.Module, *args: Any) -> Any:
            exported.append(model)
            return export(model, *args)

        return counted_export

    for name in ("exported_anew", "exported_with_derivatives"):
        monkeypatch.setattr(trace, name, counted(getattr(trace, name)))
    return exported


_programs: dict[int, tuple[nn.Module, Program]] = {}


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes longer than most of what follows, and no pass changes the program that it is
    given: each model is traced once in a process.
    """
    from autopar.passes import trace

    run = trace.trace

    def traced(model: nn.Module, args: Any, kwargs: Any) -> Program:
        if id(model) not in _programs:
            _programs[id(model)] = model, run(model, args, kwargs)
        return _programs[id(model)][1]

    monkeypatch.setattr(trace, "trace", traced)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as rank 0 of two, which agree with each other and never answer."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    monkeypatch.setattr(ranks, "all_of", lambda value: [value, value])
    monkeypatch.setattr(ranks, "from_rank_0", lambda value: value)
    yield
    dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="I/N: the I-th of N parts of the tests, as 1/4")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cells of `slow_cells` slow. Where all tests are collected, STALE are cells that
    name none, for a test in test_house.py.
    """
    unused: set[tuple[str, str]] = set()
    used: set[tuple[str, str]] = set()
    for item in items:
        test, _, cell = item.nodeid.removesuffix("]").partition("[")
        for mark in item.iter_markers("slow_cells"):
            names = {(test, name) for name in mark.args}
            matching = {key for key in names if is_cell(cell, key[1])}
            unused |= names
            used |= matching
            if matching:
                item.add_marker(pytest.mark.slow)
    everything = len({item.path for item in items}) == len(list(HERE.rglob("test_*.py")))
    if everything:
        config.stash[STALE] = sorted(f"{test}[{name}]" for test, name in unused - used)
    if shard := config.getoption("--shard"):
        _keep_shard(config, items, shard)


def is_cell(cell: str, name: str) -> bool:
    """Whether a mark's name is this cell's: `*` is any text."""
    return re.fullmatch(re.escape(name).replace(r"\*", ".*"), cell) is not None


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
    shared = any(definitions[-1].scope == "module" for definitions in fixtures)
    return item.nodeid.split("::")[0] if shared else item.nodeid
