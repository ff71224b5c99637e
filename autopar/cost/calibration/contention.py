"""Contention between computing and collectives, measured: what overlap costs, so that hidden
communication is not quite free.

`measure_slowing`: what computing loses to collectives that run at the same time. On CPUs the
backend's threads and copies take cores and caches from matmuls, on GPUs its kernels take
multiprocessors.

`measure_meeting_seconds`: what ranks that compute lose on coming together for a collective, beyond
what it takes where nothing else runs. They come at different times, and a rank that waits is woken
late. On ranks that share cores it is milliseconds, the same for small and large values.

procedure.py calls both, on all ranks.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autopar import _compat
from autopar.cost.algorithms import flat_algorithms
from autopar.cost.calibration import measure
from autopar.cost.calibration.fit import six
from autopar.cost.calibration.measure import Case
from autopar.cost.communication import sent
from autopar.cost.network import Pattern, size
from autopar.ops import comm
from autopar.world import Measured, World, ranks

_SMALL, _LARGE = 2**12, 2**21  # bytes: one collective that only starts, one that moves data
_LONGER = 2.0  # computing takes so many times the collective, which then ends within it
_LEAST_S = 0.1  # of one measurement

functional = torch.ops._c10d_functional
Finish = Callable[[], Tensor]  # waits for a collective and returns its result
Started = Callable[[], Finish]  # issues a collective
Of = tuple[str, Pattern]  # a kind of collective over the groups of a pattern
Array = NDArray[np.float64]


def measure_slowing(
    world: World,
    patterns: list[Pattern],
    device: torch.device,
    seconds: float,
    progress: Callable[[float], None],
) -> World:
    """Return the world whose measured collectives know by how much they slow computing down.
    Collective.

    For each kind over each pattern, all groups at once, small and large: the seconds of computing
    that are lost to one, as the median over rounds and the most of all ranks. What a small one
    loses is lost to its start. Kinds that are not measured count as the measured kind that moves as
    much in the same direction; an all-to-all is what gloo's reduce-scatters are.
    """
    kinds = [(kind, digits) for digits in patterns for kind in _STARTS]
    cases = [
        Case(*kind_over, True, whole_bytes)
        for kind_over in kinds
        for whole_bytes in (_SMALL, _LARGE)
    ]
    numbers = torch.ones(max(measure.actual_bytes(case) for case in cases) // 4, device=device)
    with measure.groups(patterns) as names:
        works = [_issuer(case, names[case.pattern], numbers) for case in cases]
        rows = measure.rounds(
            lambda: [_measure_loss(work, device) for work in works], seconds, progress
        )
    alone, added_seconds = np.moveaxis(np.reshape(rows, (len(rows), -1, 2, 2)), -1, 0)
    if device.type == "cpu":
        own_losses = _by_work(
            world, kinds, np.median(alone[:, :, 0], axis=0), *shared_cores(added_seconds)
        )
    else:
        lost = np.median(added_seconds, axis=0).tolist()
        own_losses = [
            _by_time(world, kind_over, *loss) for kind_over, loss in zip(kinds, lost, strict=True)
        ]
    losses = np.max(ranks.all_of(own_losses), axis=0).tolist()
    return _with_losses(
        world,
        {kind_over: (six(a), six(b)) for kind_over, (a, b) in zip(kinds, losses, strict=True)},
    )


def _by_time(world: World, of: Of, small_s: float, large_s: float) -> tuple[float, float]:
    """Return the seconds of computing lost to the start of a collective, and those lost in each
    second from then on, from what is lost to a small one and to a large one.
    """
    start, moving = max(0.0, small_s), _moving_s(world, of)
    return start, min(1.0, max(0.0, large_s - start) / moving) if moving > 0 else 0.0


def _by_work(
    world: World, kinds: list[Of], alone_s: Array, work_s: Array, cores: float
) -> list[tuple[float, float]]:
    """Return the same as `_by_time` on a CPU, where a rank has so many cores.

    `alone_s`: seconds that small collectives take where nothing else runs, by [kind and pattern].
    `work_s`: the work of small and large ones in seconds, by [round, kind and pattern, size].

    To send a byte is as much work over any links and any number of ranks. So the work of a byte is
    the median over patterns and rounds: for a collective that moves fast it is small against the
    noise of its start.
    """
    passed = np.array([sent(kind, size(digits)) for kind, digits in kinds])
    rates = (work_s[:, :, 1] - work_s[:, :, 0]) / passed / (_LARGE - _SMALL)
    starts = np.median(work_s[:, :, 0], axis=0)
    losses = []
    for kind_over, alone_seconds, start_work, part in zip(
        kinds, alone_s, starts, passed, strict=True
    ):
        start_loss = measure_crowding(max(0.0, start_work) / alone_seconds, cores) * alone_seconds
        rate = float(np.median(rates[:, [kind == kind_over[0] for kind, _ in kinds]]))
        moving = _moving_s(world, kind_over)
        busy = max(0.0, rate) * part * _LARGE / moving if moving > 0 else 0.0
        losses.append((float(start_loss), float(measure_crowding(busy, cores))))
    return losses


def _moving_s(world: World, of: Of) -> float:
    """Return the seconds that a large collective takes beyond its start."""
    (algorithm,) = flat_algorithms(world, *of)
    return algorithm.seconds(_LARGE) - algorithm.start_s


def _with_losses(world: World, lost: dict[Of, tuple[float, float]]) -> World:
    """Return the world with what each measured collective loses."""
    all_to_all_as = "reduce_scatter" if world.backend == "gloo" else "all_gather"
    measured_as = {
        "broadcast": "all_gather",
        "reduce": "reduce_scatter",
        "all_to_all": all_to_all_as,
    }

    def with_loss(one: Measured) -> Measured:
        loss = lost.get((measured_as.get(one.kind, one.kind), one.pattern), (0.0, 0.0))
        return replace(one, takes_s=loss[0], slows=loss[1])

    return replace(world, measured=tuple(with_loss(one) for one in world.measured))


def _measure_loss(work: Started, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a collective where nothing else runs, and how much longer computing
    takes with it than alone: on a CPU in seconds of work, else of time; below 0 by noise.
    """
    times = math.ceil(_LEAST_S / max(ranks.all_of(measure.seconds(_blocking(work), 1, device))))
    measure.barrier()
    alone_seconds = measure.seconds(_blocking(work), times, device)
    multiply = measure.computing(_LONGER * max(ranks.all_of(alone_seconds)), device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    return alone_seconds, _added_seconds(work, multiply, times, device, clock)


def _blocking(work: Started) -> Callable[[], object]:
    """Return a function that issues a collective and waits for it."""
    return lambda: work()()


def measure_crowding(busy: float, cores: float) -> float:
    """Return the share of computing that gives way to a backend which keeps `busy` cores busy,
    where a rank has so many cores for both.

    It is derived from seconds of work: on crowded cores both times would depend on which thread
    gets a turn, so their difference says nothing.

    >>> measure_crowding(0.25, 0.5), measure_crowding(0.25, 1.0), measure_crowding(0.25, 2.0)
    (0.5, 0.25, 0.0)
    """
    return 1 - max(0.0, min(1.0, cores - busy)) / min(1.0, cores)


def shared_cores(work: Array) -> tuple[Array, float]:
    """Return the average work of the ranks of this host, which share its cores, and the number of
    cores for each. Collective.
    """
    own_host = socket.gethostname()
    host_work = [
        rank_work for host, rank_work in ranks.all_of((own_host, work)) if host == own_host
    ]
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return np.mean(host_work, axis=0), cores / len(host_work)


def _added_seconds(
    work: Started,
    multiply: Callable[[], None],
    times: int,
    device: torch.device,
    clock: Callable[[], float],
) -> float:
    """Return how much longer computing takes with a collective under way than alone, by this clock.
    Seconds of work are those of the backend and those that computing needs in addition, as it loses
    its caches.
    """

    def both() -> None:
        finish = work()
        multiply()
        finish()

    measure.barrier()
    computing = measure.seconds(multiply, times, device, clock)
    measure.barrier()
    return measure.seconds(both, times, device, clock) - computing


def _issuer(case: Case, group: str, numbers: Tensor) -> Started:
    """Return a function that issues the case and returns its wait, as scheduled graphs do, which
    compute in between.
    """
    count = size(case.pattern)
    part = max(1, case.whole_bytes // (4 * count * count))
    x = numbers[: part * count * (count if case.kind in measure.WHOLE else 1)]
    return _STARTS[case.kind](x, count, group)


def _all_gather(x: Tensor, count: int, group: str) -> Started:
    return lambda: _waiter(functional.all_gather_into_tensor(x, count, group))


def _all_reduce(x: Tensor, count: int, group: str) -> Started:
    return lambda: _waiter(functional.all_reduce(x, "sum", group))


def _reduce_scatter(x: Tensor, count: int, group: str) -> Started:
    if _compat.backend_name(group, x.device.type) != "gloo":
        return lambda: _waiter(functional.reduce_scatter_tensor(x, "sum", count, group))
    parts, ones = x.view(count, -1), [1] * count

    def start() -> Finish:  # as ops/comm.py runs it
        finish = _waiter(functional.all_to_all_single(parts, ones, ones, group))
        return lambda: finish().sum(0)

    return start


def _waiter(x: Tensor) -> Finish:
    """Return a function that waits for a result."""
    return lambda: comm.wait(x)


_STARTS = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}

_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
_BYTES = 2**13  # small, so that only the meeting shows
_COMPUTE_S = 1e-2  # about, between two collectives
_TURNS = 5  # of computing and meeting in one measurement


def measure_meeting_seconds(
    patterns: list[Pattern], device: torch.device, seconds: float, progress: Callable[[float], None]
) -> float:
    """Return the seconds of computing and collectives in turn, less both alone: the median over
    kinds, patterns and rounds; never below 0. Collective.
    """
    cases = [Case(kind, digits, True, _BYTES) for digits in patterns for kind in _KINDS]
    numbers = torch.ones(max(measure.actual_bytes(case) for case in cases) // 4, device=device)
    multiply = measure.computing(_COMPUTE_S, device)
    with measure.groups(patterns) as names:
        works = [measure.collective(case, names[case.pattern], numbers) for case in cases]
        for work in works:
            work()
        rows = measure.rounds(
            lambda: [_turn_seconds(work, multiply, device) for work in works], seconds, progress
        )
    computing, alone, both = np.moveaxis(np.max(ranks.all_of(rows), axis=0), -1, 0)
    return max(0.0, float(np.median(both - alone - computing)))


def _turn_seconds(
    work: Callable[[], object], multiply: Callable[[], None], device: torch.device
) -> list[float]:
    """Return the seconds of one turn: of computing, of the collective, of the collective after
    computing.
    """

    def both() -> None:
        multiply()
        work()

    turn_seconds = []
    for run in (multiply, work, both):
        measure.barrier()
        turn_seconds.append(measure.seconds(run, _TURNS, device))
    return turn_seconds
