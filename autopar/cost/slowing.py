"""What computing loses to collectives that run beside it, so that what hides is not quite free: on
CPUs the transport's threads and copies take the cores and caches that products want, on GPUs its
kernels take multiprocessors.
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
from torch import Tensor

from .. import _compat, ranks, wire
from ..world import Measured, World
from . import measure
from .fit import six
from .measure import Case
from .pattern import Pattern, size
from .ways import flat_ways

_SMALL, _LARGE = 2**12, 2**21  # bytes: what it takes to start, and to move them
_LONGER = 2.0  # computing takes so many times the collective, which then ends under it
_LEAST_S = 0.1  # of one measurement

functional = torch.ops._c10d_functional
Finish = Callable[[], Tensor]  # waits for a collective
Started = Callable[[], Finish]  # issues it


def slowed(
    world: World,
    patterns: list[Pattern],
    device: torch.device,
    seconds: float,
    progress: Callable[[float], None],
) -> World:
    """The world whose measured collectives know by how much they slow computing down. Collective.

    Of each kind over each pattern, all groups at once, small and large: the seconds of computing
    that are lost to one, the most of all ranks, in the middle over rounds; what a small one loses
    is lost to its start. Kinds that are not measured count as what moves as much in the same
    direction; an all-to-all is what gloo's reduce-scatters are.
    """
    kinds = [(kind, digits) for digits in patterns for kind in _STARTS]
    wanted = [Case(*both, True, whole) for both in kinds for whole in (_SMALL, _LARGE)]
    numbers = torch.ones(max(measure.actual_bytes(case) for case in wanted) // 4, device=device)
    with measure.groups(patterns) as names:
        works = [_started(case, names[case.pattern], numbers) for case in wanted]
        rows = measure.rounds(lambda: [_lost(one, device) for one in works], seconds, progress)
    most = np.max(ranks.all_of(rows), axis=0)
    lost = np.median(most, axis=0).reshape(-1, 2).tolist()
    found = {both: _taken(world, *both, *each) for both, each in zip(kinds, lost, strict=True)}
    return _with(world, found)


def _taken(
    world: World, kind: str, digits: Pattern, small_s: float, large_s: float
) -> tuple[float, float]:
    """Seconds of computing lost to the start of a collective, and for each second from then on,
    from what is lost to a small one and to a large one.
    """
    (way,) = flat_ways(world, kind, digits)
    start, moving = max(0.0, small_s), way.seconds(_LARGE) - way.start_s
    return six(start), six(min(1.0, max(0.0, large_s - start) / moving)) if moving > 0 else 0.0


def _with(world: World, lost: dict[tuple[str, Pattern], tuple[float, float]]) -> World:
    exchanged = "reduce_scatter" if world.backend == "gloo" else "all_gather"
    like = {"broadcast": "all_gather", "reduce": "reduce_scatter", "all_to_all": exchanged}

    def known(one: Measured) -> Measured:
        found = lost.get((like.get(one.kind, one.kind), one.pattern), (0.0, 0.0))
        return replace(one, takes_s=found[0], slows=found[1])

    return replace(world, measured=tuple(known(one) for one in world.measured))


def _lost(work: Started, device: torch.device) -> float:
    """Seconds of computing that are lost to one, from this rank's view, below 0 by noise."""
    times = math.ceil(_LEAST_S / max(ranks.all_of(measure.seconds(_whole(work), 1, device))))
    measure.barrier()
    alone = measure.seconds(_whole(work), times, device)
    multiply = measure.computing(_LONGER * max(ranks.all_of(alone)), device)
    if device.type != "cpu":
        return _beside(work, multiply, times, device, time.perf_counter)
    worked = _beside(work, multiply, times, device, time.process_time)
    return crowded_out(*shared_cores(worked / alone)) * alone


def _whole(work: Started) -> Callable[[], object]:
    return lambda: work()()


def crowded_out(busy: float, cores: float) -> float:
    """The part of computing that gives way to a transport which keeps `busy` cores busy, where a
    rank has so many cores for both.

    It is worked out from seconds of work: on crowded cores, of two times that both depend on who
    gets a turn, the difference says nothing.

    >>> crowded_out(0.25, 0.5), crowded_out(0.25, 1.0), crowded_out(0.25, 2.0)
    (0.5, 0.25, 0.0)
    """
    return 1 - max(0.0, min(1.0, cores - busy)) / min(1.0, cores)


def shared_cores(busy: float) -> tuple[float, float]:
    """What the ranks of this host keep busy of its cores, which they share, for each of them, and
    how many it has for each. Collective.
    """
    here = socket.gethostname()
    theirs = [cores for host, cores in ranks.all_of((here, busy)) if host == here]
    able = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(able(0)) if able else os.cpu_count() or 1
    return sum(theirs) / len(theirs), cores / len(theirs)


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
    return lambda: wire.wait(x)


_STARTS = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}
