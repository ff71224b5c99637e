"""schedule: the order in which a derived graph computes, issues collectives and waits for them.

The graph is one that AOTAutograd derived, forward or backward. The simulation of
cost/simulator/engine.py decides: a collective is issued as soon as its operands are there, or,
where it fetches what is stored, just before it would be late; it is waited for at its first use, or
when it is modelled done and another collective hangs on it; a while later where that costs nothing,
as ranks drift apart and collectives are late. Numbers stay the same to the bit: nothing but the
order changes.

limit_memory: a scheduled order is changed as little as it takes to hold no more than a bound.

A derived graph enters after `schedule`, before products write in place; backends.py calls this for
each schedule that it tries, with the bytes that the plan allows.

What was issued is waited for before an op that would not fit beside it, as the operands of a
collective are only free then; an op that was put off runs where that frees more than it makes; what
is fetched, and collectives whose results come to more than there is room for, are issued later: at
the latest right before what takes them. Numbers stay the same to the bit.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import fx

from autopar.cost.simulator.engine import Run, simulate_overlap
from autopar.cost.simulator.graph_events import (
    Phase,
    collective_of,
    fetchable,
    graph_events,
    group_of,
    is_wait,
    keeps_place,
)
from autopar.cost.simulator.links import Event
from autopar.cost.simulator.liveness import Lives, Staging, StepMemory, live_bytes
from autopar.ir.graph import reorder
from autopar.world import World


class Freedom(NamedTuple):
    """How far from its place in the graph an op may go. `ahead`: how much may be fetched before its
    use, in times the largest; `window`: of events, past the first that is not done; `patience`:
    for how long after its modelled end a collective may be left alone while there is something to
    compute, in times the mean interval between two collectives, what is tried first.
    """

    ahead: int = 4
    window: int = 256
    patience: tuple[float, ...] = (2.0, 1.0)


USUAL = Freedom()
PUNCTUAL = Freedom(patience=())
LEAST = Freedom(1, 8, ())  # holds hardly more at once than the graph's own order
_FREE = 0.005  # of the simulated step: what patience may cost


def schedule(
    graph: fx.Graph,
    world: World,
    stored: frozenset[str],
    phase: Phase,
    freedom: Freedom = USUAL,
) -> Run:
    """Reorder the graph in place; the simulated run of it. The same on every rank."""
    listed = graph_events(graph, world, stored, phase)
    run = _patient(listed.events, freedom)
    _arrange(graph, [listed.nodes[action.event] for action in run.order])
    return run


def _patient(events: Sequence[Event], freedom: Freedom) -> Run:
    """The simulated run that leaves collectives alone longest, among those as short as the one that
    asks for them at once.
    """
    ahead = _most_ahead(events, freedom)
    prompt = simulate_overlap(events, ahead, freedom.window)
    interval = prompt.seconds / (sum(bool(event.lane) for event in events) or math.inf)
    for times in freedom.patience if interval else ():
        patience, defers = times * interval, (prompt.defer,)
        run = simulate_overlap(events, ahead, freedom.window, defers, patience)
        if run.seconds <= (1 + _FREE) * prompt.seconds:
            return run
    return prompt


def _most_ahead(events: Sequence[Event], freedom: Freedom) -> float:
    """Bytes that may be held before their use."""
    largest = max((event.held_bytes for event in events if event.ahead), default=0.0)
    return freedom.ahead * largest


def check(graph: fx.Graph, before: Sequence[fx.Node]) -> None:
    """The contract: the nodes are those of before, each after what it takes, and every collective
    is waited for.
    """
    graph.lint()
    assert set(graph.nodes) == set(before), "nodes were lost or made"
    for node in graph.nodes:
        if collective_of(node) is not None:
            waited = any(is_wait(user) for user in _users(node))
            assert waited or not node.users, f"nothing waits for {node.name}"


def collectives_in_order(graph: fx.Graph) -> list[str]:
    """One line a collective, as issued: what the ranks of a group must have in common."""
    return [
        f"{group_of(node)} {collective_of(node)} "
        + " ".join(str(tuple(n.meta["val"].shape)) for n in node.all_input_nodes)
        for node in graph.nodes
        if collective_of(node) is not None
    ]


def _arrange(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the nodes in this order, views and waits right before their first user."""
    given = graph.find_nodes(op="placeholder")
    placed, cursor = set(given), given[-1] if given else graph._root
    rest = [node for node in graph.nodes if node.op != "output"]
    for wanted in (*order, *rest):
        for node in _with_carriers(wanted, placed):
            cursor.append(node)
            cursor = node


