"""The panels of SUMMA (ops/sharded/matmul.py) in a derived graph: sent once, and together where
that is faster (bucket.py decides).

Products that take the same X, as those of q, k and v do, send the same panels of it: the graph
sends them once. The q broadcasts of one block over a group, one from each rank, are one all-gather
of it, and the q reduces of a gradient's parts, one to each rank, are one reduce-scatter: the same
words and one start in place of q. What that costs is that product t no longer runs under panel
t + 1, and that q panels are held in place of two: for q = 2 as many.

Example, q = 2, two products of x: `broadcast(x, 0)`, `broadcast(x, 1)`, and both again for the
second product, become `all_gather(x)`, whose rows both products take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autopar.cost.network import size
from autopar.cost.simulator.graph_events import Phase, bytes_of, carries_on, collective_of, graph_events, group_of, group_pattern, is_wait, off_path
from autopar.cost.simulator.step_events import ROOTED
from autopar.ir.graph import computed, copied, ordered
from autopar.passes.overlap import fuse
from autopar.world import World

aten, functional = torch.ops.aten, torch.ops._c10d_functional

_HELD = 2  # panels of one operand, where they follow one another


def panel_choices(
    graph: fx.Graph, world: World, stored: frozenset[str], phase: Phase, most: float
) -> Iterator[fx.Graph]:
    """Copies of the graph in which each panel is sent once: all of them apart; those together that
    no product stands still for; all together. What goes together holds no more than panels do that
    follow one another, or is at most `most` bytes. None where there is nothing to change.
    """
    panels = {node for node in graph.nodes if collective_of(node) in ROOTED}
    if not panels:
        return
    early_or_late = panels & off_path(graph_events(graph, world, stored, phase))
    sent = _sent(graph)
    for together in (set[fx.Node](), early_or_late, panels):
        found = copied(graph)
        twins = dict(zip(graph.nodes, found.nodes, strict=True))
        _send_once(found)
        for kind, write in _WRITTEN.items():
            for members in _complete(found, kind, {twins[node] for node in together}, most):
                write(found, members)
        if _sent(found) < sent and ordered(found):
            sent = _sent(found)
            yield found


def _sent(graph: fx.Graph) -> int:
    return sum(collective_of(node) is not None for node in graph.nodes)


# -- what goes once, and what goes together --------------------------------------------------------
def _send_once(graph: fx.Graph) -> None:
    """Let what waits for a broadcast take an earlier one of the same block from the same root."""
    first: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if collective_of(node) != "broadcast":
            continue
        other = first.setdefault((_shown(node.all_input_nodes[0]), *node.args[1:]), node)
        if other is not node:
            (arrived,), (arrived_again,) = other.users, node.users
            arrived_again.replace_all_uses_with(arrived)
            fuse.forget(graph, node)


def _shown(node: fx.Node) -> Hashable:
    """What two nodes have in common that show the same: the memory, and by which views."""
    views = []
    while node.op == "call_function" and carries_on(node):
        views.append((node.target, str(node.args[1:]), str(node.kwargs)))
        node = node.all_input_nodes[0]
    return node, tuple(views)


def _complete(graph: fx.Graph, kind: str, wanted: set[fx.Node], most: float) -> list[list[fx.Node]]:
    """The broadcasts of each block from all ranks of a group, or the reduces of each gradient to
    all of them, by root.
    """
    found = _blocks(graph) if kind == "broadcast" else _gradients(graph)
    return [
        members
        for members in found
        if wanted.issuperset(members)
        and all(len(node.users) == 1 for node in members)
        and [_root(node) for node in members] == list(range(_ranks(members[0])))
        and (len(members) <= _HELD or sum(map(bytes_of, members)) <= most)
    ]


def _root(node: fx.Node) -> int:
    root = node.args[1]
    assert isinstance(root, int)
    return root


def _ranks(node: fx.Node) -> int:
    return size(group_pattern(group_of(node)))


def _blocks(graph: fx.Graph) -> list[list[fx.Node]]:
    """The broadcasts of each block over each group."""
    found: dict[Hashable, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if collective_of(node) == "broadcast":
            found[_shown(node.all_input_nodes[0]), group_of(node)].append(node)
    return [sorted(members, key=_root) for members in found.values()]


def _gradients(graph: fx.Graph) -> list[list[fx.Node]]:
    """The reduces among whose results a rank keeps the one that is its own."""
    outermost = (
        node
        for node in graph.nodes
        if node.target is aten.where.self
        and not any(user.target is aten.where.self for user in node.users)
    )
    chains = [_kept_of(node) for node in outermost]
    return [chain for chain in chains if len(set(map(_what, chain))) == 1]


def _what(node: fx.Node) -> Hashable:
    """What reduces of one gradient have in common; other nodes have it with none."""
    if collective_of(node) != "reduce":
        return node
    return group_of(node), node.meta["val"].shape


def _kept_of(node: fx.Node) -> list[fx.Node]:
    """What `where(place == 1, wait(b), wait(a))` and longer chains keep one of: a, b, ..."""
    if node.target is aten.where.self:
        old, new = sides = _sides(node)
        if all(len(side.users) == 1 for side in sides):  # else something looks at one of them
            return [*_kept_of(old), *_kept_of(new)]
    return [node.all_input_nodes[0] if is_wait(node) else node]


def _sides(where: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What a `where` gives where its condition does not hold, and where it does."""
    _, new, old = where.args
    assert isinstance(new, fx.Node) and isinstance(old, fx.Node)
    return old, new


