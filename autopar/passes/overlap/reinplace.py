"""inplace: ops of a derived graph that write into an operand which nothing else looks at.

AOTAutograd's graphs are functional: every op makes fresh memory, and an all-reduce copies what it
sums. Fresh memory is what large pointwise ops on a CPU cost most, and the copies of all gradients
are as many bytes as the model has. So where the operand is memory that the graph itself made and
the op is the only one that ever reads it, the op's in-place form takes its place: the same numbers,
whatever the order of the nodes.

What gloo's reduce-scatters add up goes the same way: torch's reduction of two large rows of a CPU's
memory takes up to three times as long as one added to the other where it lies, of four half as long
again, and gives the same bits (`benchmarks/step_time/rows.py`).

fill: products write their results where a bucket wants them.

The gradients that go as one are copied together (joint.py), as many bytes as the model has, into
memory that is touched for the first time. A product can write into its part of that memory itself.
Nothing else may read the product: a bucket is summed where it lies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.cost.simulator.buckets import SIZES
from autopar.cost.simulator.graph_events import collective_of, is_wait, writes
from autopar.ir.graph import computed, made

aten, functional = torch.ops.aten, torch.ops._c10d_functional

_VIEWS = frozenset(
    packet
    for name in ("view", "t", "permute", "transpose", "unsqueeze", "squeeze", "alias", "detach")
    for packet in (getattr(aten, name),)
) | {aten._unsafe_view, aten.slice, aten.select}  # those that show no element twice
_ROWS, _ROW_BYTES = 4, 1 << 18  # at most so many, of at least so many bytes, are added one by one
_PLACING = frozenset({aten.scatter_add, aten.index_copy, aten.index_add, aten.masked_fill})


def reinplace(graph: fx.Graph) -> int:
    """Replace what can be; how many were. Neither what comes in nor what goes out is written to."""
    count = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            count += _added(graph, node) or _summed(graph, node) or _pointwise(node)
    return count


def check(graph: fx.Graph) -> None:
    """The contract: what is written to was made in the graph, and is read by the writer alone."""
    graph.lint()
    for node in graph.nodes:
        if node.op == "call_function" and writes(node) and node.target is not aten.copy_.default:
            written = node.args[0]
            for operand in written if isinstance(written, list | tuple) else [written]:
                assert _own(operand, rows=True), (
                    f"{node.name} writes to {operand}, which is not its own"
                )


# -- whose memory it is ----------------------------------------------------------------------------
def _own(operand: Any, rows: bool = False) -> bool:
    """Whether an operand is memory that the graph made, and its one user is all that can see it.
    `rows`: also where it is a row of more, which is then held as long as it is.
    """
    while isinstance(operand, fx.Node) and (len(operand.users) == 1 or (rows and _apart(operand))):
        if operand.target is operator.getitem:
            source, index = operand.args
            assert isinstance(source, fx.Node)
            alone = sum(user.args[1:] == (index,) for user in source.users) == 1
            return alone and _fresh(source)
        if not _is_view(operand):
            return _fresh(operand)
        operand = operand.args[0]
    return False


def _apart(node: fx.Node) -> bool:
    """Whether each of the users takes a row of its own."""
    taken = [user.args[1:] for user in node.users if user.target is aten.select.int]
    return len(taken) == len(node.users) == len(set(taken)) and all(d == 0 for d, _ in taken)


def _is_view(node: fx.Node) -> bool:
    """Whether the result is the first operand's memory, as that of an in-place form is too."""
    if not isinstance(node.target, OpOverload) or not isinstance(node.args[0], fx.Node):
        return False
    return is_wait(node) or writes(node) or node.target.overloadpacket in _VIEWS


def _fresh(node: fx.Node) -> bool:
    """An op whose results are no part of its operands."""
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    return not writes(node) and bool(returns) and all(r.alias_info is None for r in returns)


# -- collectives -----------------------------------------------------------------------------------
def _added(graph: fx.Graph, node: fx.Node) -> int:
    """A sum of a few large rows: one after the other added to the first, or to the sum of the first
    two where the result goes out or the rows are more than a bucket, which must not be held for it.
    """
    if node.target is not aten.sum.dim_IntList or node.args[1:] != ([0],):
        return 0
    rows: Any = node.args[0]
    value, total = rows.meta["val"], node.meta["val"]
    few = 1 < value.shape[0] <= _ROWS and total.nbytes >= _ROW_BYTES
    exact = value.dtype == total.dtype and value.dtype in (torch.float32, torch.float64)
    if not (few and exact and value.device.type == "cpu" and _contiguous(rows) and _own(rows)):
        return 0
    add = aten.add.Tensor if _goes_out(node) or value.nbytes > SIZES[-1] else aten.add_.Tensor
    with graph.inserting_before(node):
        one, *others = (
            made(graph, aten.select.int, (rows, 0, i), total) for i in range(value.shape[0])
        )
        for other in others:
            one = made(graph, add, (one, other), total)
            add = aten.add_.Tensor
    one.meta = {**node.meta, "val": total}
    node.replace_all_uses_with(one)
    graph.erase_node(node)
    return 1


def _goes_out(node: fx.Node) -> bool:
    return any(
        user.op == "output"
        or ((_is_view(user) or collective_of(user) == "all_reduce") and _goes_out(user))
        for user in node.users
    )


