"""Measuring in rounds over all cases, each in another order, until the time is used up: drift meets
all alike. All ranks measure the same in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from autopar.cost import measure
from autopar.world import ranks

T = TypeVar("T")
Progress = Callable[[float, str], None]  # share that is done, what is being done
_WARMING = 0.1  # of the progress that is shown


def part(progress: Progress, start: float, share: float) -> Progress:
    """The progress of a part that begins at `start` and takes this share of the whole."""
    return lambda done, doing: progress(start + share * done, doing)


def warmed(
    works: Sequence[Callable[[], object]],
    joins: Sequence[bool],
    device: torch.device,
    seconds: float,
    progress: Progress,
    doing: str,
) -> tuple[list[measure.Often], float]:
    """How often to run each for one measurement, and the seconds that are left."""
    start, times = time.perf_counter(), list[measure.Often]()
    for done, (work, taking_part) in enumerate(zip(works, joins, strict=True)):
        progress(_WARMING * done / len(works), doing)
        times.append(measure.times_for(work, device, taking_part))
    return times, max(seconds / 2, seconds - (time.perf_counter() - start))


def after_warming(progress: Progress, doing: str) -> Callable[[float], None]:
    """The progress of what follows, from that of its rounds."""
    return lambda share: progress(_WARMING + (1 - _WARMING) * share, doing)


def in_rounds(
    visits: Sequence[int],
    once: Callable[[int], T],
    seconds: float,
    progress: Callable[[float], None],
) -> list[list[T]]:
    """Rounds over all cases, each in another order, as many as the time allows and at least one;
    rank 0 decides. `visits`: how often each case is measured in one round. What each measured.
    """
    found: list[list[T]] = [[] for _ in visits]
    start, more, shown, rounds = time.perf_counter(), True, 0.0, 0
    places = np.repeat(np.arange(len(visits)), visits)
    while more:
        order = np.random.default_rng(rounds).permutation(places)  # the same on every rank
        for done, index in enumerate(order.tolist()):
            found[index].append(once(index))
            used = (time.perf_counter() - start) / seconds
            shown = min(1.0, max(shown, used, (done + 1) / len(order) if not rounds else 0.0))
            progress(shown)
        rounds += 1
        taken = time.perf_counter() - start
        more = ranks.from_rank_0(taken * (1 + 1 / rounds) < seconds)
    return found
