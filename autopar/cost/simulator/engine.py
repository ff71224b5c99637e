"""The simulation engine: one compute stream, and a queue of collectives for each lane (process
group), whose heads share the links that they run over.

Events enter `simulate_overlap`, a `Run` leaves: when each event starts and ends, and in which order
ops run and collectives are issued. The same simulation decides the order of a scheduled graph
(passes/overlap/schedule.py) and says what a layout would take (`timeline`). Nothing in it depends
on the rank: the same events give the same order everywhere.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.cost.contention import LEAST_RATE, Links

_SLACK = 1.0  # a prefetch is issued this many of its own durations before it would be too late
_DEFER = (0, 2, 8)  # how many matmuls that no other op needs may wait for an idle moment
_WORTH = 0.002  # share of the step that deferring more of them must gain
_WINDOW = 256  # events


class Event(NamedTuple):
    """One op on the compute stream, or one collective (`lane` is not "").

    `seconds`: its duration where nothing else runs. `after`: the events whose results it takes, all
    earlier ones. `lane`: the queue, that is the process group, which runs one collective after the
    other. `link`: the links it runs over; collectives of several lanes share them. `bytes`: what a
    rank sends. `ahead`: it depends on stored tensors only, so it can be issued long before its use;
    `in_flight_bytes` are then alive. `takes_s`: seconds of computing that are lost to it where ops
    run at the same time. `members`: the events that are fused in a bucket.
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
    in_flight_bytes: float = 0.0
    takes_s: float = 0.0
    members: tuple[Event, ...] = ()


class Action(NamedTuple):
    """The next action of the thread that runs the program: "run" an op or "issue" a collective."""

    kind: Literal["run", "issue"]
    event: int


@dataclass(frozen=True)
class Run:
    """The result of a simulation, in seconds.

    `start`, `end`: of every event. `exposed`: for how long the compute stream stood still for each
    collective, or was slowed down by it. `order`: in which ops were run and collectives issued.
    `waits`: when the stream stood still for which collective, (event, from, to). `defer`: how many
    matmuls could wait for an idle moment.
    """

    start: list[float]
    end: list[float]
    exposed: dict[int, float]
    order: list[Action]
    waits: list[tuple[int, float, float]]
    defer: int = 0

    @property
    def seconds(self) -> float:
        return max(self.end, default=0.0)


def in_order(events: Sequence[Event]) -> Run:
    """Run every event after the one before it: collectives are waited for at once."""
    start, end, waits, now = [], [], [], 0.0
    for index, event in enumerate(events):
        start.append(now)
        now += event.seconds
        end.append(now)
        if event.lane:
            waits.append((index, start[-1], now))
    exposed = {index: until - since for index, since, until in waits}
    order = [Action("issue" if e.lane else "run", i) for i, e in enumerate(events)]
    return Run(start, end, exposed, order, waits)


def simulate_overlap(
    events: Sequence[Event],
    ahead_bytes: float = math.inf,
    window: int = _WINDOW,
    defers: Sequence[int] = _DEFER,
    patience: float = 0.0,
) -> Run:
    """Simulate the events with communication overlapped by computation.

    Collectives are issued as soon as their operands are there and waited for at their first use;
    meanwhile the compute stream runs other ops that are ready, in the order given. Prefetches
    (`ahead`) are issued as late as does no harm, with at most `ahead_bytes` of them alive before
    their use (more only where the program would stop otherwise). Matmuls that only a gradient
    needs may be deferred to a moment in which the stream would stand still.

    `window`: how many events past the first unfinished one may run while that one waits. `defers`:
    how many matmuls may be deferred at a time; the best of these is taken. `patience`: seconds
    after its end for which a collective is not waited for while there is anything else to compute.
    """
    later = _deferrable(events)
    best = _run(events, ahead_bytes, later, defers[0], window, patience)
    for defer in defers[1:]:
        if not best.exposed or not later:
            break
        other = _run(events, ahead_bytes, later, defer, window, patience)
        if other.seconds < best.seconds * (1 - _WORTH):
            best = other
    return best


def _run(
    events: Sequence[Event],
    ahead_bytes: float,
    later: set[int],
    defer: int,
    window: int,
    patience: float,
) -> Run:
    """Simulate with one number of deferred matmuls; prefetches as early as possible first, which
    tells how late each may be issued.
    """
    earliest = _Simulation(
        events, [0.0] * len(events), math.inf, later, defer, window, patience
    ).run()
    if not any(event.ahead for event in events):
        return earliest
    latest = _latest_issues(events, earliest)
    return _Simulation(events, latest, ahead_bytes, later, defer, window, patience).run()


