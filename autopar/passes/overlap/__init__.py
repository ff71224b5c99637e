"""Passes over the forward and the backward graph that AOTAutograd derives from an emitted program.

They change when a collective is sent, together with which others, and where results are written,
not what is computed. Each takes a `DerivedGraph` and a `World` and returns the derived graph that
takes its place; its contract compares that graph with the `GraphFacts` of the one before.
passes/__init__.py lists the passes (`OVERLAP`) and runs them. Here is what they share.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.cost.simulator.engine import Run
from autopar.cost.simulator.graph_events import (
    KINDS,
    Phase,
    carries_on,
    collective_of,
    group_of,
    is_wait,
    writes,
)
from autopar.cost.simulator.liveness import StepMemory, graph_peak_bytes
from autopar.ir.graph import add_call

aten = torch.ops.aten


class Freedom(NamedTuple):
    """How far an op may move from its place in the graph, and how much may be fused.

    `ahead`: how much may be fetched before its use, in multiples of the largest fetch. `window`:
    how many events are considered past the first that is not done. `patience`: how long after its
    modelled end a collective may be left alone while there is something to compute, in multiples of
    the mean interval between two collectives; these are tried in order. `bucket_bytes`: the largest
    bucket.
    """

    ahead: int = 4
    window: int = 256
    patience: tuple[float, ...] = (2.0, 1.0)
    bucket_bytes: float = math.inf


_NOTHING_AROUND, _USUAL = StepMemory(0.0, {}), Freedom()


@dataclass(frozen=True)
class DerivedGraph:
    """A forward or a backward graph, and what the passes need to know about it.

    `resident`: the placeholders that are there before the graph runs, so that what is gathered of
    them may be fetched at any time. `step`, `bound`: the memory around the graph, and the bytes
    that it may hold. `compiler`: what compiles the graph; "" where it runs as it is, and ops may
    write in place. `freedom`: how far the schedule may go from the graph's own order. `room`: the
    bytes that are left within the bound. `run`: the simulated run, once the graph is scheduled.
    """

    graph: fx.Graph
    phase: Phase
    resident: frozenset[str] = frozenset()
    step: StepMemory = _NOTHING_AROUND
    bound: float = math.inf
    compiler: str = ""
    freedom: Freedom = _USUAL
    room: float = math.inf
    run: Run | None = None

    @property
    def peak_bytes(self) -> float:
        """The bytes that the graph holds at its peak, in the order in which its nodes are."""
        return graph_peak_bytes(self.graph, self.step)


# -- contracts -------------------------------------------------------------------------------------
class GraphFacts(NamedTuple):
    """What a contract asks about the graph that a pass was given: its nodes, the shape and dtype of
    every output, its collectives in order, and the elements that they send, by group and kind.
    """

    nodes: frozenset[fx.Node]
    outputs: list[tuple[Any, Any]]
    collectives: list[str]
    elements: Counter[tuple[str, str]]


def facts_of(graph: fx.Graph) -> GraphFacts:
    """Return what contracts ask about a graph."""
    nodes = frozenset(graph.nodes)
    return GraphFacts(nodes, _outputs(graph), collectives_in_order(graph), elements_sent(graph))


def check_interface(before: GraphFacts, graph: fx.Graph) -> None:
    """The contract of every pass: each node stands behind its operands, the outputs have the shapes
    and dtypes that they had, and every collective is waited for.
    """
    graph.lint()
    assert _outputs(graph) == before.outputs, "what goes out has another shape"
    for node in graph.nodes:
        if collective_of(node) is not None:
            waited = any(is_wait(user) for user in _users(node))
            assert waited or not node.users, f"nothing waits for {node.name}"


def collectives_in_order(graph: fx.Graph) -> list[str]:
    """Return a line for each collective, as issued: the ranks of a group must agree on them."""
    return [
        f"{group_of(node)} {collective_of(node)} "
        + " ".join(str(tuple(n.meta["val"].shape)) for n in _operands(node.args))
        for node in graph.nodes
        if collective_of(node) is not None
    ]


def elements_sent(graph: fx.Graph) -> Counter[tuple[str, str]]:
    """Return how many elements the collectives of a graph take, by group and kind."""
    elements: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        name = collective_of(node)
        if name is not None:
            taken = (operand.meta["val"].numel() for operand in _operands(node.args[0]))
            elements[group_of(node), KINDS[name]] += sum(taken)
    return elements


def _outputs(graph: fx.Graph) -> list[tuple[Any, Any]]:
    """Return the shape and dtype of every output, None for what is no tensor."""
    values = (node.meta.get("val") for node in _operands(graph.output_node().args))
    return [(getattr(value, "shape", None), getattr(value, "dtype", None)) for value in values]


def _operands(arguments: Any) -> list[fx.Node]:
    """Return the nodes among these arguments, one that is there twice both times."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(arguments, lambda node: nodes.append(node))
    return nodes


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a collective's results."""
    for user in node.users:
        yield user
        if user.target is operator.getitem:
            yield from user.users


# -- writing collectives ---------------------------------------------------------------------------
def on_cpu(node: fx.Node) -> bool:
    """Whether the result of a collective is on a CPU, where gloo carries it."""
    return bool(node.meta["val"].device.type == "cpu")


def concatenate(graph: fx.Graph, tensors: Sequence[fx.Node]) -> fx.Node:
    """Return the tensors concatenated (n,). Where they are consecutive views of one tensor, that
    tensor, or a slice of it, is returned instead of a copy.
    """
    slices = [cut_of(x) for x in tensors]
    start, source = 0, slices[0][0] if slices[0] else None
    for cut in slices:
        if source is None or cut is None or cut[:2] != (source, start):
            flat = [add_call(graph, aten.reshape.default, (x, [-1])) for x in tensors]
            return add_call(graph, aten.cat.default, (flat,))
        start = cut[2]
    assert source is not None
    is_all = start == source.meta["val"].numel()
    return source if is_all else add_call(graph, aten.slice.Tensor, (source, 0, 0, start))


def cut_of(part: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return (tensor, start, stop) where this part is a view of a slice of a tensor (n,); None for
    other nodes.
    """
    node = part
    while node.target in (aten.view.default, aten.reshape.default):
        node = node.all_input_nodes[0]
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return None
    source, dim, start, stop = node.args
    assert isinstance(source, fx.Node) and isinstance(start, int) and isinstance(stop, int)
    return (source, start, stop) if dim == 0 and source.meta["val"].dim() == 1 else None


def forget(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a collective with its users, which nothing uses any more, and the views that only it
    took.
    """
    doomed, operands = [node], node.all_input_nodes
    for dead in doomed:
        doomed += [user for user in dead.users if user not in doomed]
    for dead in reversed(doomed):
        graph.erase_node(dead)
    for operand in operands:
        while not operand.users and operand.op == "call_function" and carries_on(operand):
            unused, operand = operand, operand.all_input_nodes[0]
            graph.erase_node(unused)


def erase_unused(graph: fx.Graph) -> None:
    """Erase the nodes that nothing uses. torch keeps those that may draw random numbers, and so
    would run a recomputed attention in the backward for nothing.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not writes(node):
            graph.erase_node(node)
