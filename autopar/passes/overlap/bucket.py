"""Fuses small collectives of one kind, group and dtype into buckets where that is modelled faster.

cost/simulator/buckets.py says which collectives go together, and the simulation of the whole graph
chooses the bucket size, or no buckets. On more than two ranks a sum may add in another order within
a bucket: nothing else here changes bits.

On a CPU the members of a bucket are sent as one tensor: gloo copies what is coalesced into one and
out again, and its coalesced gathers corrupt memory (`_compat.safe_gathers`). Elsewhere they take
torch's coalesced form, where there is one; broadcasts and reduces, from and to one root, are sent
as one tensor everywhere. The results are views of what arrives, and the next fused collective takes
that tensor itself where it would take all of these views: so a hierarchical sum (scatters, sums of
the parts, gathers) copies its bucket together once and nothing after that.

A derived graph enters and one with buckets leaves. cli/doctor/exchanges.py checks the fused forms.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.cost.simulator import buckets
from autopar.cost.simulator.engine import simulate_overlap
from autopar.cost.simulator.graph_events import (
    Listed,
    carries_on,
    collective_of,
    graph_events,
    graph_seconds,
    group_of,
    is_wait,
    lead_to_matmuls,
    listed_seconds,
)
from autopar.cost.simulator.step_events import ROOTED
from autopar.ir.graph import add_call, add_node, copy_graph, sort
from autopar.passes.overlap import (
    DerivedGraph,
    GraphFacts,
    check_interface,
    collectives_in_order,
    concatenate,
    cut_of,
    elements_sent,
    forget,
    on_cpu,
)
from autopar.world import World

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def bucket(derived: DerivedGraph, world: World) -> DerivedGraph:
    """Return the derived graph with buckets of the size that is modelled to be the fastest, of at
    most `freedom.bucket_bytes`; the same where none is faster. The result is the same on every
    rank.
    """
    most = derived.freedom.bucket_bytes
    if not most:
        return derived
    sizes = [size for size in buckets.SIZES if size <= most] or [int(most)]
    graph, setting = derived.graph, (world, derived.resident, derived.phase)
    listed = graph_events(graph, *setting)
    best, least = graph, listed_seconds(listed, world)
    for groups in choices(listed, sizes):
        candidate = fuse_buckets(graph, groups)
        if candidate is None:
            continue
        seconds = graph_seconds(candidate, *setting)
        if seconds < least:
            best, least = candidate, seconds
    return dataclasses.replace(derived, graph=best)


def check(before: GraphFacts, after: DerivedGraph) -> None:
    """The contract: each kind of collective sends the same elements over each group, with no more
    collectives.
    """
    check_interface(before, after.graph)
    elements, count = elements_sent(after.graph), len(collectives_in_order(after.graph))
    assert elements == before.elements, f"{elements} are sent, not {before.elements}"
    assert count <= len(before.collectives), f"{count} collectives of {len(before.collectives)}"


def fuse_buckets(graph: fx.Graph, several: Sequence[Sequence[fx.Node]]) -> fx.Graph | None:
    """Return a copy of the graph with each bucket fused; None where buckets depend on one
    another.
    """
    fused = copy_graph(graph)
    twins = dict(zip(graph.nodes, fused.nodes, strict=True))
    for members in several:
        fuse(fused, [twins[node] for node in members])
    return fused if sort(fused) else None


def choices(listed: Listed, sizes: Sequence[int]) -> Iterator[list[list[fx.Node]]]:
    """Yield the buckets for each of these sizes in bytes; the same buckets only once."""
    keys = [_key(node) for node in listed.nodes]
    run, leads = simulate_overlap(listed.events), lead_to_matmuls(listed)
    seen: list[list[buckets.Bucket]] = [[]]
    for size in sizes:
        together = buckets.together(listed.events, keys, leads, run, size)
        if together not in seen:
            seen.append(together)
            yield [[listed.nodes[i] for i in members] for members in together]


def _key(node: fx.Node) -> Hashable:
    """Return what collectives must share to be fused; None for those that cannot be, and for
    ops.
    """
    if not can_fuse(node):
        return None
    return collective_of(node), _dtype(node), str(node.args[1:])


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value.dtype


# -- writing a bucket ------------------------------------------------------------------------------
_COALESCED = {
    "all_reduce": functional.all_reduce_coalesced.default,
    "all_gather_into_tensor": functional.all_gather_into_tensor_coalesced.default,
    "reduce_scatter_tensor": functional.reduce_scatter_tensor_coalesced.default,
}


def can_fuse(node: fx.Node) -> bool:
    """Whether a collective can be fused with others. An all-to-all only where its result is summed
    at once, as in gloo's reduce-scatters: its parts are not contiguous.
    """
    if collective_of(node) != "all_to_all_single":
        return collective_of(node) in (*_COALESCED, *ROOTED)
    sums = list(_users(_users([node])))
    return bool(sums) and all(
        user.target is aten.sum.dim_IntList and user.args[1:] == ([0],) for user in sums
    )


def fuse(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """Replace these collectives by one, which stands behind the last of them: the graph is to be
    put in order by `ir.graph.sort` afterwards.
    """
    members, form = _in_cut_order(members), _form(members[0])
    with graph.inserting_after(members[-1]):
        parts = form.how(graph, members)
    for node, part in zip(members, parts, strict=True):
        part.meta["custom"] = node.meta.get("custom", {})
        for result in form.results(node):
            result.replace_all_uses_with(part)
        forget(graph, node)


class _Form(NamedTuple):
    """How a fused collective is written, and the nodes of a member that its parts replace."""

    how: Callable[[fx.Graph, Sequence[fx.Node]], list[fx.Node]]
    results: Callable[[fx.Node], list[fx.Node]]


def _form(node: fx.Node) -> _Form:
    """Return the form in which this kind of collective is fused."""
    name = collective_of(node)
    if name == "all_to_all_single":
        return _Form(_summed_all_to_all, lambda n: list(_users(_users([n]))))
    if name in ROOTED or (name == "all_reduce" and on_cpu(node)):
        return _Form(_concatenated, lambda n: list(_users([n])))
    if name == "all_gather_into_tensor" and on_cpu(node):
        return _Form(_gathered, lambda n: list(_users([n])))
    return _Form(_coalesced, lambda n: [n])


# -- the forms: each returns a part for every member -----------------------------------------------
def _coalesced(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    """Write torch's coalesced collective."""
    target = _COALESCED[str(collective_of(members[0]))]
    values = [node.meta["val"] for node in members]
    arguments = ([node.args[0] for node in members], *members[0].args[1:])
    fused = add_node(graph, target, arguments, values)
    fused.meta["custom"] = _origins(members)
    return [add_node(graph, operator.getitem, (fused, i), v) for i, v in enumerate(values)]


