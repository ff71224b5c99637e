"""Liveness: the most bytes that a derived graph holds at once when its nodes run in their order.

A graph that AOTAutograd derived and a `StepMemory` enter `graph_peak_bytes`, bytes leave.
passes/overlap/schedule.py asks it whether an order fits the limit, runtime/backends.py passes the
saved values of a forward on to its backward (`saved_by`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from autopar._compat import OpOverload
from autopar.cost.simulator.graph_events import (
    KINDS,
    bytes_of,
    carries_on,
    collective_of,
    group_of,
    is_wait,
    writes,
)

_STAGED = 2  # gathers that gloo works on at once: the threads of a group


class SavedMemory(NamedTuple):
    """The storage that a saved value shows: the forward's node that made it, and its bytes; 0 bytes
    where it is one of the forward's own inputs, which are counted anyway.
    """

    producer: str
    bytes: float


class StepMemory(NamedTuple):
    """The memory around a derived graph: `primals`, the bytes of all inputs of the forward;
    `saved`, for a backward, the storage that each saved value shows (`saved_by`); `staged`, whether
    the backend holds a second copy of the result of the gathers that it works on, as gloo does.
    """

    primals: float
    saved: Mapping[str, SavedMemory]
    staged: bool = False


def saved_by(forward: fx.Graph) -> dict[str, SavedMemory]:
    """Return the storage of every output of the forward, by the name under which its backward may
    take it.
    """
    roots = _roots(forward, {})
    return {
        node.name: SavedMemory(root.name, 0.0 if _is_primal(root) else float(bytes_of(root)))
        for node in forward.output_node().all_input_nodes
        for root in [roots[node]]
    }


class Liveness:
    """Which storage each node of a graph shows, how large it is, and which nodes read it: the last
    reader ends it. A collective's operands are read by its wait too, outputs by the graph's output
    node.

    Views share the storage that they show, saved values of a backward that which they showed in the
    forward.
    """

    def __init__(self, graph: fx.Graph, step: StepMemory) -> None:
        self.step = step
        self.root = _roots(graph, step.saved)
        self.readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        self.issues: dict[fx.Node, fx.Node] = {}  # by wait
        for node in graph.nodes:
            for operand in node.all_input_nodes:
                self.readers[self.root[operand]].add(node)
            collective = _issued_collective(node) if is_wait(node) else None
            if collective is not None:
                self.issues[node] = collective
                for operand in collective.all_input_nodes:
                    self.readers[self.root[operand]].add(node)

    def new_bytes(self, node: fx.Node) -> float:
        """Return the bytes that are there from this node on and were not before."""
        if self.root[node] is not node or _is_primal(node):
            return 0.0
        saved = self.step.saved.get(node.name) if node.op == "placeholder" else None
        return float(bytes_of(node)) if saved is None else saved.bytes

    def staged(self, node: fx.Node) -> float:
        """Return the bytes that the backend holds in addition while it works on a collective."""
        kind = collective_of(node) if self.step.staged else None
        return float(bytes_of(node)) if kind and KINDS[kind] == "all_gather" else 0.0


class Staging:
    """The bytes that the backend holds for the collectives under way, as they are issued and waited
    for.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.in_flight: dict[str, dict[fx.Node, float]] = defaultdict(dict)  # by group

    def step(self, node: fx.Node) -> None:
        """Note that the node is issued, or that it is a wait."""
        if size := self.liveness.staged(node):
            self.in_flight[group_of(node)][node] = size
        issue = self.liveness.issues.get(node)
        if issue is not None:
            self.in_flight[group_of(issue)].pop(issue, None)

    @property
    def bytes(self) -> float:
        groups = self.in_flight.values()
        return sum(sum(sorted(sizes.values())[-_STAGED:]) for sizes in groups)


def graph_peak_bytes(graph: fx.Graph, step: StepMemory) -> float:
    """Return the bytes of the graph at its peak.

    The inputs of the forward are there throughout; a tensor lives until its last use, a saved value
    until its last use in the backward, an output to the end; the operands of a collective live
    until it is waited for.
    """
    lives = Liveness(graph, step)
    staging = Staging(lives)
    place = {node: number for number, node in enumerate(graph.nodes)}
    freed: dict[int, float] = defaultdict(float)
    current = peak = step.primals
    for node, number in place.items():
        allocated = lives.new_bytes(node)
        current += allocated
        freed[max((place[n] for n in lives.readers[node]), default=number)] += allocated
        if node.op == "placeholder":
            continue  # placeholders are all there before anything runs
        staging.step(node)
        peak = max(peak, current + staging.bytes)
        current -= freed[number]
    return max(peak, current)


def _roots(graph: fx.Graph, saved: Mapping[str, SavedMemory]) -> dict[fx.Node, fx.Node]:
    """Return for every node the one that made the storage that it shows, or the first placeholder
    that shows it.
    """
    roots: dict[fx.Node, fx.Node] = {}
    first_views: dict[str, fx.Node] = {}
    for node in graph.nodes:
        source = _view_source(node) if node.op == "call_function" else None
        roots[node] = node if source is None else roots[source]
        if node.op == "placeholder" and node.name in saved:
            roots[node] = first_views.setdefault(saved[node.name].producer, node)
    return roots


def _view_source(node: fx.Node) -> fx.Node | None:
    """Return what a node is a view of, waits for, or writes its result into; None for a new
    storage.
    """
    inputs = node.all_input_nodes
    if inputs and carries_on(node):
        return inputs[0]
    if not writes(node):
        return None
    assert isinstance(node.target, OpOverload)
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operand = node.args[place] if place < len(node.args) else node.kwargs[argument.name]
            return operand if isinstance(operand, fx.Node) else None
    return None


def _issued_collective(wait: fx.Node) -> fx.Node | None:
    """Return the collective that a wait waits for."""
    node = wait.all_input_nodes[0]
    while collective_of(node) is None and node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node if collective_of(node) is not None else None


def _is_primal(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("primals")
