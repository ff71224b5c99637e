"""bucket: small collectives of one kind, group and dtype joined into one, where that is modelled to
be faster.

Joined are sums of gradients, on which no product hangs any more, and gathers of what is stored; in
the order in which they are ready or needed, up to a size that the simulation chooses, none among
them. An all-reduce or an all-gather becomes its coalesced form; an all-to-all, which gloo's
reduce-scatters are, goes as one tensor. So does an all-gather on a CPU, as gloo's coalesced one
corrupts memory (`_compat.safe_gathers`). On more than two ranks an all-reduce may add in another
order within a bucket: that is the one thing here that changes bits.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..cost.derived import (
    Listed,
    Phase,
    collective_of,
    graph_events,
    graph_seconds,
    lead_to_products,
)
from ..cost.simulate import overlapped
from ..graphs import computed, copied, made, ordered
from ..world import World

aten, functional = torch.ops.aten, torch.ops._c10d_functional

_SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 23, 1 << 25)  # bytes of a bucket that are tried
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

    def seconds(candidate: fx.Graph) -> float:
        return graph_seconds(candidate, world, stored, phase)

    best, least = graph, seconds(graph)
    for size in (size for size in _SIZES if size <= most):
        found = joined(graph, world, stored, phase, size)
        if found is None:
            continue
        taken = seconds(found)
        if taken < least:
            best, least = found, taken
    return best


def joined(
    graph: fx.Graph, world: World, stored: frozenset[str], phase: Phase, size: int
) -> fx.Graph | None:
    """A copy of the graph with buckets of at most `size` bytes; None where there is nothing to
    join.
    """
    found = copied(graph)
    buckets = _buckets(graph_events(found, world, stored, phase), size)
    for members in buckets:
        _join(found, members)
    return found if buckets and ordered(found) else None


def _candidates(listed: Listed) -> dict[int, int]:
    """The collectives that may be joined, each with how many of them stand behind one another
    before it: on their results no product hangs, or they hang on nothing but what is stored.
    """
    leads = lead_to_products(listed)
    found: dict[int, int] = {}
    depth = [0] * len(listed.events)
    for index, (event, node) in enumerate(zip(listed.events, listed.nodes, strict=True)):
        before = [i for i in event.after if event.ahead or not leads[i]]
        depth[index] = max((depth[i] + (i in found) for i in before), default=0)
        last = event.phase == "backward" and not leads[index]
        if _joinable(node) and (event.ahead or last):
            found[index] = depth[index]
    return found


def _joinable(node: fx.Node) -> bool:
    """An all-to-all only where its result is summed at once, as its parts are not contiguous."""
    name = collective_of(node)
    if name == "all_to_all_single":
        users = [user for wait in node.users for user in wait.users]
        return bool(users) and all(u.target is aten.sum.dim_IntList for u in users)
    return name in _COALESCED


def _buckets(listed: Listed, size: int) -> list[list[fx.Node]]:
    run = overlapped(listed.events)
    users: dict[int, float] = defaultdict(lambda: float("inf"))
    for index, event in enumerate(listed.events):
        for needed in event.after:
            users[needed] = min(users[needed], run.start[index])

    def when(index: int) -> tuple[float, int]:
        event = listed.events[index]
        ready = max((run.end[i] for i in event.after), default=0.0)
        return (users[index] if event.ahead else ready), index

    open_: dict[Any, list[int]] = {}
    found: list[list[int]] = []
    candidates = _candidates(listed)
    for index in sorted(candidates, key=when):
        event, node = listed.events[index], listed.nodes[index]
        if event.held_bytes > size / 2:
            continue
        key = (collective_of(node), event.lane, event.ahead, _dtype(node), candidates[index])
        members = open_.get(key)
        held = sum(listed.events[i].held_bytes for i in members or ())
        if members is None or held + event.held_bytes > size:
            members = open_[key] = []
            found.append(members)
        members.append(index)
    return [[listed.nodes[i] for i in members] for members in found if len(members) > 1]


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
