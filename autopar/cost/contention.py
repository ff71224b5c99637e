"""Contention: what collectives and computing cost one another while both run at the same time.

One coefficient says it all: `World.contention`, the share of computing that is lost while a
collective runs, whatever its kind, its bytes and its links. Calibration measures it
(calibration/contention.py); it is 0 where nothing was calibrated.

- Computing loses that share of a collective's seconds (`lost_s`): on CPUs to the threads and copies
  of the backend, on GPUs to its kernels. Communication that hides is not quite free.
- A collective takes that share of `World.launch_s` longer to start than alone (`start_s`): ranks
  that compute come to it at different times, and one that waits is woken late.

Collectives that run at the same time also share the links that they run over: `Links` holds those
under way. algorithms.py prices starts, the simulator makes its events of seconds that are lost, and
its engine.py asks `Links` when the next collective ends and what computing loses until then.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.world import World

if TYPE_CHECKING:
    from autopar.cost.simulator.engine import Event

LEAST_RATE = 0.1  # the rate at which computing goes on at least while collectives run


def start_s(alone_s: float, world: World) -> float:
    """Return the seconds that a collective takes to start in a step, from those that it takes where
    nothing else runs.
    """
    return alone_s + world.contention * world.launch_s


def lost_s(seconds: float, world: World) -> float:
    """Return the seconds of computing that are lost to a collective of so many seconds."""
    return seconds * world.contention


class Links:
    """The collectives under way. The head of each lane's queue runs; heads on one link share it.
    Where heads take more of what computing needs than there is (`share_out`), they take longer.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.link = [event.link for event in events]
        # By event, the seconds of computing that are lost in each second of it.
        self.drag = [e.takes_s / e.seconds if e.takes_s else 0.0 for e in events]
        self.free = not any(self.drag)
        self.queues: dict[str, deque[int]] = defaultdict(deque)
        self.left: dict[int, float] = {}  # seconds of the link alone that each head still needs
        self.sharing: dict[int, int] = defaultdict(int)  # heads by link
        self.now = 0.0
        self.pace = 1.0  # of heads that take anything from computing
        self.started: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    def issue(self, index: int) -> None:
        """Put a collective at the end of its lane's queue."""
        queue = self.queues[self.events[index].lane]
        queue.append(index)
        if len(queue) == 1:
            self._begin(index)

    def _begin(self, index: int) -> None:
        """Let a collective run, as the head of its lane's queue."""
        self.left[index] = self.events[index].seconds
        self.started[index] = self.now
        self.sharing[self.link[index]] += 1

    def next_end(self) -> float:
        """Return when the next collective ends if nothing else is issued; inf where none is under
        way.
        """
        if not self.left:
            return math.inf
        return self.now + min([left / self._speed(index) for index, left in self.left.items()])

    def _speed(self, index: int) -> float:
        """Return the speed of a head, as a share of what it has alone."""
        return (self.pace if self.drag[index] else 1.0) / self.sharing[self.link[index]]

    def share_out(self, most: float) -> dict[int, float]:
        """Return for each head the seconds of computing that it takes in every second from now on,
        together at most `most`: heads that want more are slowed down.
        """
        if self.free:
            return {}
        drags = {
            index: self.drag[index] / self.sharing[self.link[index]]
            for index in self.left
            if self.drag[index]
        }
        total_drag = sum(drags.values())
        self.pace = most / total_drag if total_drag > most else 1.0
        return {index: drag * self.pace for index, drag in drags.items()}

    def advance(self, until: float) -> list[int]:
        """Let time pass until then; return the collectives that end, in their order."""
        ended: list[int] = []
        while self.left and (then := self.next_end()) <= until:
            ended += self._pass(then)
        if until > self.now:
            ended += self._pass(until)
        return ended

    def _pass(self, then: float) -> list[int]:
        """Let time pass while no head changes; return the collectives that have ended by then."""
        passed, self.now = then - self.now, then
        ended = []
        for index in self.left:
            self.left[index] -= passed * self._speed(index)
            # the precision of a clock that has run for hours
            if self.left[index] <= 1e-12 * max(1.0, then):
                ended.append(index)
        for index in ended:
            del self.left[index]
            self.ended[index] = then
            event = self.events[index]
            self.sharing[event.link] -= 1
            queue = self.queues[event.lane]
            queue.popleft()
            if queue:
                self._begin(queue[0])
        return ended
