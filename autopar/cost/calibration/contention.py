"""What computing loses to collectives that run beside it, so that what hides is not quite free: on
CPUs the transport's threads and copies take the cores and caches that products want, on GPUs its
kernels take multiprocessors.

What ranks that compute lose on coming together for a collective, beyond what it takes where
nothing else runs: they come at different times, and whoever waits is woken late. On ranks that
share cores it is milliseconds, the same for small and large values.
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

_SMALL, _LARGE = 2**12, 2**21  # bytes: what it takes to start, and to move them
_LONGER = 2.0  # computing takes so many times the collective, which then ends under it
_LEAST_S = 0.1  # of one measurement

functional = torch.ops._c10d_functional
Finish = Callable[[], Tensor]  # waits for a collective
Started = Callable[[], Finish]  # issues it
Of = tuple[str, Pattern]  # a kind of collective over the groups of a pattern
Array = NDArray[np.float64]


def measure_slowing(
    world: World,
    patterns: list[Pattern],
    device: torch.device,
    seconds: float,
    progress: Callable[[float], None],
) -> World:
    """The world whose measured collectives know by how much they slow computing down. Collective.

    Of each kind over each pattern, all groups at once, small and large: the seconds of computing
    that are lost to one, in the middle over rounds, the most of all ranks; what a small one loses
    is lost to its start. Kinds that are not measured count as what moves as much in the same
    direction; an all-to-all is what gloo's reduce-scatters are.
    """
    kinds = [(kind, digits) for digits in patterns for kind in _STARTS]
    wanted = [Case(*of, True, whole) for of in kinds for whole in (_SMALL, _LARGE)]
    numbers = torch.ones(max(measure.actual_bytes(case) for case in wanted) // 4, device=device)
    with measure.groups(patterns) as names:
        works = [_started(case, names[case.pattern], numbers) for case in wanted]
        rows = measure.rounds(lambda: [_looked(one, device) for one in works], seconds, progress)
    alone, more = np.moveaxis(np.reshape(rows, (len(rows), -1, 2, 2)), -1, 0)
    if device.type == "cpu":
        own = _by_work(world, kinds, np.median(alone[:, :, 0], axis=0), *shared_cores(more))
    else:
        lost = np.median(more, axis=0).tolist()
        own = [_by_time(world, of, *each) for of, each in zip(kinds, lost, strict=True)]
    most = np.max(ranks.all_of(own), axis=0).tolist()
    return _with(world, {of: (six(a), six(b)) for of, (a, b) in zip(kinds, most, strict=True)})


def _by_time(world: World, of: Of, small_s: float, large_s: float) -> tuple[float, float]:
    """Seconds of computing lost to the start of a collective, and for each second from then on,
    from what is lost to a small one and to a large one.
    """
    start, moving = max(0.0, small_s), _moving_s(world, of)
    return start, min(1.0, max(0.0, large_s - start) / moving) if moving > 0 else 0.0


def _by_work(
    world: World, kinds: list[Of], alone_s: Array, work_s: Array, cores: float
) -> list[tuple[float, float]]:
    """The same on a CPU, where a rank has so many cores: from the seconds that small ones take
    where nothing else runs, [kind and pattern], and what small and large ones are to work, [round,
    kind and pattern, size].

    To send a byte is as much work over whatever links and however many ranks. So it is taken in the
    middle over patterns and rounds: of a collective that moves fast it is little beside what
    starting varies by.
    """
    passed = np.array([sent(kind, size(digits)) for kind, digits in kinds])
    rates = (work_s[:, :, 1] - work_s[:, :, 0]) / passed / (_LARGE - _SMALL)
    starts = np.median(work_s[:, :, 0], axis=0)
    found = []
    for of, alone, work, part in zip(kinds, alone_s, starts, passed, strict=True):
        start = measure_crowding(max(0.0, work) / alone, cores) * alone
        rate = float(np.median(rates[:, [kind == of[0] for kind, _ in kinds]]))
        moving = _moving_s(world, of)
        busy = max(0.0, rate) * part * _LARGE / moving if moving > 0 else 0.0
        found.append((float(start), float(measure_crowding(busy, cores))))
    return found


def _moving_s(world: World, of: Of) -> float:
    """What a large one takes beyond its start."""
    (way,) = flat_algorithms(world, *of)
    return way.seconds(_LARGE) - way.start_s


def _with(world: World, lost: dict[Of, tuple[float, float]]) -> World:
    exchanged = "reduce_scatter" if world.backend == "gloo" else "all_gather"
    like = {"broadcast": "all_gather", "reduce": "reduce_scatter", "all_to_all": exchanged}

    def known(one: Measured) -> Measured:
        found = lost.get((like.get(one.kind, one.kind), one.pattern), (0.0, 0.0))
        return replace(one, takes_s=found[0], slows=found[1])

    return replace(world, measured=tuple(known(one) for one in world.measured))


def _looked(work: Started, device: torch.device) -> tuple[float, float]:
    """Seconds of one where nothing else runs, and what computing beside one takes longer than
    alone: on a CPU of work, else of time; below 0 by noise.
    """
    times = math.ceil(_LEAST_S / max(ranks.all_of(measure.seconds(_whole(work), 1, device))))
    measure.barrier()
    alone = measure.seconds(_whole(work), times, device)
    multiply = measure.computing(_LONGER * max(ranks.all_of(alone)), device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    return alone, _beside(work, multiply, times, device, clock)


def _whole(work: Started) -> Callable[[], object]:
    return lambda: work()()


def measure_crowding(busy: float, cores: float) -> float:
    """The part of computing that gives way to a transport which keeps `busy` cores busy, where a
    rank has so many cores for both.

    It is worked out from seconds of work: on crowded cores, of two times that both depend on who
    gets a turn, the difference says nothing.

    >>> crowded_out(0.25, 0.5), crowded_out(0.25, 1.0), crowded_out(0.25, 2.0)
    (0.5, 0.25, 0.0)
    """
    return 1 - max(0.0, min(1.0, cores - busy)) / min(1.0, cores)


def shared_cores(work: Array) -> tuple[Array, float]:
    """What the ranks of this host, which share its cores, work on average, and how many of them
    there are for each. Collective.
    """
    here = socket.gethostname()
    theirs = [one for host, one in ranks.all_of((here, work)) if host == here]
    able = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(able(0)) if able else os.cpu_count() or 1
    return np.mean(theirs, axis=0), cores / len(theirs)


def _beside(
    work: Started,
    multiply: Callable[[], None],
    times: int,
    device: torch.device,
    clock: Callable[[], float],
) -> float:
    """What computing with one under way takes longer than alone, by this clock. Seconds of work are
    those of the transport and those that computing needs besides, as it loses its caches to it.
    """

    def both() -> None:
        finish = work()
        multiply()
        finish()

    measure.barrier()
    computing = measure.seconds(multiply, times, device, clock)
    measure.barrier()
    return measure.seconds(both, times, device, clock) - computing


def _started(case: Case, group: str, numbers: Tensor) -> Started:
    """What issues the case, and gives what waits for it: as scheduled graphs do, which compute in
    between.
    """
    count = size(case.pattern)
    part = max(1, case.whole_bytes // (4 * count * count))
    x = numbers[: part * count * (count if case.kind in measure.WHOLE else 1)]
    return _STARTS[case.kind](x, count, group)


def _all_gather(x: Tensor, count: int, group: str) -> Started:
    return lambda: _later(functional.all_gather_into_tensor(x, count, group))


def _all_reduce(x: Tensor, count: int, group: str) -> Started:
    return lambda: _later(functional.all_reduce(x, "sum", group))


def _reduce_scatter(x: Tensor, count: int, group: str) -> Started:
    if _compat.backend_name(group, x.device.type) != "gloo":
        return lambda: _later(functional.reduce_scatter_tensor(x, "sum", count, group))
    parts, ones = x.view(count, -1), [1] * count

    def start() -> Finish:  # as wire.py runs it
        finish = _later(functional.all_to_all_single(parts, ones, ones, group))
        return lambda: finish().sum(0)

    return start


def _later(x: Tensor) -> Finish:
    return lambda: comm.wait(x)


_STARTS = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}

_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
_BYTES = 2**13  # small: nothing but the meeting shows
_COMPUTE_S = 1e-2  # between two collectives, about
_TURNS = 5  # of computing and meeting in one measurement


def measure_meeting_seconds(
    patterns: list[Pattern], device: torch.device, seconds: float, progress: Callable[[float], None]
) -> float:
    """Computing and collectives in turn, less both alone, in the middle over kinds, patterns and
    rounds; never below 0. Collective.
    """
    cases = [Case(kind, digits, True, _BYTES) for digits in patterns for kind in _KINDS]
    numbers = torch.ones(max(measure.actual_bytes(case) for case in cases) // 4, device=device)
    multiply = measure.computing(_COMPUTE_S, device)
    with measure.groups(patterns) as names:
        works = [measure.collective(case, names[case.pattern], numbers) for case in cases]
        for work in works:
            work()
        rows = measure.rounds(
            lambda: [_met(work, multiply, device) for work in works], seconds, progress
        )
    computing, alone, both = np.moveaxis(np.max(ranks.all_of(rows), axis=0), -1, 0)
    return max(0.0, float(np.median(both - alone - computing)))


def _met(
    work: Callable[[], object], multiply: Callable[[], None], device: torch.device
) -> list[float]:
    """Seconds of one turn: of computing, of the collective, of the collective after computing."""

    def both() -> None:
        multiply()
        work()

    found = []
    for one in (multiply, work, both):
        measure.barrier()
        found.append(measure.seconds(one, _TURNS, device))
    return found
