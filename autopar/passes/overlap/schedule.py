"""Orders a derived graph: when it computes, issues collectives, and waits for them.

`schedule` follows the simulation of cost/simulator/engine.py:
1. a collective is issued as soon as its operands are there, or, where it fetches a stored tensor,
   just before it would be late;
2. it is waited for at its first use, or when it is modelled done and another collective depends on
   it, or a while later where that costs nothing, as ranks drift apart and collectives are late.

`limit_memory` then changes this order as little as it takes to hold no more than a bound. It waits
for a collective before an op that would not fit otherwise, as that frees its operands; it runs a
deferred op where that frees more than it makes; it issues fetches later, at the latest right before
their use. A derived graph enters both and the same nodes in another order leave: numbers stay the
same to the bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import fx

from autopar.cost.simulator.engine import Event, Run, simulate_overlap
from autopar.cost.simulator.graph_events import collective_of, fetchable, graph_events, keeps_place
from autopar.cost.simulator.liveness import Liveness, Staging
from autopar.ir.graph import reorder
from autopar.passes.overlap import DerivedGraph, Freedom, GraphFacts, check_interface
from autopar.world import World

_PATIENCE_COST = 0.005  # share of the simulated step that patience may cost


def schedule(derived: DerivedGraph, world: World) -> DerivedGraph:
    """Return the derived graph, reordered in place, with its simulated run. The order is the same
    on every rank.
    """
    listed = graph_events(derived.graph, world, derived.resident, derived.phase)
    run = _most_patient_run(listed.events, derived.freedom)
    _arrange(derived.graph, [listed.nodes[action.event] for action in run.order])
    return dataclasses.replace(derived, run=run)


def check(before: GraphFacts, after: DerivedGraph) -> None:
    """The contract of both passes: the nodes are those that there were."""
    check_interface(before, after.graph)
    assert set(after.graph.nodes) == before.nodes, "nodes were lost or made"


def _most_patient_run(events: Sequence[Event], freedom: Freedom) -> Run:
    """Return the simulated run that leaves collectives alone for the longest, among those about as
    short as the run that waits for them at once.
    """
    ahead = _most_ahead(events, freedom)
    prompt = simulate_overlap(events, ahead, freedom.window)
    interval = prompt.seconds / (sum(bool(event.lane) for event in events) or math.inf)
    for times in freedom.patience if interval else ():
        patience, defers = times * interval, (prompt.defer,)
        run = simulate_overlap(events, ahead, freedom.window, defers, patience)
        if run.seconds <= (1 + _PATIENCE_COST) * prompt.seconds:
            return run
    return prompt


def _most_ahead(events: Sequence[Event], freedom: Freedom) -> float:
    """Return the bytes that may be fetched before their use."""
    largest = max((event.in_flight_bytes for event in events if event.ahead), default=0.0)
    return freedom.ahead * largest


def _arrange(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the nodes in this order, views and waits right before their first user."""
    placeholders = graph.find_nodes(op="placeholder")
    placed, cursor = set(placeholders), placeholders[-1] if placeholders else graph._root
    others = [node for node in graph.nodes if node.op != "output"]
    for next_node in (*order, *others):
        for node in _with_carriers(next_node, placed):
            cursor.append(node)
            cursor = node