def _deferrable(events: Sequence[Event]) -> set[int]:
    """Return the ops of the backward after which less is computed than in themselves."""
    below = [0.0] * len(events)
    deferrable = set()
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        if event.phase != "backward":
            continue
        if not event.lane and below[index] < event.seconds:
            deferrable.add(index)
        total = below[index] + (0.0 if event.lane else event.seconds)
        for needed in event.after:
            below[needed] = max(below[needed], total)
    return deferrable


def _latest_issues(events: Sequence[Event], early: Run) -> list[float]:
    """Return when each prefetch should be issued at the latest, so that those on its link still
    arrive in time one after the other.
    """
    uses = _first_uses(events, early.start)
    latest = [0.0] * len(events)
    begins: dict[int, float] = defaultdict(lambda: math.inf)
    ahead = [i for i, event in enumerate(events) if event.lane and event.ahead]
    for index in sorted(ahead, key=lambda i: (uses[i], i), reverse=True):
        event = events[index]
        begin = min(uses[index], begins[event.link]) - event.seconds
        begins[event.link] = begin
        latest[index] = begin - _SLACK * event.seconds
    return latest


def _first_uses(events: Sequence[Event], start: Sequence[float]) -> list[float]:
    """Return when the first op starts that takes each event's result, through other collectives
    too.
    """
    uses = [math.inf] * len(events)
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        used_at = uses[index] - event.seconds if event.lane else start[index]
        for needed in event.after:
            uses[needed] = min(uses[needed], used_at)
    return uses


def _wait_start(wait: tuple[int, float, float]) -> float:
    return wait[1]


