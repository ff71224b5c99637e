"""bucket: small collectives of one kind, group and dtype joined into one, where that is modelled to
be faster.

What is joined is said in cost/buckets.py; up to a size that the simulation chooses, none among
them. An all-reduce or an all-gather becomes its coalesced form; an all-to-all, which gloo's
reduce-scatters are, goes as one tensor. So does an all-gather on a CPU, as gloo's coalesced one
corrupts memory (`_compat.safe_gathers`). On more than two ranks an all-reduce may add in another
order within a bucket: that is the one thing here that changes bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..cost import buckets
from ..cost.derived import (
    Listed,
    Phase,
    collective_of,
    graph_events,
    graph_seconds,
    lead_to_products,
    listed_seconds,
)
from ..cost.simulate import overlapped
from ..graphs import computed, copied, made, ordered
from ..world import World

aten, functional = torch.ops.aten, torch.ops._c10d_functional

_COALESCED = {
    "all_reduce": functional.all_reduce_coalesced.default,
    "all_gather_into_tensor": functional.all_gather_into_tensor_coalesced.default,
}


def bucket(
    graph: fx.Graph,
    world: World,
    stored: frozenset[str],
    phase: Phase,
    most: float = math.inf,
) -> fx.Graph:
    """The graph with the buckets of the size that is modelled to be the fastest, of at most `most`
    bytes; the graph itself where none is. The same on every rank.
    """
    sizes = [size for size in buckets.SIZES if size <= most]
    if not sizes:
        return graph
    listed = graph_events(graph, world, stored, phase)
    best, least = graph, listed_seconds(listed, world)
    for several in choices(listed, sizes):
        found = joined(graph, several)
        if found is None:
            continue
        taken = graph_seconds(found, world, stored, phase)
        if taken < least:
            best, least = found, taken
    return best


def joined(graph: fx.Graph, several: Sequence[Sequence[fx.Node]]) -> fx.Graph | None:
    """A copy of the graph with each bucket as one; None where buckets wait for one another."""
    found = copied(graph)
    twins = dict(zip(graph.nodes, found.nodes, strict=True))
    for members in several:
        _join(found, [twins[node] for node in members])
    return found if ordered(found) else None


def _joinable(node: fx.Node) -> bool:
    """An all-to-all only where its result is summed at once, as its parts are not contiguous."""
    name = collective_of(node)
    if name == "all_to_all_single":
        users = [user for wait in node.users for user in wait.users]
        return bool(users) and all(u.target is aten.sum.dim_IntList for u in users)
    return name in _COALESCED


def choices(listed: Listed, sizes: Sequence[int]) -> Iterator[list[list[fx.Node]]]:
    """What is joined into buckets of at most each of these bytes, the same buckets once."""
    keys = [_key(node) for node in listed.nodes]
    run, leads = overlapped(listed.events), lead_to_products(listed)
    known: list[list[buckets.Bucket]] = [[]]
    for size in sizes:
        found = buckets.together(listed.events, keys, leads, run, size)
        if found not in known:
            known.append(found)
            yield [[listed.nodes[i] for i in members] for members in found]


def _key(node: fx.Node) -> Hashable:
    """What collectives share that are joined; None for those that are not, and for ops."""
    return (collective_of(node), _dtype(node)) if _joinable(node) else None


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value.dtype


# -- rewriting -------------------------------------------------------------------------------------
def _join(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """Replace collectives by one; where it stands is mended by `graphs.ordered`."""
    name = collective_of(members[0])
    how = _coalesced if name in _COALESCED else _exchanged
    if name == "all_gather_into_tensor" and members[0].meta["val"].device.type == "cpu":
        how = _gathered
    with graph.inserting_after(members[-1]):
        parts = how(graph, members)
    for node, part in zip(members, parts, strict=True):
        part.meta["custom"] = node.meta.get("custom", {})
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _origins(members: Sequence[fx.Node]) -> dict[str, str]:
    """Where a joint collective comes from, for timelines: the first of its members and the rest."""
    found = members[0].meta.get("custom", {})
    names = f"{found.get('node', members[0].name)} and {len(members) - 1} more"
    return {"node": names, "module": found.get("module", "")}


def _coalesced(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    target = _COALESCED[str(collective_of(members[0]))]
    values = [node.meta["val"] for node in members]
    arguments = ([node.args[0] for node in members], *members[0].args[1:])
    one = made(graph, target, arguments, values)
    one.meta["custom"] = _origins(members)
    return [made(graph, operator.getitem, (one, i), v) for i, v in enumerate(values)]


def _exchanged(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    """One all-to-all of all, side by side. Each is (ranks, ...), a slice for each rank; the waits
    that stand behind the members go.
    """
    inputs = [node.all_input_nodes[0] for node in members]
    ranks = inputs[0].meta["val"].shape[0]
    flat = [computed(graph, aten.reshape.default, (n, [ranks, -1])) for n in inputs]
    arrived = _sent(graph, members, computed(graph, aten.cat.default, (flat, 1)))
    found, start = [], 0
    for node, own in zip(members, flat, strict=True):
        width = own.meta["val"].shape[1]
        part = computed(graph, aten.slice.Tensor, (arrived, 1, start, start + width))
        found.append(computed(graph, aten.reshape.default, (part, list(node.meta["val"].shape))))
        start += width
    return found


def _gathered(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    """One all-gather of all, side by side; the waits that stand behind the members go. What arrives
    is a row for each rank; the parts are copied out of it, so that it can be let go of.
    """
    flat = [computed(graph, aten.reshape.default, (n.args[0], [-1])) for n in members]
    arrived = _sent(graph, members, computed(graph, aten.cat.default, (flat,)))
    rows = computed(graph, aten.view.default, (arrived, [members[0].args[1], -1]))
    contiguous = {"memory_format": torch.contiguous_format}
    found, start = [], 0
    for node, own in zip(members, flat, strict=True):
        width = own.meta["val"].numel()
        shown = computed(graph, aten.slice.Tensor, (rows, 1, start, start + width))
        part = computed(graph, aten.clone.default, (shown,), contiguous)
        found.append(computed(graph, aten.view.default, (part, list(node.meta["val"].shape))))
        start += width
    return found


def _sent(graph: fx.Graph, members: Sequence[fx.Node], side: fx.Node) -> fx.Node:
    """What arrives of a collective that sends `side` in place of what the members send, whose waits
    go.
    """
    target: Any = members[0].target
    sent = computed(graph, target, (side, *members[0].args[1:]))
    sent.meta["custom"] = _origins(members)
    for node in members:
        for wait in list(node.users):
            wait.replace_all_uses_with(node)
            graph.erase_node(wait)
    return computed(graph, functional.wait_tensor.default, (sent,))