# -- how it is written -----------------------------------------------------------------------------
def _gather(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """One all-gather of the block, whose rows are the panels."""
    first = members[0]
    block = first.all_input_nodes[0]
    rows = block.meta["val"].shape[0]
    with graph.inserting_before(first):
        if not block.meta["val"].is_contiguous():
            more = {"memory_format": torch.contiguous_format}
            block = computed(graph, aten.clone.default, (block,), more)
        arguments = (block, len(members), group_of(first))
        arrived = _arrived(graph, functional.all_gather_into_tensor.default, arguments, first)
        panels = [
            computed(graph, aten.slice.Tensor, (arrived, 0, t * rows, (t + 1) * rows))
            for t in range(len(members))
        ]
    for node, panel in zip(members, panels, strict=True):
        for result in list(node.users):
            result.replace_all_uses_with(panel)
        fuse.forget(graph, node)


def _scatter(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """One reduce-scatter of all parts, of which a rank gets its own sum; on a CPU an all-to-all and
    a sum, as in wire.py.
    """
    last = members[-1]
    ranks, shape = len(members), list(last.meta["val"].shape)
    with graph.inserting_before(last):
        one = fuse.in_one(graph, [node.all_input_nodes[0] for node in members])
        if fuse.on_cpu(last):
            rows = computed(graph, aten.view.default, (one, [ranks, *shape]))
            arguments: tuple[Any, ...] = (rows, [1] * ranks, [1] * ranks, group_of(last))
            parts = _arrived(graph, functional.all_to_all_single.default, arguments, last)
            own = computed(graph, aten.sum.dim_IntList, (parts, [0]))
        else:
            rows = computed(graph, aten.view.default, (one, [ranks * shape[0], *shape[1:]]))
            arguments = (rows, "sum", ranks, group_of(last))
            own = _arrived(graph, functional.reduce_scatter_tensor.default, arguments, last)
    _keep(graph, members, own)


def _keep(graph: fx.Graph, members: Sequence[fx.Node], own: fx.Node) -> None:
    """Let what takes the sum that a rank keeps take `own`."""
    (arrived,) = members[-1].users
    (chosen,) = arrived.users
    chosen.replace_all_uses_with(own)
    places: list[fx.Node] = []
    while chosen.target is aten.where.self:
        places.append(chosen.all_input_nodes[0])
        chosen = _sides(chosen)[0]
    for node in members:
        fuse.forget(graph, node)
    for place in places:
        if not place.users:
            graph.erase_node(place)


def _arrived(graph: fx.Graph, target: Any, arguments: tuple[Any, ...], of: fx.Node) -> fx.Node:
    sent = computed(graph, target, arguments)
    sent.meta["custom"] = of.meta.get("custom", {})
    return computed(graph, functional.wait_tensor.default, (sent,))


_WRITTEN: dict[str, Callable[[fx.Graph, Sequence[fx.Node]], None]] = {
    "broadcast": _gather,
    "reduce": _scatter,
}
