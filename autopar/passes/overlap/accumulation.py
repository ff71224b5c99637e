"""The derived backward in two further forms, by which gradients of several backwards are summed
across ranks once.

    all_reduce(mm)        the derived backward sums the gradient of a weight over the ranks
    mm                    deferred: it returns what this rank would have sent
    all_reduce(mm + own)  final: it takes what this rank has held so far, and sums it all

The ranks' sum commutes with the sum over backwards, so both give the same gradient. What leads from
a sum across ranks to a gradient, its `Tail`, must be linear and used by that gradient alone: views,
changes of dtype, waits, other collectives of the same value. A gradient without a tail, such as
that of a weight that two collectives add up, is summed in each backward as before. Sources:
DistributedDataParallel.no_sync; ZeRO, arXiv 1910.02054, section 7.

A copy of a derived backward enters before it is scheduled, and one of the forms leaves.
runtime/backends.py schedules and runs both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.cost.simulator.graph_events import carries_on, collective_of, group_of
from autopar.ir.graph import add_node, copy_graph
from autopar.ir.layout import Layout, P
from autopar.ir.mesh import axes_of_group
from autopar.passes.overlap import erase_unused

aten = torch.ops.aten

_SUMS = ("all_reduce", "reduce_scatter_tensor")
_SWAP = "all_to_all_single"  # on gloo a reduce-scatter is one, and a local sum of what arrives
_ADDED = frozenset({aten.sum.dim_IntList})
_LINEAR = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
        torch.ops.prims.convert_element_type.default,
    }
)


@dataclass(frozen=True)
class Tail:
    """What sums a gradient across ranks at the end of a backward.

    `place`: of the gradient among the results. `own`: the name of the node that a rank holds, whose
    result lies as `layout` says (P on the axes that are summed over) and has this `dtype`.
    """

    place: int
    own: str
    layout: Layout
    dtype: torch.dtype


def tails(backward: fx.Graph, layouts: Sequence[Layout | None]) -> tuple[Tail, ...]:
    """Return the tail of each gradient that has one. `layouts`: where the gradients lie, in the
    order of the results; None for what no rank stores.
    """
    candidates = (
        _tail(place, result, layout)
        for place, (result, layout) in enumerate(zip(_results(backward), layouts, strict=True))
        if isinstance(result, fx.Node) and layout is not None
    )
    return tuple(tail for tail in candidates if tail is not None)


def without_sums(backward: fx.Graph, ends: tuple[Tail, ...]) -> fx.Graph:
    """Return a copy that returns what this rank would send in place of the gradients of `ends`."""
    graph = copy_graph(backward)
    output, nodes = graph.output_node(), {node.name: node for node in graph.nodes}
    results: list[Any] = list(_results(graph))
    for tail in ends:
        results[tail.place] = nodes[tail.own]
    output.args = (tuple(results),)
    erase_unused(graph)
    return graph


def with_accumulated(backward: fx.Graph, ends: tuple[Tail, ...]) -> fx.Graph:
    """Return a copy that takes what is held of each of `ends`, after its other operands, and sums
    it across ranks with its own.
    """
    graph = copy_graph(backward)
    nodes = {node.name: node for node in graph.nodes}
    last = graph.find_nodes(op="placeholder")[-1]
    for number, tail in enumerate(ends):
        own = nodes[tail.own]
        with graph.inserting_after(last):
            last = graph.placeholder(f"held_{number}")
            last.meta["val"] = own.meta["val"]
        with graph.inserting_after(own):
            both = add_node(graph, aten.add.Tensor, (own, last), own.meta["val"])
        both.meta.update({k: v for k, v in own.meta.items() if k not in both.meta})
        own.replace_all_uses_with(both, delete_user_cb=lambda user, new=both: user is not new)
    return graph


def _results(graph: fx.Graph) -> tuple[object, ...]:
    (results,) = graph.output_node().args
    assert isinstance(results, tuple | list)
    return tuple(results)


def _tail(place: int, result: fx.Node, stored: Layout) -> Tail | None:
    """Return the tail that ends in a result: up to the first sum of what the ranks send, and from
    there to the node that has the shape of the gradient.
    """
    first, layout = _first_sum(result, stored)
    if first is None or not layout.is_plain:
        return None
    node = first.all_input_nodes[0]
    while tuple(node.meta["val"].shape) != layout.local_shape:
        if not _is_linear(node) or collective_of(node) is not None or len(node.users) != 1:
            return None
        node = node.all_input_nodes[0]
    if len(node.users) != 1 or node.op != "call_function":
        return None
    return Tail(place, node.name, layout, node.meta["val"].dtype)


def _first_sum(result: fx.Node, stored: Layout) -> tuple[fx.Node | None, Layout]:
    """Return the first sum across ranks that leads to nothing but a result, and the layout of what
    it adds up.
    """
    first, node, layout = None, result, stored
    while node.op == "call_function" and len(node.users) == 1 and _is_linear(node):
        if collective_of(node) in _SUMS or node.target in _ADDED:
            swapped = _swapped(node) if node.target in _ADDED else node
            assert swapped is not None
            first = node = swapped
            for axis in axes_of_group(group_of(node)).split("."):
                layout = layout.with_state(axis, P)
        node = node.all_input_nodes[0]
    return first, layout


def _is_linear(node: fx.Node) -> bool:
    """Whether a node only moves its one operand, or sums it across ranks."""
    if len(node.all_input_nodes) != 1 or not isinstance(node.target, OpOverload):
        return False
    if collective_of(node) in _SUMS:
        return node.args[1] == "sum"
    if node.target in _ADDED:
        return _swapped(node) is not None
    gathers = collective_of(node) == "all_gather_into_tensor"
    return gathers or carries_on(node) or node.target in _LINEAR


def _swapped(added: fx.Node) -> fx.Node | None:
    """Return the all-to-all whose pieces a local sum adds up; None where it adds other things."""
    node = added.all_input_nodes[0]
    while carries_on(node) and len(node.users) == 1 and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node if collective_of(node) == _SWAP and len(node.users) == 1 else None