def _concatenated(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    """Write one all-reduce, broadcast or reduce of all operands, concatenated."""
    arrived = _send_and_wait(
        graph, members, concatenate(graph, [node.all_input_nodes[0] for node in members])
    )
    return _cut(graph, arrived, [node.meta["val"] for node in members])


def _summed_all_to_all(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    """Write one all-to-all of all operands, side by side, and one sum of what arrives. Each operand
    is (ranks, ...), a slice for each rank.
    """
    (first, *_) = sums = [next(_users(_users([node]))) for node in members]
    inputs = [node.all_input_nodes[0] for node in members]
    ranks = inputs[0].meta["val"].shape[0]
    flat = [add_call(graph, aten.reshape.default, (n, [ranks, -1])) for n in inputs]
    arrived = _send_and_wait(graph, members, add_call(graph, aten.cat.default, (flat, 1)))
    total = add_call(graph, aten.sum.dim_IntList, (arrived, [0]), first.kwargs)
    return _cut(graph, total, [node.meta["val"] for node in sums])


def _gathered(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    """Write one all-gather of all operands, concatenated. What arrives has a row for each rank; the
    parts are copied out of it, so that it can be freed. Where the operands come out of a fused
    scatter, that is changed to scatter other slices, such that the parts arrive one after the
    other.
    """
    ranks: Any = members[0].args[1]
    values = [node.meta["val"] for node in members]
    operand = concatenate(graph, [node.all_input_nodes[0] for node in members])
    scattered = _scattered(operand, members)
    arrived = _send_and_wait(graph, members, operand)
    if scattered is not None:
        _slice_anew(graph, scattered)
        return _cut(graph, arrived, values)
    rows = add_call(graph, aten.view.default, (arrived, [ranks, -1]))
    contiguous = {"memory_format": torch.contiguous_format}
    gathered, start = [], 0
    for value in values:
        stop = start + value.numel() // ranks
        view = add_call(graph, aten.slice.Tensor, (rows, 1, start, stop))
        part = add_call(graph, aten.clone.default, (view,), contiguous)
        gathered.append(add_call(graph, aten.view.default, (part, list(value.shape))))
        start = stop
    return gathered


def _send_and_wait(graph: fx.Graph, members: Sequence[fx.Node], bucket: fx.Node) -> fx.Node:
    """Return what arrives of a collective that sends `bucket` in place of the members' operands."""
    target: Any = members[0].target
    sent = add_call(graph, target, (bucket, *members[0].args[1:]))
    sent.meta["custom"] = _origins(members)
    return add_call(graph, functional.wait_tensor.default, (sent,))


def _origins(members: Sequence[fx.Node]) -> dict[str, str]:
    """Return the origin of a fused collective for timelines: its first member and how many more."""
    origin = members[0].meta.get("custom", {})
    names = f"{origin.get('node', members[0].name)} and {len(members) - 1} more"
    return {"node": names, "module": origin.get("module", "")}


# -- concatenate and split -------------------------------------------------------------------------
def _cut(graph: fx.Graph, bucket: fx.Node, values: Sequence[torch.Tensor]) -> list[fx.Node]:
    """Return consecutive views of `bucket` (n,), of the shapes of these values."""
    views, start = [], 0
    for value in values:
        stop = start + value.numel()
        view = add_call(graph, aten.slice.Tensor, (bucket, 0, start, stop))
        views.append(add_call(graph, aten.view.default, (view, list(value.shape))))
        start = stop
    return views


def _in_cut_order(members: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """Return the members in the order in which their operands were cut out of one tensor, if they
    were.
    """
    slices = [cut_of(member.all_input_nodes[0]) for member in members]
    views = [cut for cut in slices if cut is not None]
    if len(views) < len(members) or len({source for source, _, _ in views}) > 1:
        return members
    places = sorted(range(len(members)), key=lambda place: views[place][1])
    return [members[place] for place in places]


# -- scattered, summed and gathered again ----------------------------------------------------------
def _scattered(bucket: fx.Node, members: Sequence[fx.Node]) -> fx.Node | None:
    """Return the concatenation that was scattered over this group to become the operand `bucket` of
    an all-gather. None where there is none, or where something else uses a value on the way.
    """
    if not _leads_only_to(bucket, members):
        return None
    node, groups = bucket, [group_of(members[0])]
    while groups:
        if node is not bucket and len(node.users) != 1:
            return None
        name = collective_of(node)
        if name == "all_gather_into_tensor":
            groups.append(group_of(node))
        elif name == "all_to_all_single":
            if groups.pop() != group_of(node):
                return None
        elif not (is_wait(node) or name == "all_reduce" or node.target in _ELEMENTWISE):
            return None
        node = node.all_input_nodes[0]
    if node.target is not aten.cat.default or node.args[1:] != (1,) or len(node.users) != 1:
        return None
    widths = [part.meta["val"].shape[1] for part in node.all_input_nodes]
    lengths = [member.all_input_nodes[0].meta["val"].numel() for member in members]
    return node if widths == lengths else None


_ELEMENTWISE = (aten.sum.dim_IntList, aten.view.default)  # behind an all-to-all, and before one


def _leads_only_to(node: fx.Node, members: Sequence[fx.Node]) -> bool:
    """Whether views of this node have no users but these members."""
    return all(
        user in members or (carries_on(user) and _leads_only_to(user, members))
        for user in node.users
    )


def _slice_anew(graph: fx.Graph, neighbour: fx.Node) -> None:
    """Give rank r slice r of the concatenation of all parts, in place of slice r of each part."""
    rows = neighbour.all_input_nodes
    shape = list(neighbour.meta["val"].shape)
    with graph.inserting_before(neighbour):
        flat = concatenate(graph, [row.all_input_nodes[0] for row in rows])
        neighbour.replace_all_uses_with(add_call(graph, aten.view.default, (flat, shape)))
    graph.erase_node(neighbour)
    for row in rows:
        graph.erase_node(row)


def _users(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the users of these nodes."""
    return (user for node in nodes for user in node.users)
