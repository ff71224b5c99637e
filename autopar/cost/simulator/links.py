"""Events of a step, and the links that its collectives share while they are under way.

step_events.py and graph_events.py make `Event`s; engine.py runs them, and asks `Links` when the
next collective ends and how much of the compute stream's speed the collectives take.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple


class Event(NamedTuple):
    """One op on the compute stream, or one collective (`lane` is not "").

    `seconds`: its duration where nothing else runs. `after`: the events whose results it takes, all
    earlier ones. `lane`: the queue, that is the process group, which runs one collective after the
    other. `link`: the links it runs over; collectives of several lanes share them. `bytes`: what a
    rank sends. `ahead`: it depends on stored tensors only, so it can be issued long before its use;
    `held_bytes` are then alive. `takes_s`: seconds of computing that are lost to it where ops run
    at the same time. `parts`: the events that are fused in a bucket.
    """

    name: str
    kind: str
    seconds: float
    after: tuple[int, ...]
    phase: Literal["forward", "backward", "optimizer"] = "forward"
    chain: str = ""
    lane: str = ""
    link: int = 0
    bytes: float = 0.0
    ahead: bool = False
    held_bytes: float = 0.0
    takes_s: float = 0.0
    parts: tuple[Event, ...] = ()


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
        self.sharing[self.events[index].link] += 1

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
