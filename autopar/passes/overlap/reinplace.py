"""Turns ops of a derived graph into their in-place forms where nothing else reads the operand.

AOTAutograd's graphs are functional: every op makes fresh memory, and an all-reduce copies what it
sums. Fresh memory is what large pointwise ops on a CPU cost most, and the copies of all gradients
are as many bytes as the model has. So an op writes into its operand where the graph itself made
that memory and the op is its only reader: the same numbers, whatever the order of the nodes. The
sum in a gloo reduce-scatter is written as in-place adds: torch's reduction of two large rows on a
CPU takes up to three times as long, of four half as long again, with the same bits
(`benchmarks/step_time/rows.py`).

`fill_buckets` lets matmuls write into a bucket (bucket.py) directly. Otherwise its gradients are
copied together, as many bytes as the model has, into memory that is touched for the first time. A
scheduled graph enters both passes; where a compiler takes it, it leaves as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.cost.simulator.buckets import SIZES
from autopar.cost.simulator.graph_events import collective_of, is_wait, writes
from autopar.ir.graph import add_call, add_node
from autopar.passes.overlap import DerivedGraph, GraphFacts, check_interface, collectives_in_order
from autopar.world import World

aten, functional = torch.ops.aten, torch.ops._c10d_functional

_VIEWS = frozenset(
    packet
    for name in ("view", "t", "permute", "transpose", "unsqueeze", "squeeze", "alias", "detach")
    for packet in (getattr(aten, name),)
) | {aten._unsafe_view, aten.slice, aten.select}  # views that show no element twice
# At most this many rows, each of at least this many bytes, are added in place.
_ROWS, _ROW_BYTES = 4, 1 << 18
_PLACING = frozenset({aten.scatter_add, aten.index_copy, aten.index_add, aten.masked_fill})


def reinplace(derived: DerivedGraph, world: World) -> DerivedGraph:
    """Return the derived graph, in which all ops that can write in place do. Neither inputs nor
    outputs of the graph are written to.
    """
    graph = derived.graph
    for node in [] if derived.compiler else list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            _replace_sum_by_adds(graph, node) or _summed(graph, node) or _pointwise(node)
    return derived


def check(before: GraphFacts, after: DerivedGraph) -> None:
    """The contract: what is written to was made in the graph, and the writer alone reads it. The
    collectives are those that there were.
    """
    check_interface(before, after.graph)
    assert collectives_in_order(after.graph) == before.collectives, "other collectives"
    for node in after.graph.nodes:
        if node.op == "call_function" and writes(node) and node.target is not aten.copy_.default:
            written = node.args[0]
            for operand in written if isinstance(written, list | tuple) else [written]:
                assert _is_own_memory(operand, rows=True), (
                    f"{node.name} writes to {operand}, which is not its own"
                )


# -- whose memory it is ----------------------------------------------------------------------------
def _is_own_memory(operand: Any, rows: bool = False) -> bool:
    """Whether an operand is memory that the graph made, which nothing but its one user can see.
    `rows` also accepts a row of a larger tensor, which then stays live as long as the row.
    """
    while isinstance(operand, fx.Node) and (
        len(operand.users) == 1 or (rows and _users_take_rows(operand))
    ):
        if operand.target is operator.getitem:
            source, index = operand.args
            assert isinstance(source, fx.Node)
            alone = sum(user.args[1:] == (index,) for user in source.users) == 1
            return alone and _makes_memory(source)
        if not _is_view(operand):
            return _makes_memory(operand)
        operand = operand.args[0]
    return False


def _users_take_rows(node: fx.Node) -> bool:
    """Whether each of the users takes a row of its own."""
    selections = [user.args[1:] for user in node.users if user.target is aten.select.int]
    return len(selections) == len(node.users) == len(set(selections)) and all(
        d == 0 for d, _ in selections
    )


def _is_view(node: fx.Node) -> bool:
    """Whether the result is the first operand's memory, as that of an in-place form is too."""
    if not isinstance(node.target, OpOverload) or not isinstance(node.args[0], fx.Node):
        return False
    return is_wait(node) or writes(node) or node.target.overloadpacket in _VIEWS


def _makes_memory(node: fx.Node) -> bool:
    """Whether an op's results are new memory, not views of its operands."""
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    return not writes(node) and bool(returns) and all(r.alias_info is None for r in returns)


