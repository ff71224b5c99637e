"""What ranks that compute lose on coming together for a collective, beyond what it takes where
nothing else runs: they come at different times, and whoever waits is woken late. On ranks that
share cores it is milliseconds, the same for small and large values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from autopar.cost import measure
from autopar.cost.measure import Case
from autopar.cost.pattern import Pattern
from autopar.world import ranks

_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
_BYTES = 2**13  # small: nothing but the meeting shows
_COMPUTE_S = 1e-2  # between two collectives, about
_TURNS = 5  # of computing and meeting in one measurement


def meeting_s(
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