def _with_carriers(node: fx.Node, placed: set[fx.Node]) -> Iterator[fx.Node]:
    """The node after those that it needs and that are not placed yet. A tuple of results is taken
    apart at once: it would keep all of them alive until the last is asked for.
    """
    if node in placed:
        return
    for needed in node.all_input_nodes:
        yield from _with_carriers(needed, placed)
    placed.add(node)
    yield node
    for user in node.users:
        if user.target is operator.getitem and user not in placed:
            placed.add(user)
            yield user


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a collective's results."""
    for user in node.users:
        yield user
        if user.target is operator.getitem:
            yield from user.users


_WINDOW = 64  # of what comes next in a schedule, where room is looked for


def limit_memory(graph: fx.Graph, stored: frozenset[str], bound: float, step: StepMemory) -> bool:
    """Reorder the graph in place; whether it holds no more than `bound` bytes then. `stored`: the
    placeholders that are there before the step begins.
    """
    if live_bytes(graph, step) <= bound:
        return True
    scheduled = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    early = fetchable(graph, stored)
    late = _Late(graph, Lives(graph, step), early, bound)
    late.place(scheduled)
    given = graph.find_nodes(op="placeholder")
    reorder(graph, [*given, *_fetched_earlier(late, scheduled, early)])
    return live_bytes(graph, step) <= bound


class _Late:
    """Places nodes one after the other: what is early right before its first use, waits as soon as
    there is too little room. `order`; `live`: by place, what is there while the node runs.
    """

    def __init__(self, graph: fx.Graph, lives: Lives, early: set[fx.Node], bound: float) -> None:
        self.staging = Staging(lives)
        self.lives, self.early, self.bound = lives, early, bound
        self.left = {node: len(readers) for node, readers in lives.readers.items()}
        self.made = {node: lives.bytes_made(node) for node in graph.nodes}
        self.waits: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # by issue
        for wait, issue in lives.issues.items():
            self.waits[issue].append(wait)
        given = graph.find_nodes(op="placeholder")
        self.placed = set(given)
        self.now = lives.step.primals + sum(self.made[node] for node in given)
        self.flying: dict[fx.Node, None] = {}  # issued and not waited for, in this order
        self.coming: deque[fx.Node] = deque()  # what is not early, as scheduled
        self.order: list[fx.Node] = []
        self.live: list[float] = []

    def place(self, nodes: Iterable[fx.Node]) -> None:
        """All of them, in their order but for what is moved."""
        nodes = list(nodes)
        kept_back = []
        self.coming.extend(n for n in nodes if n not in self.early)
        for node in nodes:
            if node in self.early or (node in self.waits and not self._room(node)):
                kept_back.append(node)
            else:
                self._with_needs(node)
        for node in kept_back:
            if all(user.op == "output" for user in node.users):  # with all that leads to it
                self._with_needs(node)

    def _room(self, node: fx.Node) -> bool:
        """Whether there is room for what the node makes, once others are waited for."""
        for issue in list(self.flying):
            if self._fits(node):
                return True
            waits = self.waits[issue]
            if any(self.left[self.lives.root[n]] <= len(waits) for n in issue.all_input_nodes):
                for wait in waits:
                    self._with_needs(wait)
        while not self._fits(node) and (several := self._frees(node)):
            for one in several:
                self._append(one)
        return self._fits(node)

    def _frees(self, node: fx.Node) -> list[fx.Node]:
        """The next op that was put off and ends more than it makes, behind the views that it takes;
        none where there is none.
        """
        while self.coming and self.coming[0] in self.placed:
            self.coming.popleft()
        for one in itertools.islice(self.coming, _WINDOW):
            if one in self.placed or one is node or one in self.waits:
                continue
            if not self.made[one] or keeps_place(one):
                continue
            several = list(dict.fromkeys(self._needs(one)))
            if any(self.made[n] or n in self.lives.issues for n in several[:-1]):
                continue
            roots = {self.lives.root[n] for each in several for n in each.all_input_nodes}
            left = {r: self.lives.readers[r] - self.placed for r in roots}
            ended = sum(self.made[r] for r, readers in left.items() if readers <= {*several})
            if ended > self.made[one]:
                return several
        return []

    def _needs(self, node: fx.Node) -> Iterator[fx.Node]:
        """The node behind all that it needs and that is not placed."""
        for needed in node.all_input_nodes:
            if needed not in self.placed:
                yield from self._needs(needed)
        yield node

    def _fits(self, node: fx.Node) -> bool:
        more = self.made[node] + self.lives.staged(node)
        return self.now + self.staging.bytes + more <= self.bound

    def _with_needs(self, node: fx.Node) -> None:
        if node in self.placed:
            return
        for needed in node.all_input_nodes:
            self._with_needs(needed)
        if self.made[node]:
            self._room(node)
        if node not in self.placed:  # by its room
            self._append(node)

    def _append(self, node: fx.Node) -> None:
        self.placed.add(node)
        self.order.append(node)
        self.now += self.made[node]
        self.staging.step(node)
        self.live.append(self.now + self.staging.bytes)
        if node in self.waits:
            self.flying[node] = None
        issue = self.lives.issues.get(node)
        if issue is not None and self.placed.issuperset(self.waits[issue]):
            del self.flying[issue]
        for root in self._read(node, issue):
            self.left[root] -= 1
            if not self.left[root]:
                self.now -= self.made[root]
        if not self.lives.readers[node]:
            self.now -= self.made[node]

    def _read(self, node: fx.Node, issue: fx.Node | None) -> set[fx.Node]:
        taken = [*node.all_input_nodes, *(issue.all_input_nodes if issue is not None else ())]
        return {self.lives.root[n] for n in taken}