class _Simulation:
    """The state of a simulation: what is ready, what is under way, and what has ended."""

    def __init__(
        self,
        events: Sequence[Event],
        not_before: Sequence[float],
        ahead_bytes: float,
        later: set[int],
        defer: int,
        window: int,
        patience: float,
    ) -> None:
        self.events, self.not_before, self.bound = events, not_before, ahead_bytes
        self.later, self.defer = later if defer else set(), defer
        self.window, self.patience = window, patience
        self.settling: list[int] = []  # collectives that have ended and are not waited for yet
        self.deferred: deque[int] = deque()
        count = len(events)
        self.users: list[list[int]] = [[] for _ in range(count)]
        self.missing = [0] * count
        for index, event in enumerate(events):
            needed = set(event.after)
            self.missing[index] = len(needed)
            for other in needed:
                self.users[other].append(index)
        self.links = Links(events)
        self.runnable_ops: list[int] = []  # ops
        self.late: list[tuple[int, int]] = []  # collectives to issue: (first user, event)
        self.waiting_prefetches: list[
            tuple[int, int]
        ] = []  # prefetches, which can wait: (first user, event)
        self.alive = 0.0  # bytes that were issued ahead of their use
        self.unused: set[int] = set()  # the events whose bytes these are
        self.start, self.end = [0.0] * count, [0.0] * count
        self.done = [False] * count
        self.first = 0  # the first event that is not done
        self.exposed: dict[int, float] = defaultdict(float)
        self.waits: list[tuple[int, float, float]] = []
        self.idle_since: float | None = None
        self.idle_arrivals: list[int] = []
        self.order: list[Action] = []

    def run(self) -> Run:
        """Run all events and return when they ran."""
        for index, missing in enumerate(self.missing):
            if not missing:
                self._reachable(index)
        while self.first < len(self.events):
            self._issue()
            if not self._compute():
                self._wait()
        self._blame()
        waits = sorted(self.waits, key=_wait_start)
        return Run(self.start, self.end, dict(self.exposed), self.order, waits, self.defer)

    def _reachable(self, index: int) -> None:
        """Queue the event, whose operands are all there."""
        event = self.events[index]
        if index in self.later:
            self.deferred.append(index)
            return
        if not event.lane:
            heapq.heappush(self.runnable_ops, index)
            return
        use = self.users[index][0] if self.users[index] else len(self.events)
        heapq.heappush(self.waiting_prefetches if event.ahead else self.late, (use, index))

    def _issue(self) -> None:
        """Issue every collective that is ready, and the prefetches whose time has come."""
        while self.late:
            self._send(heapq.heappop(self.late)[1])
        while self.waiting_prefetches and self._may_go(self.waiting_prefetches[0][1]):
            self._send(heapq.heappop(self.waiting_prefetches)[1])

    def _horizon(self) -> float:
        """Return when a collective can be issued again: after the op that runs next."""
        if self.runnable_ops:
            return self.links.now + self.events[self.runnable_ops[0]].seconds
        return self.links.next_end() if self.links.left else self.links.now

    def _may_go(self, index: int) -> bool:
        fits = self.alive == 0 or self.alive + self.events[index].in_flight_bytes <= self.bound
        return fits and self.not_before[index] < self._horizon()

    def _send(self, index: int) -> None:
        self.order.append(Action("issue", index))
        if self.events[index].ahead:
            self.alive += self.events[index].in_flight_bytes
            self.unused.add(index)
        self.links.issue(index)

    def _compute(self) -> bool:
        """Run the next op that is ready; False where none is."""
        index = self._next()
        if index is None:
            return False
        self._blame()
        self.order.append(Action("run", index))
        self.start[index] = self.links.now
        arrived = self._work(self.events[index].seconds)
        self._finish(index, self.links.now)
        self._settle(arrived)
        return True

    def _settle(self, arrived: list[int]) -> None:
        """Let those collectives arrive that ended long enough ago."""
        self.settling += arrived
        until = self.links.now - self.patience
        settled = [index for index in self.settling if self.links.ended[index] <= until]
        self.settling = [index for index in self.settling if self.links.ended[index] > until]
        self._arrive(settled)

    def _work(self, seconds: float) -> list[int]:
        """Compute for so many seconds, or longer where collectives slow computing down; return the
        collectives that end meanwhile.
        """
        arrived: list[int] = []
        while drags := self.links.share_out(1 - LEAST_RATE):
            rate = 1 - sum(drags.values())
            until = min(self.links.now + seconds / rate, self.links.next_end())
            passed = until - self.links.now
            for index, drag in drags.items():
                self.exposed[index] += passed * drag
            seconds -= passed * rate
            arrived += self.links.advance(until)
            if seconds <= 1e-15 * max(1.0, until):
                return arrived
        return arrived + self.links.advance(self.links.now + seconds)

    def _next(self) -> int | None:
        """Return the next op to run: one within the window, or a deferred one; None where there is
        none.
        """
        in_window = self.runnable_ops and self.runnable_ops[0] <= self.first + self.window
        if self.deferred and (not in_window or len(self.deferred) > self.defer):
            return self.deferred.popleft()
        return heapq.heappop(self.runnable_ops) if in_window else None

    def _wait(self) -> None:
        """Wait, as there is nothing to compute. The first event that is not done is then a
        collective: issue it if it was held back, else stand still until one ends.
        """
        prefetch = next(
            (entry for entry in self.waiting_prefetches if entry[1] == self.first), None
        )
        if prefetch is not None:
            self.waiting_prefetches.remove(prefetch)
            heapq.heapify(self.waiting_prefetches)
            self._send(self.first)
            return
        if self.settling:
            settled, self.settling = self.settling, []
            self._arrive(settled)
            return
        self.links.share_out(1.0)
        since, next_end = self.links.now, self.links.next_end()
        assert next_end < math.inf, f"nothing runs, but {self.events[self.first].name} is not done"
        if self.idle_since is None:
            self.idle_since = since
        arrived = self.links.advance(next_end)
        self.idle_arrivals += arrived
        self._arrive(arrived)

    def _blame(self) -> None:
        """Note, as computing goes on, which collectives it stood still for: the last one to arrive
        for as long as that ran, and for the time before it the one that arrived by then.
        """
        if self.idle_since is None:
            return
        until = self.links.now
        for index in reversed(self.idle_arrivals):
            if self.end[index] >= until - 1e-12:
                since = max(self.idle_since, self.start[index])
                if since < until:
                    self.exposed[index] += until - since
                    self.waits.append((index, since, until))
                    until = since
        self.idle_since = None
        self.idle_arrivals.clear()

    def _arrive(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.start[index] = self.links.started[index]
            self._finish(index, self.links.ended[index])

    def _finish(self, index: int, when: float) -> None:
        """Note the end of an event, and queue the events whose operands are now all there."""
        self.end[index], self.done[index] = when, True
        while self.first < len(self.events) and self.done[self.first]:
            self.first += 1
        for needed in self.events[index].after:
            if needed in self.unused:  # its first use
                self.unused.remove(needed)
                self.alive -= self.events[needed].in_flight_bytes
        for user in self.users[index]:
            self.missing[user] -= 1
            if not self.missing[user]:
                self._reachable(user)
