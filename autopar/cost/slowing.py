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
from .measure import Case
from .pattern import Pattern, size

_BYTES = 2**21  # large: what it takes to move them, not to start
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

    Of each kind over each pattern, all groups at once: the seconds of computing that are lost for
    each of the collective, the most of all ranks, in the middle over rounds, from 0 to 1. Kinds
    that are not measured count as what moves as much in the same direction; an all-to-all is what
    gloo's reduce-scatters are.
    """
    wanted = [Case(kind, digits, True, _BYTES) for digits in patterns for kind in _STARTS]
    numbers = torch.ones(max(measure.actual_bytes(case) for case in wanted) // 4, device=device)
    with measure.groups(patterns) as names:
        works = [_started(case, names[case.pattern], numbers) for case in wanted]
        rows = measure.rounds(lambda: [_lost(one, device) for one in works], seconds, progress)
    most = np.max(ranks.all_of(rows), axis=0)
    lost = np.clip(np.median(most, axis=0), 0.0, 1.0).tolist()
    return _with(world, {(c.kind, c.pattern): s for c, s in zip(wanted, lost, strict=True)})


def _with(world: World, lost: dict[tuple[str, Pattern], float]) -> World:
    exchanged = "reduce_scatter" if world.backend == "gloo" else "all_gather"
    like = {"broadcast": "all_gather", "reduce": "reduce_scatter", "all_to_all": exchanged}

    def known(one: Measured) -> Measured:
        return replace(one, slows=lost.get((like.get(one.kind, one.kind), one.pattern), 0.0))

    return replace(world, measured=tuple(known(one) for one in world.measured))


def _lost(work: Started, device: torch.device) -> float:
    """Seconds of computing for each of the collective, from this rank's view, below 0 by noise."""
    times = math.ceil(_LEAST_S / max(ranks.all_of(measure.seconds(_whole(work), 1, device))))
    measure.barrier()
    if device.type != "cpu":
        return _beside(work, times, device, time.perf_counter)
    return crowded_out(*shared_cores(_beside(work, times, device, time.process_time)))


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


def _beside(work: Started, times: int, device: torch.device, clock: Callable[[], float]) -> float:
    """(computing with one under way − computing alone, by this clock) / seconds of the collective
    alone. With a clock of work that is the cores that it keeps busy and those that computing needs
    besides, as it loses its caches to it: up to twice as much at little traffic.
    """
    alone = measure.seconds(_whole(work), times, device)
    multiply = measure.computing(_LONGER * max(ranks.all_of(alone)), device)

    def both() -> None:
        finish = work()
        multiply()
        finish()

    measure.barrier()
    computing = measure.seconds(multiply, times, device, clock)
    measure.barrier()
    return (measure.seconds(both, times, device, clock) - computing) / alone


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