def _fetched_earlier(
    late: _Late, scheduled: list[fx.Node], early: set[fx.Node]
) -> Iterator[fx.Node]:
    """The order with what is fetched as far ahead as it was scheduled, and as there is room."""
    place = {node: number for number, node in enumerate(late.order)}
    live = np.array(late.live)
    wanted = _anchors(scheduled, early, place)
    moved: dict[fx.Node, int] = {}
    before: dict[int, list[fx.Node]] = defaultdict(list)
    for node in late.order:
        if node not in early or collective_of(node) is None:
            continue
        several = list(dict.fromkeys(_unmoved(node, early, moved)))
        needs = (moved.get(n, 0) for one in several for n in one.all_input_nodes)
        first, last = max([wanted[node], *needs]), place[node]
        size = sum(late.made[one] + late.lives.staged(one) for one in several)
        full = np.flatnonzero(live[first:last] + size > late.bound)
        start = first + int(full[-1]) + 1 if len(full) else first
        if start < last:
            live[start:last] += size
            before[start] += several
            moved.update(dict.fromkeys(several, start))
    for number, node in enumerate(late.order):
        yield from before[number]
        if node not in moved:
            yield node


def _anchors(
    scheduled: list[fx.Node], early: set[fx.Node], place: dict[fx.Node, int]
) -> dict[fx.Node, int]:
    """By node that is early, the place of what followed it first in the schedule and is not."""
    found, anchor = {}, len(place)
    for node in reversed(scheduled):
        if node in early:
            found[node] = anchor
        else:
            anchor = min(anchor, place[node])
    return found


def _unmoved(node: fx.Node, early: set[fx.Node], moved: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """The node behind what it needs that has not been moved."""
    for needed in node.all_input_nodes:
        if needed in early and needed not in moved and needed.op != "placeholder":
            yield from _unmoved(needed, early, moved)
    yield node
