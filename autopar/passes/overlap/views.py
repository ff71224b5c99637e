"""views: what a derived graph reads by its strides, it takes however it lies in memory.

AOTAutograd decides by predicted strides whether a reshape is a view and whether a copy can be left
out. The prediction fails where an op's kernel lays its result out in another way than its meta
function says (the gradient of `mse_loss` of a transposed tensor), and where a step is called with
an input that lies otherwise than that of the first step. Eager would have copied there; a view
raises, and `as_strided` would read other numbers.

Example: `view(transpose(mse_loss_backward(...)), [48, 16])` becomes `reshape(...)`, which is a view
where it can be, and an `all_gather_into_tensor(x)` takes `contiguous(x)`, which is `x` where it is.
What lies as predicted beyond doubt stays: views of products, of what a collective brought, and of
everything with one dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.cost.simulator.graph_events import carries_on, collective_of, is_wait, writes
from autopar.ir.graph import made

aten = torch.ops.aten

_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
_READERS = frozenset({aten.as_strided.default, aten.view.dtype, aten.view_as_complex.default})
_CERTAIN = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default})


def views(graph: fx.Graph, operands: bool = True) -> None:
    """Let views copy where they must. `operands`: and put what a collective sends, and what is read
    as other numbers than it holds, into order where it is not; compilers do that themselves.
    """
    certain: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if not certain.issuperset(node.all_input_nodes):
            if node.target in _VIEWS:
                node.target = aten.reshape.default
            elif operands and _needs_order(node):
                _put_in_order(graph, node, certain)
        if _lies_as_predicted(node, certain):
            certain.add(node)


def check(graph: fx.Graph) -> None:
    """The contract: no view and no reader of memory takes what may lie otherwise."""
    graph.lint()
    certain: set[fx.Node] = set()
    for node in graph.nodes:
        doubtful = set(node.all_input_nodes) - certain
        assert not (node.target in _VIEWS and doubtful), f"{node.name} views {doubtful}"
        if _lies_as_predicted(node, certain):
            certain.add(node)


def _needs_order(node: fx.Node) -> bool:
    return node.target in _READERS or collective_of(node) is not None


def _lies_as_predicted(node: fx.Node, certain: set[fx.Node]) -> bool:
    """Whether the strides of a result are those of its `meta["val"]` in every run."""
    if node.op != "call_function":
        return False
    if is_wait(node) or carries_on(node) or writes(node):
        return node.target is aten.contiguous.default or certain.issuperset(node.all_input_nodes)
    if node.target in _CERTAIN or collective_of(node) is not None or not node.all_input_nodes:
        return True
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() < 2


def _put_in_order(graph: fx.Graph, node: fx.Node, certain: set[fx.Node]) -> None:
    """Its doubtful operands contiguous, where they are predicted to be."""

    def ordered(operand: fx.Node) -> fx.Node:
        value: Any = operand.meta.get("val")
        predicted = isinstance(value, torch.Tensor) and value.is_contiguous()
        if operand in certain or not predicted:
            return operand
        contiguous = made(graph, aten.contiguous.default, (operand,), value)
        certain.add(contiguous)
        return contiguous

    assert isinstance(node.target, OpOverload)
    with graph.inserting_before(node):
        node.args = fx.node.map_arg(node.args, ordered)
