"""How much of a step's communication is hidden, of what its critical path allows.

Of each rank: communication is when something of it is on the wire, exposed when it meanwhile stands
in a wait. What must be exposed is a lower bound: of the modelled step's events, their seconds
scaled to the computing and the communication that was measured, no order is shorter if the rank
computes one op and each link carries one collective at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from autopar.cost.simulator import COMPUTE, WAITS
from autopar.cost.simulator.engine import Event
from autopar.runtime.profiler import MeasuredStep
from benchmarks.step_time.traces import merged, total


@dataclass(frozen=True)
class Account:
    """Seconds of a step, of one rank or the mean of all."""

    computing: float
    communication: float
    exposed: float
    skew: float

    @property
    def hidden(self) -> float:
        """The part of the communication that is."""
        return 1 - self.exposed / self.communication if self.communication else 1.0


def account(step: MeasuredStep) -> Account:
    """Of one rank's step."""
    communicating = [(s.start, s.end) for s in step.spans if s.track not in (COMPUTE, WAITS)]
    exposed = step.exposed_seconds
    return Account(step.computing, total(merged(communicating)), exposed, step.skew_seconds)


def usual(everywhere: Sequence[Sequence[Account]]) -> Account:
    """Of every rank's steps the median step, each the mean of its ranks."""
    steps = [[asdict(figures) for figures in step] for step in zip(*everywhere, strict=True)]
    means = [
        {k: statistics.mean(figures[k] for figures in step) for k in step[0]} for step in steps
    ]
    return Account(**{k: statistics.median(mean[k] for mean in means) for k in means[0]})


# -- what cannot be hidden -------------------------------------------------------------------------
def modelled(events: Sequence[Event]) -> tuple[float, float]:
    """Seconds of (computing, communication) of forward and backward, each collective alone."""
    mine = [event for event in events if event.phase != "optimizer"]
    both = ((e.seconds for e in mine if bool(e.lane) == sent) for sent in (False, True))
    computing, communication = map(sum, both)
    return computing, communication


def could_be(events: Sequence[Event], seen: Account) -> float:
    """The part of the communication that the critical path allows to hide, with these seconds of
    computing and communication in all.
    """
    computing, communication = modelled(events)
    if not seen.communication or not communication:
        return 1.0
    scaled = seen.computing / computing, seen.communication / communication
    return 1 - least_exposed(events, *scaled) / seen.communication


def least_exposed(events: Sequence[Event], quick: float = 1.0, slow: float = 1.0) -> float:
    """Seconds by which every order of forward and backward is longer than its computing, where ops
    take `quick` and collectives `slow` times their seconds.

    >>> op, sent = Event("", "", 2, ()), Event("", "", 3, (0,), lane="x")
    >>> least_exposed([op, sent, op._replace(after=(0,)), op._replace(after=(1,))])
    1.0
    """
    exposed = 0.0
    for phase in ("forward", "backward"):
        places = [i for i, event in enumerate(events) if event.phase == phase]
        if places:
            exposed += _least(events, places, quick, slow)
    return exposed


def _least(events: Sequence[Event], places: list[int], quick: float, slow: float) -> float:
    own = [events[i] for i in places]
    sent = np.array([bool(event.lane) for event in own])
    seconds = np.array([event.seconds for event in own]) * np.where(sent, slow, quick)
    heads, tails = _around(own, places, seconds, np.where(sent, 0.0, seconds))
    bounds = [float((heads + seconds + tails).max())]
    for link in {event.link for event in own if event.lane}:
        its = np.array([bool(e.lane) and e.link == link for e in own])
        bounds.append(_queue(heads[its], seconds[its], tails[its]))
    return max(0.0, max(bounds) - float(seconds[~sent].sum()))


def _around(
    own: list[Event], places: list[int], seconds: np.ndarray, work: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What must have passed before each event, and must pass after it: the longest path, or all the
    computing that it hangs on, or that hangs on it, one op after the other.
    """
    number = {place: n for n, place in enumerate(places)}
    after = [[number[i] for i in event.after if i in number] for event in own]
    before = np.zeros((len(own), len(own)), bool)
    path, rest = np.zeros(len(own)), np.zeros(len(own))
    for n, needed in enumerate(after):
        for m in needed:
            before[n] |= before[m]
            before[n, m] = True
            path[n] = max(path[n], path[m] + seconds[m])
    for n in range(len(own) - 1, -1, -1):
        for m in after[n]:
            rest[m] = max(rest[m], rest[n] + seconds[n])
    return np.maximum(path, before @ work), np.maximum(rest, before.T @ work)


def _queue(heads: np.ndarray, seconds: np.ndarray, tails: np.ndarray) -> float:
    """Of a link: those that come no earlier and are followed by no less than some, in a row."""
    late, long = (heads >= np.unique(heads)[:, None]), (tails >= np.unique(tails)[:, None])
    rows = late[:, None, :] & long[None, :, :]
    whole = np.unique(heads)[:, None] + rows @ seconds + np.unique(tails)[None, :]
    return float(np.where(rows.any(-1), whole, 0.0).max())
