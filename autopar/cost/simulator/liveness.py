"""The most bytes that a derived graph holds at once when its nodes run in their order."""

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

_STAGED = 2  # gathers at once: the threads of a group


class SavedMemory(NamedTuple):
    """A memory that a saved value shows: what made it in the forward, and its bytes; none where it
    is one of the forward's own inputs, which are counted anyway.
    """

    made_by: str
    bytes: float


class StepMemory(NamedTuple):
    """What the bytes of a derived graph depend on besides itself: those of all that the forward was
    given; of a backward, which memory each saved value shows (`saved_by`); and whether the
    transport holds a second whole result of the gathers that it works on, as gloo does.
    """

    primals: float
    saved: Mapping[str, SavedMemory]
    staged: bool = False


def saved_by(forward: fx.Graph) -> dict[str, SavedMemory]:
    """What the forward gives out, and so what its backward may be given under the same names."""
    roots = _roots(forward, {})
    return {
        node.name: SavedMemory(root.name, 0.0 if _is_primal(root) else float(bytes_of(root)))
        for node in forward.output_node().all_input_nodes
        for root in [roots[node]]
    }


class Lives:
    """Which memory each node of a graph shows, how large it is, and who reads it: its last reader
    ends it. Of a collective's operands the wait is a reader, of what goes out the graph itself.

    Views share what they show, saved values of a backward what they showed in the forward.
    """

    def __init__(self, graph: fx.Graph, step: StepMemory) -> None:
        self.step = step
        self.root = _roots(graph, step.saved)
        self.readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        self.issues: dict[fx.Node, fx.Node] = {}  # by wait
        for node in graph.nodes:
            for taken in node.all_input_nodes:
                self.readers[self.root[taken]].add(node)
            issued = _issue(node) if is_wait(node) else None
            if issued is not None:
                self.issues[node] = issued
                for taken in issued.all_input_nodes:
                    self.readers[self.root[taken]].add(node)

    def bytes_made(self, node: fx.Node) -> float:
        """What is there from this node on that was not before."""
        if self.root[node] is not node or _is_primal(node):
            return 0.0
        known = self.step.saved.get(node.name) if node.op == "placeholder" else None
        return float(bytes_of(node)) if known is None else known.bytes

    def staged(self, node: fx.Node) -> float:
        """What the transport holds besides while it works on a collective."""
        kind = collective_of(node) if self.step.staged else None
        return float(bytes_of(node)) if kind and KINDS[kind] == "all_gather" else 0.0


class Staging:
    """What the transport holds of the collectives under way, as they are issued and waited for."""

    def __init__(self, lives: Lives) -> None:
        self.lives = lives
        self.under_way: dict[str, dict[fx.Node, float]] = defaultdict(dict)  # by group

    def step(self, node: fx.Node) -> None:
        """The node is issued, or is a wait."""
        if size := self.lives.staged(node):
            self.under_way[group_of(node)][node] = size
        issue = self.lives.issues.get(node)
        if issue is not None:
            self.under_way[group_of(issue)].pop(issue, None)

    @property
    def bytes(self) -> float:
        groups = self.under_way.values()
        return sum(sum(sorted(sizes.values())[-_STAGED:]) for sizes in groups)


def live_bytes(graph: fx.Graph, step: StepMemory) -> float:
    """At the peak. What the forward was given is there throughout; what is made lives until its
    last use, a saved value until its last use in the backward, what goes out to the end; the
    operands of a collective until it is waited for.
    """
    lives = Lives(graph, step)
    staging = Staging(lives)
    place = {node: number for number, node in enumerate(graph.nodes)}
    freed: dict[int, float] = defaultdict(float)
    now = most = step.primals
    for node, number in place.items():
        made = lives.bytes_made(node)
        now += made
        freed[max((place[n] for n in lives.readers[node]), default=number)] += made
        if node.op == "placeholder":
            continue  # all are there before anything runs
        staging.step(node)
        most = max(most, now + staging.bytes)
        now -= freed[number]
    return max(most, now)


def _roots(graph: fx.Graph, saved: Mapping[str, SavedMemory]) -> dict[fx.Node, fx.Node]:
    """By node the one that made the memory that it shows, or the first that was given with it."""
    found: dict[fx.Node, fx.Node] = {}
    given: dict[str, fx.Node] = {}
    for node in graph.nodes:
        shown = _shown(node) if node.op == "call_function" else None
        found[node] = node if shown is None else found[shown]
        if node.op == "placeholder" and node.name in saved:
            found[node] = given.setdefault(saved[node.name].made_by, node)
    return found


def _shown(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, waits for, or writes its result into; None for a new memory."""
    inputs = node.all_input_nodes
    if inputs and carries_on(node):
        return inputs[0]
    if not writes(node):
        return None
    assert isinstance(node.target, OpOverload)
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs[argument.name]
            return given if isinstance(given, fx.Node) else None
    return None


def _issue(wait: fx.Node) -> fx.Node | None:
    """The collective that a wait waits for."""
    node = wait.all_input_nodes[0]
    while collective_of(node) is None and node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node if collective_of(node) is not None else None


def _is_primal(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("primals")
