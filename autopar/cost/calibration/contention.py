"""Contention between computing and collectives, measured: the share of computing that is lost while
a collective runs (`World.contention`). cost/contention.py says what the cost model makes of it.

On CPUs the backend's threads and copies take cores and caches from matmuls, on GPUs its kernels
take multiprocessors. `measure_contention` runs matmuls alone and with a collective under way, as
large as a bucket of gradients. `calibrate` calls it, on all ranks.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autopar import _compat
from autopar.cost.calibration import measure
from autopar.cost.calibration.fit import six
from autopar.cost.calibration.measure import Case
from autopar.cost.network import Pattern, size
from autopar.ops import comm
from autopar.world import ranks

_BYTES = 2**22  # of the unsharded value: a bucket's, so that moving counts more than starting
_LONGER = 2.0  # computing takes so many times the collective, which then ends within it
_LEAST_S = 0.1  # of one measurement

functional = torch.ops._c10d_functional
Finish = Callable[[], Tensor]  # waits for a collective and returns its result
Started = Callable[[], Finish]  # issues a collective
Array = NDArray[np.float64]


def measure_contention(
    patterns: list[Pattern], device: torch.device, seconds: float, progress: Callable[[float], None]
) -> float:
    """Return the share of computing that is lost while a collective is under way in all groups of a
    pattern: the median over kinds, patterns and rounds, the most of all ranks. Collective.
    """
    cases = [Case(kind, digits, True, _BYTES) for digits in patterns for kind in _STARTS]
    numbers = torch.ones(max(measure.actual_bytes(case) for case in cases) // 4, device=device)
    with measure.groups(patterns) as names:
        works = [_issuer(case, names[case.pattern], numbers) for case in cases]
        samples = measure.in_rounds(
            [1] * len(works), lambda index: _measure_loss(works[index], device), seconds, progress
        )
    alone_s, added_s = np.median(samples, axis=1).T
    return six(max(ranks.all_of(_lost_share(alone_s, added_s, device))))


def _lost_share(alone_s: Array, added_s: Array, device: torch.device) -> float:
    """Return this rank's share, from the seconds of each kind of collective where nothing else
    runs, and those by which it makes computing longer: on a CPU of work, else of time.
    """
    if device.type == "cpu":
        work_s, cores = shared_cores(added_s)
        lost = [measure_crowding(busy, cores) for busy in work_s / alone_s]
    else:
        lost = (added_s / alone_s).tolist()
    return float(np.median(np.clip(lost, 0.0, 1.0)))  # noise is no gain


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
    block = max(1, case.unsharded_bytes // (4 * count * count))
    x = numbers[: block * count * (count if case.kind in measure.FULL_OPERANDS else 1)]
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
