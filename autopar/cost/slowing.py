"""What computing loses to collectives that run beside it, so that what hides is not quite free: on
CPUs the transport's threads and copies take the cores that products want, on GPUs its kernels take
multiprocessors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
_LEAST_S = 0.25  # of one measurement, in turns: ranks that share a core take turns on it, too
_LEAST_ROUNDS = 3

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

    Of each kind over each pattern, on all ranks at once: (computing with one under way − computing
    alone) / the collective alone, the slowest rank's, in the middle over rounds, from 0 to 1. Kinds
    that are not measured count as what moves as much in the same direction.
    """
    wanted = [Case(kind, digits, True, _BYTES) for digits in patterns for kind in _STARTS]
    numbers = torch.ones(max(measure.actual_bytes(case) for case in wanted) // 4, device=device)
    with measure.groups(patterns) as names:
        works = [_started(case, names[case.pattern], numbers) for case in wanted]
        cases = [_Beside.of(work, device) for work in works]
        rows: list[list[tuple[float, float, float]]] = []
        start, more = time.perf_counter(), True
        while more:
            rows.append([case.turn(device) for case in cases])
            taken = time.perf_counter() - start
            progress(min(1.0, max(taken / seconds, len(rows) / _LEAST_ROUNDS)))
            left = taken * (1 + 1 / len(rows)) < seconds or len(rows) < _LEAST_ROUNDS
            more = ranks.from_rank_0(left)
    alone, computing, both = np.moveaxis(np.max(ranks.all_of(rows), axis=0), -1, 0)
    lost = np.clip(np.median((both - computing) / alone, axis=0), 0.0, 1.0)
    return _with(world, {(c.kind, c.pattern): float(s) for c, s in zip(wanted, lost, strict=True)})


def _with(world: World, lost: dict[tuple[str, Pattern], float]) -> World:
    def known(one: Measured) -> Measured:
        return replace(one, slows=lost.get((_LIKE.get(one.kind, one.kind), one.pattern), 0.0))

    return replace(world, measured=tuple(known(one) for one in world.measured))


_LIKE = {"broadcast": "all_gather", "reduce": "reduce_scatter", "all_to_all": "all_gather"}


@dataclass(frozen=True)
class _Beside:
    """A collective, products that take longer than it, and how often both are run for one figure:
    the same on every rank.
    """

    work: Started
    multiply: Callable[[], None]
    times: int

    @staticmethod
    def of(work: Started, device: torch.device) -> _Beside:
        measure.seconds(lambda: work()(), 1, device)  # the first one may be slow
        alone = max(ranks.all_of(measure.seconds(lambda: work()(), 1, device)))
        multiply = measure.computing(_LONGER * alone, device)
        return _Beside(work, multiply, math.ceil(_LEAST_S / (_LONGER * alone)))

    def turn(self, device: torch.device) -> tuple[float, float, float]:
        """Seconds of the collective alone, of computing alone, of computing with one under way."""

        def both() -> None:
            finish = self.work()
            self.multiply()
            finish()

        found = []
        for run in (lambda: self.work()(), self.multiply, both):
            measure.barrier()
            found.append(measure.seconds(run, self.times, device))
        alone, computing, together = found
        return alone, computing, together


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