# -- collectives -----------------------------------------------------------------------------------
def _replace_sum_by_adds(graph: fx.Graph, node: fx.Node) -> bool:
    """Replace a sum of a few large rows by adds; return whether it was. The rows are added to the
    first, or to the sum of the first two: where the result goes out of the graph, or where the rows
    are more than a bucket, which must not stay live for it.
    """
    if node.target is not aten.sum.dim_IntList or node.args[1:] != ([0],):
        return False
    rows: Any = node.args[0]
    value, total = rows.meta["val"], node.meta["val"]
    few_large_rows = 1 < value.shape[0] <= _ROWS and total.nbytes >= _ROW_BYTES
    exact = value.dtype == total.dtype and value.dtype in (torch.float32, torch.float64)
    if not (
        few_large_rows
        and exact
        and value.device.type == "cpu"
        and _contiguous(rows)
        and _is_own_memory(rows)
    ):
        return False
    add = aten.add.Tensor if _goes_out(node) or value.nbytes > SIZES[-1] else aten.add_.Tensor
    with graph.inserting_before(node):
        running, *others = (
            add_node(graph, aten.select.int, (rows, 0, i), total) for i in range(value.shape[0])
        )
        for row in others:
            running = add_node(graph, add, (running, row), total)
            add = aten.add_.Tensor
    running.meta = {**node.meta, "val": total}
    node.replace_all_uses_with(running)
    graph.erase_node(node)
    return True


def _goes_out(node: fx.Node) -> bool:
    """Whether a result, or a view or an all-reduce of it, is an output of the graph."""
    return any(
        user.op == "output"
        or ((_is_view(user) or collective_of(user) == "all_reduce") and _goes_out(user))
        for user in node.users
    )


def _summed(graph: fx.Graph, node: fx.Node) -> bool:
    """Reinplace an all-reduce, coalesced or not; return whether it was."""
    if node.target is functional.all_reduce.default:
        if not (_is_own_memory(node.args[0], rows=True) and _contiguous(node.args[0])):
            return False
        node.target = functional.all_reduce_.default
        return True
    if node.target is not functional.all_reduce_coalesced.default:
        return False
    operands = node.args[0]
    assert isinstance(operands, list | tuple)
    writable = [_is_own_memory(operand, rows=True) and _contiguous(operand) for operand in operands]
    if not any(writable):
        return False
    with graph.inserting_before(node):
        buffers = [
            o if is_writable else _contiguous_copy(graph, o)
            for o, is_writable in zip(operands, writable, strict=True)
        ]
    node.args = (buffers, *node.args[1:])
    node.target = functional.all_reduce_coalesced_.default
    return True


def _contiguous(operand: Any) -> bool:
    return bool(operand.meta["val"].is_contiguous())


def _contiguous_copy(graph: fx.Graph, operand: Any) -> fx.Node:
    """Return a contiguous copy of an operand."""
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    copy = graph.call_function(aten.clone.default, (operand,), options)
    copy.meta["val"] = aten.clone.default(operand.meta["val"], **options)
    return copy


# -- pointwise ops ---------------------------------------------------------------------------------
def _pointwise(node: fx.Node) -> bool:
    """Write into the first operand; where the op is commutative, alternatively into the second.
    Return whether that was done.
    """
    target = _in_place(node.target)
    if target is None or not node.args:
        return False
    if _fits(node.args[0], node):
        node.target = target
        return True
    either = node.target in (aten.add.Tensor, aten.mul.Tensor) and not node.kwargs
    if either and len(node.args) == 2 and _fits(node.args[1], node):
        node.args = (node.args[1], node.args[0])
        node.target = target
        return True
    return False


def _fits(operand: Any, node: fx.Node) -> bool:
    """Whether the result can take the operand's memory."""
    if (
        not isinstance(operand, fx.Node)
        or not _is_own_memory(operand)
        or _count_uses(node, operand) > 1
    ):
        return False
    result, source = node.meta.get("val"), operand.meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return (result.shape, result.dtype, result.stride()) == (
        source.shape,
        source.dtype,
        source.stride(),
    )


def _count_uses(node: fx.Node, operand: fx.Node) -> int:
    """Return how often a node takes this operand."""
    operands: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: operands.append(n))
    return operands.count(operand)


def _in_place(target: Any) -> OpOverload | None:
    """Return the in-place form of a pointwise op, or of one that places elements into others."""
    packet = target.overloadpacket
    if target.namespace != "aten" or target._schema.is_mutable:
        return None
    if torch.Tag.pointwise not in target.tags and packet not in _PLACING:
        return None
    in_place_packet = getattr(aten, f"{packet.__name__}_", None)
    form = getattr(in_place_packet, target._overloadname, None)
    if not isinstance(form, OpOverload):
        return None
    info = form._schema.arguments[0].alias_info
    return form if info is not None and info.is_write else None


