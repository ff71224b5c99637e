"""What computing loses to collectives beside it: worked out, kept in worlds, charged in plans."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar import World
from autopar.cost.algorithms import flat_algorithms
from autopar.cost.calibration import contention
from autopar.cost.calibration.contention import measure_crowding, shared_cores
from autopar.cost.communication import flat_price
from autopar.planner import overlap_search
from autopar.world import Measured, ranks

PAIRS = ((2, 1),)


def world(*slows: float) -> World:
    """Pairs whose three kinds of collective slow computing down by so much."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    measured = [
        Measured(kind, PAIRS, 2, 1e-3, 1e-9, slows=lost) for kind, lost in zip(kinds, slows)
    ]
    return replace(World.preset("laptop", ranks=2), measured=tuple(measured))


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
def test_the_transport_takes_what_computing_needs(busy: float, cores: float, lost: float) -> None:
    """Two ranks a core have half of one each; with cores to spare nothing is lost."""
    assert measure_crowding(busy, cores) == pytest.approx(lost)


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The busiest rank takes from all, and the idle ones leave it more than its own part."""
    here = socket.gethostname()
    each = [np.array([one, 1.0]) for one in (0.9, 0.1, 7.0, 0.2)]
    work = list(zip((here, here, f"not {here}", here), each, strict=True))
    monkeypatch.setattr(ranks, "all_of", lambda mine: [mine, *work[1:]])
    found, cores = shared_cores(each[0])
    assert found == pytest.approx([0.4, 1.0])
    assert cores == pytest.approx(len(os.sched_getaffinity(0)) / 3)


def test_a_world_keeps_it_and_prices_carry_it(tmp_path: Path) -> None:
    world(0.5, 0.2, 0.3).save(tmp_path / "world.json")
    found = World.load(tmp_path / "world.json")
    assert found == world(0.5, 0.2, 0.3)
    assert [way.slows for way in flat_algorithms(found, "all_gather", PAIRS)] == [0.5]


def test_what_moves_takes_from_computing_and_starting_does_not() -> None:
    price = flat_price("all_gather", PAIRS, 1e6, world(0.5))  # starts for 1 ms, moves for 1 ms
    assert price.seconds == pytest.approx(2e-3)
    assert price.takes_s == pytest.approx(0.5e-3)
    assert flat_price("all_gather", PAIRS, 0.0, world(0.5)).takes_s == 0.0


def test_a_small_one_says_what_starting_takes_and_a_large_one_what_moving_does() -> None:
    def taken(small_s: float, large_s: float) -> tuple[float, float]:
        return contention._by_time(world(0.0), ("all_gather", PAIRS), small_s, large_s)

    moving = 1e-9 * contention._LARGE
    assert taken(2e-4, 2e-4 + moving / 2) == pytest.approx((2e-4, 0.5))
    assert taken(2e-4, 1.0) == (2e-4, 1.0)  # never more than all of it
    assert taken(-1e-5, -1e-5) == (0.0, 0.0)  # noise is no gain


def test_a_byte_is_as_much_work_over_every_pattern() -> None:
    """Of two ranks a core, that is lost twice; in one round in three two looks were off."""
    rate, start, fours = 1e-10, 2e-4, ((4, 1),)
    patterns = (PAIRS, ((2, 2),), fours)
    measured = [Measured("all_gather", p, p[0][0], 1e-3, 1e-9) for p in patterns]
    given = replace(World.preset("laptop", ranks=4), measured=tuple(measured))
    kinds = [("all_gather", digits) for digits in patterns]
    moved = np.array([1 / 2, 1 / 2, 3 / 4]) * (contention._LARGE - contention._SMALL)
    work = start + np.stack([np.zeros(3), rate * moved], axis=1)
    rounds = np.stack([work, work * [[1, 1], [1, 5], [1, 5]], work])
    found = contention._by_work(given, kinds, np.full(3, 1e-3), rounds, 0.5)
    assert [takes for takes, _ in found] == pytest.approx([2 * start] * 3)
    assert [slows for _, slows in found] == pytest.approx([0.1, 0.1, 0.15])
    assert contention._by_work(given, kinds, np.full(3, 1e-3), -rounds, 0.5) == [(0.0, 0.0)] * 3


def test_what_hides_counts_at_least_what_it_takes_from_computing() -> None:
    assert overlap_search.shares(World.preset("laptop", ranks=2)) == overlap_search.SHARES
    assert overlap_search.shares(world(0.1, 0.3, 0.2)) == (*overlap_search.SHARES[:-1], 0.2)
    assert overlap_search.shares(world(0.9, 1.0, 0.9)) == (0.9,)
