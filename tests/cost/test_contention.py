"""Contention: measured as one share, kept in worlds, charged in prices, events and the search."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import autopar
import models
from autopar import World
from autopar.cost.algorithms import algorithms
from autopar.cost.calibration import contention
from autopar.cost.calibration.contention import measure_crowding, shared_cores
from autopar.cost.communication import flat_price
from autopar.cost.contention import lost_s, start_s
from autopar.planner import solve
from autopar.world import Measured, ranks

PAIRS = ((2, 1),)
FREE = replace(World.preset("laptop", ranks=2), launch_s=2e-3)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def world(share: float) -> World:
    return replace(FREE, contention=share)


@pytest.mark.parametrize(
    ("busy", "cores", "lost"),
    [
        (0.2, 0.5, 0.4),
        (0.5, 0.5, 1.0),
        (0.9, 0.5, 1.0),
        (0.3, 1.0, 0.3),
        (0.3, 1.2, 0.1),
        (1, 4, 0),
    ],
)
def test_gloo_threads_take_what_computing_needs(busy: float, cores: float, lost: float) -> None:
    """Two ranks a core have half of one each; with cores to spare nothing is lost."""
    assert measure_crowding(busy, cores) == pytest.approx(lost)


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The busiest rank takes from all, and the idle ones leave it more than its own part."""
    here = socket.gethostname()
    each = [np.array([share, 1.0]) for share in (0.9, 0.1, 7.0, 0.2)]
    work = list(zip((here, here, f"not {here}", here), each, strict=True))
    monkeypatch.setattr(ranks, "all_of", lambda mine: [mine, *work[1:]])
    shares, cores = shared_cores(each[0])
    assert shares == pytest.approx([0.4, 1.0])
    assert cores == pytest.approx(len(os.sched_getaffinity(0)) / 3)


def test_on_gpus_the_share_is_that_of_the_time() -> None:
    """The median over the kinds, never more than all of it; noise is no gain."""
    alone = np.array([1e-3, 2e-3, 4e-3])
    assert contention._lost_share(alone, alone * [0.1, 0.2, 0.9], GPU) == pytest.approx(0.2)
    assert contention._lost_share(alone, alone * [2.0, 3.0, 0.1], GPU) == 1.0
    assert contention._lost_share(alone, -alone, GPU) == 0.0


def test_on_cpus_the_share_is_that_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = np.array([1e-3, 2e-3, 4e-3])
    monkeypatch.setattr(contention, "shared_cores", lambda work: (work, 0.5))
    assert contention._lost_share(alone, alone * [0.1, 0.2, 0.9], CPU) == pytest.approx(0.4)
    assert contention._lost_share(alone, -alone, CPU) == 0.0


def test_a_world_keeps_it(tmp_path: Path) -> None:
    world(0.5).save(tmp_path / "world.json")
    assert World.load(tmp_path / "world.json") == world(0.5) != world(0.2)
    assert hash(world(0.5)) != hash(world(0.2))


def test_a_second_of_a_collective_takes_its_share_from_computing() -> None:
    assert lost_s(3e-3, world(0.5)) == pytest.approx(1.5e-3)
    assert lost_s(3e-3, FREE) == 0.0


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e6])
def test_ranks_that_compute_come_late_to_a_collective(measured: bool, size: float) -> None:
    """Its launch takes the share longer, whether its time was measured or follows a formula."""
    rows = (Measured("all_gather", PAIRS, 2, 1e-3, 1e-9),) if measured else ()
    free, contended = replace(FREE, measured=rows), replace(world(0.5), measured=rows)
    alone = flat_price("all_gather", PAIRS, size, free).seconds
    assert flat_price("all_gather", PAIRS, size, contended).seconds == pytest.approx(alone + 1e-3)
    assert start_s(5e-3, contended) == pytest.approx(6e-3) and start_s(5e-3, free) == 5e-3


def test_nobody_is_late_where_there_is_nobody_to_meet() -> None:
    assert algorithms(world(0.5), "all_reduce", ()) == algorithms(FREE, "all_reduce", ())


def test_what_hides_counts_at_least_what_it_takes_from_computing() -> None:
    assert solve.shares(FREE) == solve.SHARES
    assert solve.shares(world(0.2)) == (*solve.SHARES[:-1], 0.2)
    assert solve.shares(world(0.9)) == (0.9,)


def test_computing_and_exposed_seconds_of_a_table_add_up_to_the_step() -> None:
    """What a collective takes from computing beside it is exposed, and is not computing as well."""
    model, inputs, _ = models.gpt()
    plan = autopar.plan(model, world(0.5), inputs, "ddp", smaller=False)
    computed, step = sum(row.computation or 0.0 for row in plan.rows), plan.timeline()
    assert step.computing > 1.001 * computed, "no collective slowed computing down"
    exposed = sum(row.exposed or 0.0 for row in plan.rows)
    assert computed + exposed == pytest.approx(plan.overlapped)