# -- buckets ---------------------------------------------------------------------------------------
_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.t, aten.transpose, aten.permute)


def fill_buckets(derived: DerivedGraph, world: World) -> DerivedGraph:
    """Return the derived graph, in which matmuls write into the buckets that they were copied into.
    Its order is final, and `room` is how many bytes of buckets may be allocated before they are
    full. Only matmuls that nothing else reads qualify: a bucket is summed in place.
    """
    graph, room = derived.graph, derived.room
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in [] if derived.compiler else list(place):
        value = node.meta.get("val")
        if node.target is not aten.cat.default or value.dim() != 1 or value.nbytes > room:
            continue
        matmuls_of_members = [_matmul_of(part) for part in node.all_input_nodes]
        matmuls = [matmul for matmul in matmuls_of_members if matmul is not None]
        if matmuls and len(matmuls_of_members) == len(node.args[0]):  # no part is there twice
            _fill(graph, node, matmuls_of_members, min(matmuls, key=place.__getitem__))
            room -= value.nbytes
    return derived


def check_filled(before: GraphFacts, after: DerivedGraph) -> None:
    """The contract: a bucket that was not there before is full before anything reads it. The
    collectives are those that there were.
    """
    check_interface(before, after.graph)
    assert collectives_in_order(after.graph) == before.collectives, "other collectives"
    place = {node: number for number, node in enumerate(after.graph.nodes)}
    for buffer in place:
        if buffer.target is aten.empty.memory_format and buffer not in before.nodes:
            writers = {slot: _writer(slot) for slot in buffer.users}
            slots = sorted(slot.args[2:] for slot, writer in writers.items() if writer is not None)
            ends = [0, *(stop for _, stop in slots)]
            is_full = ends == [*(start for start, _ in slots), buffer.meta["val"].numel()]
            assert is_full, f"{buffer.name} has a gap: {slots}"
            full = max(place[writer] for writer in writers.values() if writer is not None)
            early = [r.name for r, writer in writers.items() if writer is None and place[r] < full]
            assert not early, f"{buffer.name} is not full where {early} read it"


def _writer(slot: fx.Node) -> fx.Node | None:
    """Return what fills a slot of a bucket; None for what reads the bucket."""
    while slot.target in (aten.slice.Tensor, aten.view.default) and len(slot.users) == 1:
        (slot,) = slot.users
    return slot if slot.target in (aten.mm.out, aten.copy_.default) else None


def _matmul_of(part: fx.Node) -> fx.Node | None:
    """Return the matmul that a part of a bucket is, its elements in the same order, if nothing else
    reads it; None otherwise.
    """
    node = part
    while len(node.users) == 1 and getattr(node.target, "overloadpacket", None) in _RESHAPES:
        shown = node.all_input_nodes[0]
        if node.target is aten.reshape.default and not shown.meta["val"].is_contiguous():
            return None  # a copy in another order
        node = shown
    is_sole_use = node.target is aten.mm.default and len(node.users) == 1
    return node if is_sole_use and node.meta["val"].is_contiguous() else None


def _fill(
    graph: fx.Graph, bucket: fx.Node, products: Sequence[fx.Node | None], first: fx.Node
) -> None:
    """Allocate a bucket before `first`, and let each matmul write into its slice of it."""
    value, parts = bucket.meta["val"], bucket.all_input_nodes
    with graph.inserting_before(first):
        options = {"dtype": value.dtype, "device": value.device}
        buffer = add_node(graph, aten.empty.memory_format, ([value.numel()],), value, options)
    bucket.replace_all_uses_with(buffer)
    start = 0
    for part, product in zip(parts, products, strict=True):
        stop = start + part.meta["val"].numel()
        with graph.inserting_before(product or bucket):
            slot = add_call(graph, aten.slice.Tensor, (buffer, 0, start, stop))
            if product is None:
                add_node(graph, aten.copy_.default, (slot, part), slot.meta["val"])
            else:
                result = product.meta["val"]
                slot = add_call(graph, aten.view.default, (slot, list(result.shape)))
                add_node(
                    graph, aten.mm.out, product.args, result, {"out": slot}
                ).meta = product.meta
        start = stop
    graph.erase_node(bucket)
    for part, product in zip(parts, products, strict=True):
        node = part
        while product is not None and not node.users:
            unused, node = node, node.all_input_nodes[0]
            graph.erase_node(unused)
            if unused is product:
                break