def _with_carriers(node: fx.Node, placed: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the node after those that it needs and that are not placed yet. A tuple of results is
    taken apart at once, as it would keep all of them alive until the last is used.
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


_WINDOW = 64  # the next ops of a schedule among which one is sought that frees memory


def limit_memory(derived: DerivedGraph, world: World) -> DerivedGraph:
    """Return the derived graph, reordered in place where it held more than its bound, with the room
    that it leaves: less than none where it does not fit.
    """
    room = derived.bound - derived.peak_bytes
    if room < 0:
        _reorder_to_fit(derived)
        room = derived.bound - derived.peak_bytes
    return dataclasses.replace(derived, room=room)


def _reorder_to_fit(derived: DerivedGraph) -> None:
    """Wait earlier, issue later and run what frees memory earlier, as far as the bound asks."""
    graph = derived.graph
    scheduled = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    early = fetchable(graph, derived.resident)
    late = _LateOrder(graph, Liveness(graph, derived.step), early, derived.bound)
    late.place(scheduled)
    placeholders = graph.find_nodes(op="placeholder")
    reorder(graph, [*placeholders, *_move_fetches_ahead(late, scheduled, early)])


class _LateOrder:
    """Places nodes one after the other: fetches right before their first use, waits as soon as
    there is too little room. `order` holds the placed nodes, and `allocated_bytes` what is
    allocated as each runs.
    """

    def __init__(
        self, graph: fx.Graph, liveness: Liveness, early: set[fx.Node], bound: float
    ) -> None:
        self.staging = Staging(liveness)
        self.liveness, self.early, self.bound = liveness, early, bound
        self.left = {node: len(readers) for node, readers in liveness.readers.items()}
        self.output_bytes = {node: liveness.new_bytes(node) for node in graph.nodes}
        self.waits: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # by issue
        for wait, issue in liveness.issues.items():
            self.waits[issue].append(wait)
        placeholders = graph.find_nodes(op="placeholder")
        self.placed = set(placeholders)
        self.now = liveness.step.primals + sum(self.output_bytes[node] for node in placeholders)
        self.flying: dict[fx.Node, None] = {}  # issued and not waited for, in order of issue
        self.coming: deque[fx.Node] = deque()  # nodes that are not in `early`, as scheduled
        self.order: list[fx.Node] = []
        self.allocated_bytes: list[float] = []

    def place(self, nodes: Iterable[fx.Node]) -> None:
        """Place all of these nodes, in their order but for those that are moved."""
        nodes = list(nodes)
        deferred = []
        self.coming.extend(n for n in nodes if n not in self.early)
        for node in nodes:
            if node in self.early or (node in self.waits and not self._room(node)):
                deferred.append(node)
            else:
                self._with_needs(node)
        for node in deferred:
            if all(user.op == "output" for user in node.users):  # its result goes out of the graph
                self._with_needs(node)

    def _room(self, node: fx.Node) -> bool:
        """Whether there is room for what the node makes, after waiting for collectives that free
        some.
        """
        for issue in list(self.flying):
            if self._fits(node):
                return True
            waits = self.waits[issue]
            if any(self.left[self.liveness.root[n]] <= len(waits) for n in issue.all_input_nodes):
                for wait in waits:
                    self._with_needs(wait)
        while not self._fits(node) and (freeing := self._frees(node)):
            for freed_by in freeing:
                self._append(freed_by)
        return self._fits(node)

    def _frees(self, node: fx.Node) -> list[fx.Node]:
        """Return the next deferred op that frees more than it makes, after the views that it takes;
        an empty list where there is none.
        """
        while self.coming and self.coming[0] in self.placed:
            self.coming.popleft()
        for op in itertools.islice(self.coming, _WINDOW):
            if op in self.placed or op is node or op in self.waits:
                continue
            if not self.output_bytes[op] or keeps_place(op):
                continue
            nodes = list(dict.fromkeys(self._needs(op)))
            if any(self.output_bytes[n] or n in self.liveness.issues for n in nodes[:-1]):
                continue
            roots = {self.liveness.root[n] for each in nodes for n in each.all_input_nodes}
            unplaced_readers = {r: self.liveness.readers[r] - self.placed for r in roots}
            freed_bytes = sum(
                self.output_bytes[r]
                for r, readers in unplaced_readers.items()
                if readers <= {*nodes}
            )
            if freed_bytes > self.output_bytes[op]:
                return nodes
        return []

    def _needs(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the node after all that it needs and that is not placed."""
        for needed in node.all_input_nodes:
            if needed not in self.placed:
                yield from self._needs(needed)
        yield node

    def _fits(self, node: fx.Node) -> bool:
        """Whether the node can run now within the bound."""
        new_bytes = self.output_bytes[node] + self.liveness.staged(node)
        return self.now + self.staging.bytes + new_bytes <= self.bound

    def _with_needs(self, node: fx.Node) -> None:
        """Place the node after all that it needs."""
        if node in self.placed:
            return
        for needed in node.all_input_nodes:
            self._with_needs(needed)
        if self.output_bytes[node]:
            self._room(node)
        if node not in self.placed:  # _room may have placed it
            self._append(node)

    def _append(self, node: fx.Node) -> None:
        """Place the node, and update which bytes are live."""
        self.placed.add(node)
        self.order.append(node)
        self.now += self.output_bytes[node]
        self.staging.step(node)
        self.allocated_bytes.append(self.now + self.staging.bytes)
        if node in self.waits:
            self.flying[node] = None
        issue = self.liveness.issues.get(node)
        if issue is not None and self.placed.issuperset(self.waits[issue]):
            del self.flying[issue]
        for root in self._read(node, issue):
            self.left[root] -= 1
            if not self.left[root]:
                self.now -= self.output_bytes[root]
        if not self.liveness.readers[node]:
            self.now -= self.output_bytes[node]

    def _read(self, node: fx.Node, issue: fx.Node | None) -> set[fx.Node]:
        """Return the memory that a node reads; a wait also reads its collective's operands."""
        operands = [*node.all_input_nodes, *(issue.all_input_nodes if issue is not None else ())]
        return {self.liveness.root[n] for n in operands}


def _move_fetches_ahead(
    late: _LateOrder, scheduled: list[fx.Node], early: set[fx.Node]
) -> Iterator[fx.Node]:
    """Yield the order with fetches moved ahead again: as far as they were scheduled, and as there
    is room.
    """
    place = {node: number for number, node in enumerate(late.order)}
    allocated = np.array(late.allocated_bytes)
    scheduled_place = _anchors(scheduled, early, place)
    moved: dict[fx.Node, int] = {}
    before: dict[int, list[fx.Node]] = defaultdict(list)
    for node in late.order:
        if node not in early or collective_of(node) is None:
            continue
        nodes = list(dict.fromkeys(_unmoved_needs(node, early, moved)))
        needs = (moved.get(n, 0) for member in nodes for n in member.all_input_nodes)
        first, last = max([scheduled_place[node], *needs]), place[node]
        size = sum(late.output_bytes[member] + late.liveness.staged(member) for member in nodes)
        too_full = np.flatnonzero(allocated[first:last] + size > late.bound)
        start = first + int(too_full[-1]) + 1 if len(too_full) else first
        if start < last:
            allocated[start:last] += size
            nodes = [
                member for member in nodes if place[member] >= start
            ]  # the others stand before
            before[start] += nodes
            moved.update(dict.fromkeys(nodes, start))
    for number, node in enumerate(late.order):
        yield from before[number]
        if node not in moved:
            yield node


def _anchors(
    scheduled: list[fx.Node], early: set[fx.Node], place: dict[fx.Node, int]
) -> dict[fx.Node, int]:
    """Return, for each node of `early`, the place of the first other node that followed it in the
    schedule.
    """
    anchors, anchor = {}, len(place)
    for node in reversed(scheduled):
        if node in early:
            anchors[node] = anchor
        else:
            anchor = min(anchor, place[node])
    return anchors


def _unmoved_needs(
    node: fx.Node, early: set[fx.Node], moved: dict[fx.Node, int]
) -> Iterator[fx.Node]:
    """Yield the node after what it needs that has not been moved."""
    for needed in node.all_input_nodes:
        if needed in early and needed not in moved and needed.op != "placeholder":
            yield from _unmoved_needs(needed, early, moved)
    yield node