def _summed(graph: fx.Graph, node: fx.Node) -> int:
    if node.target is functional.all_reduce.default:
        if not (_own(node.args[0], rows=True) and _contiguous(node.args[0])):
            return 0
        node.target = functional.all_reduce_.default
        return 1
    if node.target is not functional.all_reduce_coalesced.default:
        return 0
    operands = node.args[0]
    assert isinstance(operands, list | tuple)
    own = [_own(operand, rows=True) and _contiguous(operand) for operand in operands]
    if not any(own):
        return 0
    with graph.inserting_before(node):
        filled = [o if mine else _copied(graph, o) for o, mine in zip(operands, own, strict=True)]
    node.args = (filled, *node.args[1:])
    node.target = functional.all_reduce_coalesced_.default
    return 1


def _contiguous(operand: Any) -> bool:
    return bool(operand.meta["val"].is_contiguous())


def _copied(graph: fx.Graph, operand: Any) -> fx.Node:
    how: dict[str, Any] = {"memory_format": torch.contiguous_format}
    copy = graph.call_function(aten.clone.default, (operand,), how)
    copy.meta["val"] = aten.clone.default(operand.meta["val"], **how)
    return copy


# -- pointwise ops ---------------------------------------------------------------------------------
def _pointwise(node: fx.Node) -> int:
    """Into the first operand; where an op does not mind the order, into the second."""
    target = _in_place(node.target)
    if target is None or not node.args:
        return 0
    if _fits(node.args[0], node):
        node.target = target
        return 1
    either = node.target in (aten.add.Tensor, aten.mul.Tensor) and not node.kwargs
    if either and len(node.args) == 2 and _fits(node.args[1], node):
        node.args = (node.args[1], node.args[0])
        node.target = target
        return 1
    return 0


def _fits(operand: Any, node: fx.Node) -> bool:
    """Whether the result can lie where the operand lies."""
    if not isinstance(operand, fx.Node) or not _own(operand) or _mentions(node, operand) > 1:
        return False
    mine, found = node.meta.get("val"), operand.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(found, torch.Tensor):
        return False
    return (mine.shape, mine.dtype, mine.stride()) == (found.shape, found.dtype, found.stride())


def _mentions(node: fx.Node, operand: fx.Node) -> int:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found.count(operand)


def _in_place(target: Any) -> OpOverload | None:
    """The in-place form of a pointwise op, or of one that places some elements into others."""
    packet = target.overloadpacket
    if target.namespace != "aten" or target._schema.is_mutable:
        return None
    if torch.Tag.pointwise not in target.tags and packet not in _PLACING:
        return None
    overloads = getattr(aten, f"{packet.__name__}_", None)
    form = getattr(overloads, target._overloadname, None)
    if not isinstance(form, OpOverload):
        return None
    info = form._schema.arguments[0].alias_info
    return form if info is not None and info.is_write else None


_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.t, aten.transpose, aten.permute)


def fill_buckets(graph: fx.Graph, room: float = math.inf) -> int:
    """Let products fill the buckets that they are copied into, in a graph whose order is final; how
    many do. `room`: the bytes of buckets that may be there before they are full.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    count = 0
    for node in list(place):
        value = node.meta.get("val")
        if node.target is not aten.cat.default or value.dim() != 1 or value.nbytes > room:
            continue
        products = [_product(part) for part in node.all_input_nodes]
        able = [product for product in products if product is not None]
        if able and len(products) == len(node.args[0]):  # none twice
            _fill(graph, node, products, min(able, key=place.__getitem__))
            room -= value.nbytes
            count += len(able)
    return count


def _product(part: fx.Node) -> fx.Node | None:
    """The product whose numbers a part of a bucket is, in their order, if nothing else reads it."""
    node = part
    while len(node.users) == 1 and getattr(node.target, "overloadpacket", None) in _RESHAPES:
        shown = node.all_input_nodes[0]
        if node.target is aten.reshape.default and not shown.meta["val"].is_contiguous():
            return None  # a copy in another order
        node = shown
    alone = node.target is aten.mm.default and len(node.users) == 1
    return node if alone and node.meta["val"].is_contiguous() else None


def _fill(
    graph: fx.Graph, bucket: fx.Node, products: Sequence[fx.Node | None], first: fx.Node
) -> None:
    value, parts = bucket.meta["val"], bucket.all_input_nodes
    with graph.inserting_before(first):
        kind = {"dtype": value.dtype, "device": value.device}
        whole = made(graph, aten.empty.memory_format, ([value.numel()],), value, kind)
    bucket.replace_all_uses_with(whole)
    start = 0
    for part, product in zip(parts, products, strict=True):
        stop = start + part.meta["val"].numel()
        with graph.inserting_before(product or bucket):
            slot = computed(graph, aten.slice.Tensor, (whole, 0, start, stop))
            if product is None:
                made(graph, aten.copy_.default, (slot, part), slot.meta["val"])
            else:
                own = product.meta["val"]
                slot = computed(graph, aten.view.default, (slot, list(own.shape)))
                made(graph, aten.mm.out, product.args, own, {"out": slot}).meta = product.meta
        start = stop
    graph.erase_node(bucket)
    for part, product in zip(parts, products, strict=True):
        node = part
        while product is not None and not node.users:
            unused, node = node, node.all_input_nodes[0]
            graph.erase_node(unused)
            if unused is product:
                break
