"""The derived backward of a stage in two halves, as zero bubble schedules run it (arXiv
2401.10241).

    dx = mm(dy, w)         inputs: the gradients of what the stage received, for which the stage
                           before waits; it also returns what the other half takes
    dw = mm(t(dy), x)      weights: the rest, later

Every node is in one of the halves, so nothing is computed twice. What a node of the second half
takes of the first, or of what the forward saved, is carried over: dy and x of every product. An op
that gives both gradients at once, as a layer norm's backward does, is in the first half, and so are
cheap ops whose result is smaller than what they alone take: of a gated product its result is
carried, not both of its operands. The backward of a stage that received nothing is in the second
half as a whole.

A copy of a derived backward enters before it is scheduled, as it is or in one of the forms of
accumulation.py, and one of its halves leaves. runtime/deferred_backward.py asks.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar.cost.simulator.graph_events import collective_of, is_wait
from autopar.ir.graph import ancestors, copy_graph
from autopar.passes.overlap import erase_unused


class Halves(NamedTuple):
    """Where a backward is split: the names of the nodes of its `first` half, which gives the
    gradients of `places` among the results, and of the values that are `carried` to the rest.
    """

    places: frozenset[int]
    first: frozenset[str]
    carried: tuple[str, ...]


def split(backward: fx.Graph, places: Collection[int]) -> Halves:
    """Return the halves of a backward. `places`: of the gradients, among its results, that another
    stage waits for.
    """
    backward = copy_graph(backward)
    erase_unused(backward)
    (results,) = backward.output_node().args
    assert isinstance(results, tuple | list)
    wanted = [x for place, x in enumerate(results) if place in places and isinstance(x, fx.Node)]
    first = ancestors(wanted)
    for node in backward.nodes if first else ():
        # of an op with several results, each is taken where the op runs
        taken = node.target is operator.getitem and node.all_input_nodes[0] in first
        if taken or _shrinks(node, first):
            first.add(node)
    carried = []
    for node in backward.nodes:
        if node.op != "placeholder" and node not in first:
            continue
        taken = any(user.op != "output" and user not in first for user in node.users)
        gives = any(x is node and place not in places for place, x in enumerate(results))
        if taken or gives:
            carried.append(node.name)
    names = frozenset(node.name for node in first if node.op == "call_function")
    return Halves(frozenset(places), names, tuple(carried))


def input_gradients(backward: fx.Graph, halves: Halves) -> fx.Graph:
    """Return a copy that gives the gradients of the `places`, None for all others, and then the
    values that are carried over.
    """
    graph = copy_graph(backward)
    nodes = {node.name: node for node in graph.nodes}
    (results,) = graph.output_node().args
    assert isinstance(results, tuple | list)
    own = [x if place in halves.places else None for place, x in enumerate(results)]
    graph.output_node().args = ((*own, *(nodes[name] for name in halves.carried)),)
    erase_unused(graph)
    return graph


def weight_gradients(backward: fx.Graph, halves: Halves) -> fx.Graph:
    """Return a graph that takes what is carried over, and then the operands that a form of the
    backward has besides (`with_accumulated`), and gives the other gradients, None for those of the
    `places`.
    """
    graph, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    nodes = {node.name: node for node in backward.nodes}
    for number, name in enumerate(halves.carried):
        twins[nodes[name]] = graph.placeholder(f"carried_{number}")
    (results,) = backward.output_node().args
    assert isinstance(results, tuple | list)
    own = [None if place in halves.places else x for place, x in enumerate(results)]
    needed = ancestors([x for x in own if isinstance(x, fx.Node)], twins)
    for node in backward.nodes:
        more = node.op == "placeholder" and node.name.startswith("held_")
        if node not in twins and (more or node in needed):
            twins[node] = graph.node_copy(node, lambda n: twins[n])
    for node, twin in twins.items():
        twin.meta = dict(node.meta)
    for name in halves.carried:
        twins[nodes[name]].meta["carried"] = name
    output: Any = tuple(twins[x] if isinstance(x, fx.Node) else x for x in own)
    graph.output(output)
    graph.output_node().meta = dict(backward.output_node().meta)
    return graph


def _shrinks(node: fx.Node, first: Collection[fx.Node]) -> bool:
    """Whether a cheap op of what there is in the first half makes less than it alone would take, by
    itself or with the cheap op that alone takes its result, as the sum of a product does.
    """
    if node in first or not _is_cheap(node) or not _is_there(node.all_input_nodes, first):
        return False
    results = [node]
    if len(node.users) == 1:
        (user,) = node.users
        others = [n for n in user.all_input_nodes if n is not node]
        results += [user] if _is_cheap(user) and _is_there(others, first) else []
    inputs = node.all_input_nodes
    alone = (n for n in inputs if all(user is node or user in first for user in n.users))
    sizes = [n.meta["val"].nbytes for n in alone if isinstance(n.meta.get("val"), torch.Tensor)]
    return min(result.meta["val"].nbytes for result in results) < sum(sizes)


def _is_there(operands: Collection[fx.Node], first: Collection[fx.Node]) -> bool:
    return all(n in first or n.op == "placeholder" for n in operands)


def _is_cheap(node: fx.Node) -> bool:
    """Whether a node makes one tensor without a product and without a collective."""
    packet = getattr(node.target, "overloadpacket", None)
    makes_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    if node.op != "call_function" or packet is None or not makes_tensor:
        return False
    return packet not in flop_registry and collective_of(node) is None and not is_wait(node)
