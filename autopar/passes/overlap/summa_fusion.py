"""Sends the panels of SUMMA (ops/sharded/summa.py) once, and together where that is faster.

Matmuls that take the same X, such as those of q, k and v, broadcast the same panels of it: the
graph sends these once. The q broadcasts of one block over a group, one from each rank, are the same
as one all-gather of the block, and the q reduces of a gradient's parts, one to each rank, are one
reduce-scatter: the same bytes with one start instead of q. In exchange the matmul of panel t no
longer overlaps the broadcast of panel t + 1, and q panels are held instead of two; for q = 2 that
is as many.

Example, q = 2, two matmuls of x: `broadcast(x, 0)`, `broadcast(x, 1)`, and both again for the
second matmul, become `all_gather(x)`, whose rows both matmuls take. The simulation of the whole
graph chooses. A derived graph enters, and one whose collectives bucket.py can fuse further leaves.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autopar.cost.network import size
from autopar.cost.simulator.graph_events import (
    bytes_of,
    carries_on,
    collective_of,
    graph_events,
    graph_seconds,
    group_of,
    group_pattern,
    is_wait,
    off_path,
)
from autopar.cost.simulator.step_events import ROOTED
from autopar.ir.graph import add_call, copy_graph, sort
from autopar.passes.overlap import (
    DerivedGraph,
    GraphFacts,
    check_interface,
    collectives_in_order,
    concatenate,
    elements_sent,
    forget,
    on_cpu,
)
from autopar.world import World

aten, functional = torch.ops.aten, torch.ops._c10d_functional

_PANELS_AT_ONCE = 2  # panels of one operand that SUMMA holds at a time


def summa_fusion(derived: DerivedGraph, world: World) -> DerivedGraph:
    """Return the derived graph with its panels in the form that is modelled the fastest, in buckets
    of at most `freedom.bucket_bytes`; the same where it has no panels. The result is the same on
    every rank.
    """
    if not derived.freedom.bucket_bytes:
        return derived
    forms = [derived.graph, *panel_choices(derived, world)]
    if len(forms) == 1:
        return derived
    setting = world, derived.resident, derived.phase
    fastest = min(forms, key=lambda form: graph_seconds(form, *setting))
    return dataclasses.replace(derived, graph=fastest)


def check(before: GraphFacts, after: DerivedGraph) -> None:
    """The contract: there are no more collectives, and over no group more elements are sent. What
    is no panel is sent as it was.
    """
    check_interface(before, after.graph)
    count, elements = len(collectives_in_order(after.graph)), elements_sent(after.graph)
    assert count <= len(before.collectives), f"{count} collectives of {len(before.collectives)}"
    more = _by_group(elements) - _by_group(before.elements)
    assert not more, f"more is sent: {more}"
    less = [key for key in before.elements - elements if key[1] not in ROOTED]
    assert not less, f"less is sent: {less}"


def _by_group(elements: Counter[tuple[str, str]]) -> Counter[str]:
    """Return the elements that are sent over each group."""
    by_group: Counter[str] = Counter()
    for (group, _), count in elements.items():
        by_group[group] += count
    return by_group


def panel_choices(derived: DerivedGraph, world: World) -> Iterator[fx.Graph]:
    """Yield copies of the graph in which each panel is sent once: with every panel apart; with
    those fused that no matmul waits for; with all fused. A fused collective holds no more panels
    than SUMMA does, or is of at most `freedom.bucket_bytes`. Yields nothing where the graph has no
    panels or no choice sends fewer collectives.
    """
    graph, most = derived.graph, derived.freedom.bucket_bytes
    panels = {node for node in graph.nodes if collective_of(node) in ROOTED}
    if not panels:
        return
    listed = graph_events(graph, world, derived.resident, derived.phase)
    off_critical_path = panels & off_path(listed)
    fewest = _count_collectives(graph)
    for together in (set[fx.Node](), off_critical_path, panels):
        candidate = copy_graph(graph)
        twins = dict(zip(graph.nodes, candidate.nodes, strict=True))
        _send_once(candidate)
        for kind, write in _WRITERS.items():
            for members in _complete_sets(
                candidate, kind, {twins[node] for node in together}, most
            ):
                write(candidate, members)
        if _count_collectives(candidate) < fewest and sort(candidate):
            fewest = _count_collectives(candidate)
            yield candidate


def _count_collectives(graph: fx.Graph) -> int:
    """Return the number of collectives in a graph."""
    return sum(collective_of(node) is not None for node in graph.nodes)


# -- which panels are sent once, and which together ------------------------------------------------
def _send_once(graph: fx.Graph) -> None:
    """Let users of a broadcast take an earlier one of the same block from the same root."""
    first: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if collective_of(node) != "broadcast":
            continue
        earlier = first.setdefault((_view_key(node.all_input_nodes[0]), *node.args[1:]), node)
        if earlier is not node:
            (arrived,), (arrived_again,) = earlier.users, node.users
            arrived_again.replace_all_uses_with(arrived)
            forget(graph, node)


def _view_key(node: fx.Node) -> Hashable:
    """Return a key that is equal for nodes which view the same memory in the same way."""
    views = []
    while node.op == "call_function" and carries_on(node):
        views.append((node.target, str(node.args[1:]), str(node.kwargs)))
        node = node.all_input_nodes[0]
    return node, tuple(views)


def _complete_sets(
    graph: fx.Graph, kind: str, wanted: set[fx.Node], most: float
) -> list[list[fx.Node]]:
    """Return complete sets of panels, by root: the broadcasts of a block from all ranks of a group,
    or the reduces of a gradient to all of them.
    """
    panel_sets = _blocks(graph) if kind == "broadcast" else _gradients(graph)
    return [
        members
        for members in panel_sets
        if wanted.issuperset(members)
        and all(len(node.users) == 1 for node in members)
        and [_root(node) for node in members] == list(range(_ranks(members[0])))
        and (len(members) <= _PANELS_AT_ONCE or sum(map(bytes_of, members)) <= most)
    ]


def _root(node: fx.Node) -> int:
    """Return the rank from which, or to which, a panel is sent."""
    root = node.args[1]
    assert isinstance(root, int)
    return root


def _ranks(node: fx.Node) -> int:
    """Return the number of ranks in the group of a collective."""
    return size(group_pattern(group_of(node)))


def _blocks(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the broadcasts of each block over each group, by root."""
    by_block: dict[Hashable, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if collective_of(node) == "broadcast":
            by_block[_view_key(node.all_input_nodes[0]), group_of(node)].append(node)
    return [sorted(members, key=_root) for members in by_block.values()]


def _gradients(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the reduces of each gradient: a rank keeps the one result that is its own."""
    outermost = (
        node
        for node in graph.nodes
        if node.target is aten.where.self
        and not any(user.target is aten.where.self for user in node.users)
    )
    chains = [_selected_reduces(node) for node in outermost]
    return [chain for chain in chains if len(set(map(_gradient_key, chain))) == 1]


def _gradient_key(node: fx.Node) -> Hashable:
    """Return a key that the reduces of one gradient share, and no other nodes."""
    if collective_of(node) != "reduce":
        return node
    return group_of(node), node.meta["val"].shape


def _selected_reduces(node: fx.Node) -> list[fx.Node]:
    """Return the reduces [a, b, ...] among whose results `where(place == 1, wait(b), wait(a))`, or
    a longer chain, keeps one.
    """
    if node.target is aten.where.self:
        old, new = sides = _sides(node)
        if all(len(side.users) == 1 for side in sides):  # else something looks at one of them
            return [*_selected_reduces(old), *_selected_reduces(new)]
    return [node.all_input_nodes[0] if is_wait(node) else node]


def _sides(where: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return what a `where` gives where its condition does not hold, and where it does."""
    _, new, old = where.args
    assert isinstance(new, fx.Node) and isinstance(old, fx.Node)
    return old, new


# -- writing the fused collectives -----------------------------------------------------------------
def _gather(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """Replace broadcasts by one all-gather of the block, whose rows are the panels."""
    first = members[0]
    block = first.all_input_nodes[0]
    rows = block.meta["val"].shape[0]
    with graph.inserting_before(first):
        if not block.meta["val"].is_contiguous():
            options = {"memory_format": torch.contiguous_format}
            block = add_call(graph, aten.clone.default, (block,), options)
        arguments = (block, len(members), group_of(first))
        arrived = _send_and_wait(graph, functional.all_gather_into_tensor.default, arguments, first)
        panels = [
            add_call(graph, aten.slice.Tensor, (arrived, 0, t * rows, (t + 1) * rows))
            for t in range(len(members))
        ]
    for node, panel in zip(members, panels, strict=True):
        for result in list(node.users):
            result.replace_all_uses_with(panel)
        forget(graph, node)


def _scatter(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """Replace reduces by one reduce-scatter of all parts, of which a rank gets its own sum. On a
    CPU it is an all-to-all and a sum, as gloo's reduce-scatters are elsewhere.
    """
    last = members[-1]
    ranks, shape = len(members), list(last.meta["val"].shape)
    with graph.inserting_before(last):
        flat = concatenate(graph, [node.all_input_nodes[0] for node in members])
        if on_cpu(last):
            rows = add_call(graph, aten.view.default, (flat, [ranks, *shape]))
            arguments: tuple[Any, ...] = (rows, [1] * ranks, [1] * ranks, group_of(last))
            parts = _send_and_wait(graph, functional.all_to_all_single.default, arguments, last)
            own_sum = add_call(graph, aten.sum.dim_IntList, (parts, [0]))
        else:
            rows = add_call(graph, aten.view.default, (flat, [ranks * shape[0], *shape[1:]]))
            arguments = (rows, "sum", ranks, group_of(last))
            own_sum = _send_and_wait(
                graph, functional.reduce_scatter_tensor.default, arguments, last
            )
    _take_own(graph, members, own_sum)


def _take_own(graph: fx.Graph, members: Sequence[fx.Node], own: fx.Node) -> None:
    """Let users of the sum that a rank keeps take `own`, and erase the reduces."""
    (arrived,) = members[-1].users
    (selected,) = arrived.users
    selected.replace_all_uses_with(own)
    places: list[fx.Node] = []
    while selected.target is aten.where.self:
        places.append(selected.all_input_nodes[0])
        selected = _sides(selected)[0]
    for node in members:
        forget(graph, node)
    for place in places:
        if not place.users:
            graph.erase_node(place)


def _send_and_wait(
    graph: fx.Graph, target: Any, arguments: tuple[Any, ...], of: fx.Node
) -> fx.Node:
    """Send a collective and return the node that waits for it. `of` gives its origin for
    timelines.
    """
    sent = add_call(graph, target, arguments)
    sent.meta["custom"] = of.meta.get("custom", {})
    return add_call(graph, functional.wait_tensor.default, (sent,))


_WRITERS: dict[str, Callable[[fx.Graph, Sequence[fx.Node]], None]] = {
    "broadcast": _gather,
    "reduce": _scatter,
}
