"""Several collectives of one kind, group and dtype written as one (bucket.py says which).

On a CPU they go as one tensor: gloo copies what is coalesced into one and out again, and its
coalesced gathers corrupt memory (`_compat.safe_gathers`). Elsewhere they take their coalesced form,
where torch has one: broadcasts and reduces from and to one root go as one tensor everywhere.
What one joint collective gives is cut up by views, and the next takes it whole where it would take
all of these: so a sum in several levels (scatters, sums of the parts, gathers) copies its bucket
together once and nothing after that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.cost.simulator.graph_events import carries_on, collective_of, group_of, is_wait
from autopar.cost.simulator.step_events import ROOTED
from autopar.ir.graph import computed, made

aten, functional = torch.ops.aten, torch.ops._c10d_functional


_COALESCED = {
    "all_reduce": functional.all_reduce_coalesced.default,
    "all_gather_into_tensor": functional.all_gather_into_tensor_coalesced.default,
    "reduce_scatter_tensor": functional.reduce_scatter_tensor_coalesced.default,
}


def can_fuse(node: fx.Node) -> bool:
    """An all-to-all only where its result is summed at once, as gloo's reduce-scatters are: its
    parts are not contiguous.
    """
    if collective_of(node) != "all_to_all_single":
        return collective_of(node) in (*_COALESCED, *ROOTED)
    found = list(_behind(_behind([node])))
    return bool(found) and all(
        user.target is aten.sum.dim_IntList and user.args[1:] == ([0],) for user in found
    )


def fuse(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """Replace collectives by one; where it stands is mended by `graphs.ordered`."""
    members, written = _as_cut(members), _form(members[0])
    with graph.inserting_after(members[-1]):
        parts = written.how(graph, members)
    for node, part in zip(members, parts, strict=True):
        part.meta["custom"] = node.meta.get("custom", {})
        for result in written.results(node):
            result.replace_all_uses_with(part)
        forget(graph, node)


class _Form(NamedTuple):
    """How a joint collective is written, and the nodes of a member that its parts stand for."""

    how: Callable[[fx.Graph, Sequence[fx.Node]], list[fx.Node]]
    results: Callable[[fx.Node], list[fx.Node]]


def _form(node: fx.Node) -> _Form:
    name = collective_of(node)
    if name == "all_to_all_single":
        return _Form(_exchanged, lambda n: list(_behind(_behind([n]))))
    if name in ROOTED or (name == "all_reduce" and on_cpu(node)):
        return _Form(_as_sent, lambda n: list(_behind([n])))
    if name == "all_gather_into_tensor" and on_cpu(node):
        return _Form(_gathered, lambda n: list(_behind([n])))
    return _Form(_coalesced, lambda n: [n])


def on_cpu(node: fx.Node) -> bool:
    """Whether what a collective gives is on a CPU, where gloo carries it."""
    return bool(node.meta["val"].device.type == "cpu")


# -- the forms -------------------------------------------------------------------------------------
def _coalesced(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    target = _COALESCED[str(collective_of(members[0]))]
    values = [node.meta["val"] for node in members]
    arguments = ([node.args[0] for node in members], *members[0].args[1:])
    one = made(graph, target, arguments, values)
    one.meta["custom"] = _origins(members)
    return [made(graph, operator.getitem, (one, i), v) for i, v in enumerate(values)]


def _as_sent(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    """One all-reduce, broadcast or reduce of all, one after the other."""
    arrived = _sent(graph, members, in_one(graph, [node.all_input_nodes[0] for node in members]))
    return _cut(graph, arrived, [node.meta["val"] for node in members])


def _exchanged(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    """One all-to-all of all, side by side, and one sum, of which the parts are. Each member is
    (ranks, ...), a slice for each rank.
    """
    (first, *_) = sums = [next(_behind(_behind([node]))) for node in members]
    inputs = [node.all_input_nodes[0] for node in members]
    ranks = inputs[0].meta["val"].shape[0]
    flat = [computed(graph, aten.reshape.default, (n, [ranks, -1])) for n in inputs]
    arrived = _sent(graph, members, computed(graph, aten.cat.default, (flat, 1)))
    one = computed(graph, aten.sum.dim_IntList, (arrived, [0]), first.kwargs)
    return _cut(graph, one, [node.meta["val"] for node in sums])


def _gathered(graph: fx.Graph, members: Sequence[fx.Node]) -> list[fx.Node]:
    """One all-gather of all, side by side. What arrives is a row for each rank; the parts are
    copied out of it, so that it can be let go of. Where it is what was scattered before, that is
    scattered in other slices, such that the parts arrive one after the other.
    """
    ranks: Any = members[0].args[1]
    values = [node.meta["val"] for node in members]
    one = in_one(graph, [node.all_input_nodes[0] for node in members])
    scattered = _scattered(one, members)
    arrived = _sent(graph, members, one)
    if scattered is not None:
        _slice_anew(graph, scattered)
        return _cut(graph, arrived, values)
    rows = computed(graph, aten.view.default, (arrived, [ranks, -1]))
    contiguous = {"memory_format": torch.contiguous_format}
    found, start = [], 0
    for value in values:
        stop = start + value.numel() // ranks
        shown = computed(graph, aten.slice.Tensor, (rows, 1, start, stop))
        part = computed(graph, aten.clone.default, (shown,), contiguous)
        found.append(computed(graph, aten.view.default, (part, list(value.shape))))
        start = stop
    return found


def _sent(graph: fx.Graph, members: Sequence[fx.Node], one: fx.Node) -> fx.Node:
    """What arrives of a collective that sends `one` in place of what the members send."""
    target: Any = members[0].target
    sent = computed(graph, target, (one, *members[0].args[1:]))
    sent.meta["custom"] = _origins(members)
    return computed(graph, functional.wait_tensor.default, (sent,))


def _origins(members: Sequence[fx.Node]) -> dict[str, str]:
    """Where a joint collective comes from, for timelines: the first of its members and the rest."""
    found = members[0].meta.get("custom", {})
    names = f"{found.get('node', members[0].name)} and {len(members) - 1} more"
    return {"node": names, "module": found.get("module", "")}


# -- one tensor of several, and several of one -----------------------------------------------------
def _cut(graph: fx.Graph, one: fx.Node, values: Sequence[torch.Tensor]) -> list[fx.Node]:
    """Views of `one` (n,), one after the other, of the shapes of these values."""
    found, start = [], 0
    for value in values:
        stop = start + value.numel()
        shown = computed(graph, aten.slice.Tensor, (one, 0, start, stop))
        found.append(computed(graph, aten.view.default, (shown, list(value.shape))))
        start = stop
    return found


def in_one(graph: fx.Graph, parts: Sequence[fx.Node]) -> fx.Node:
    """The parts one after the other (n,): what they were cut out of, where they are all of that."""
    cuts = [_cut_of(part) for part in parts]
    start, one = 0, cuts[0][0] if cuts[0] else None
    for found in cuts:
        if one is None or found is None or found[:2] != (one, start):
            flat = [computed(graph, aten.reshape.default, (part, [-1])) for part in parts]
            return computed(graph, aten.cat.default, (flat,))
        start = found[2]
    assert one is not None
    whole = start == one.meta["val"].numel()
    return one if whole else computed(graph, aten.slice.Tensor, (one, 0, 0, start))


def _as_cut(members: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """In the order in which what they send was cut out of one tensor, where it was."""
    cuts = [_cut_of(member.all_input_nodes[0]) for member in members]
    known = [cut for cut in cuts if cut is not None]
    if len(known) < len(members) or len({one for one, _, _ in known}) > 1:
        return members
    places = sorted(range(len(members)), key=lambda place: known[place][1])
    return [members[place] for place in places]


def _cut_of(part: fx.Node) -> tuple[fx.Node, int, int] | None:
    """What a part was cut out of as `_cut` does, from where to where."""
    node = part
    while node.target in (aten.view.default, aten.reshape.default):
        node = node.all_input_nodes[0]
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return None
    one, dim, start, stop = node.args
    assert isinstance(one, fx.Node) and isinstance(start, int) and isinstance(stop, int)
    return (one, start, stop) if dim == 0 and one.meta["val"].dim() == 1 else None


# -- what is scattered, summed and gathered again --------------------------------------------------
def _scattered(one: fx.Node, members: Sequence[fx.Node]) -> fx.Node | None:
    """Of what all-gathers send as one: where it was put side by side to be scattered over the same
    group. None where it was not, or where something else looks at what came of it.
    """
    if not _leads_only_to(one, members):
        return None
    node, groups = one, [group_of(members[0])]
    while groups:
        if node is not one and len(node.users) != 1:
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
    sent = [member.all_input_nodes[0].meta["val"].numel() for member in members]
    return node if widths == sent else None


_ELEMENTWISE = (aten.sum.dim_IntList, aten.view.default)  # behind an all-to-all, and before one


def _leads_only_to(node: fx.Node, members: Sequence[fx.Node]) -> bool:
    return all(
        user in members or (carries_on(user) and _leads_only_to(user, members))
        for user in node.users
    )


def _slice_anew(graph: fx.Graph, beside: fx.Node) -> None:
    """Let rank r have slice r of all parts one after the other, in place of slice r of each."""
    rows = beside.all_input_nodes
    shape = list(beside.meta["val"].shape)
    with graph.inserting_before(beside):
        one = in_one(graph, [row.all_input_nodes[0] for row in rows])
        beside.replace_all_uses_with(computed(graph, aten.view.default, (one, shape)))
    graph.erase_node(beside)
    for row in rows:
        graph.erase_node(row)


# -- nodes -----------------------------------------------------------------------------------------
def _behind(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    return (user for node in nodes for user in node.users)


def forget(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a member with what is behind it, which nothing uses any more, and the views that only
    it took.
    """
    doomed, operands = [node], node.all_input_nodes
    for one in doomed:
        doomed += [user for user in one.users if user not in doomed]
    for one in reversed(doomed):
        graph.erase_node(one)
    for operand in operands:
        while not operand.users and operand.op == "call_function" and carries_on(operand):
            unused, operand = operand, operand.all_input_nodes[0]
            graph.erase_node(unused)
