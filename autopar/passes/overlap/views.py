"""Makes a derived graph correct for any memory layout of its inputs and intermediate results.

    view(transpose(mse_loss_backward(...)), [48, 16])    ->    reshape(...)
    all_gather_into_tensor(x)                            ->    all_gather_into_tensor(contiguous(x))

AOTAutograd decides by predicted strides whether a reshape is a view and whether a copy can be left
out. The prediction fails where an op's kernel gives other strides than its meta function says (the
gradient of `mse_loss` of a transposed tensor), and where an input has other strides than in the
first step. Eager would copy there; a view raises, and `as_strided` would read other numbers.
`reshape` and `contiguous` copy only where they must. Views whose strides are certain stay: those of
matmuls, of collectives' results, and of everything with one dim.

runtime/backends.py calls `views` after `reinplace`, on both graphs.
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
    """Turn views into reshapes where strides are uncertain, in place. `operands` also makes
    contiguous what a collective sends, and what is reinterpreted as another dtype or by strides;
    compilers do that themselves.
    """
    certain: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if not certain.issuperset(node.all_input_nodes):
            if node.target in _VIEWS:
                node.target = aten.reshape.default
            elif operands and _needs_contiguous(node):
                _make_contiguous(graph, node, certain)
        if _has_certain_strides(node, certain):
            certain.add(node)


def check(graph: fx.Graph) -> None:
    """The contract: no view takes a value whose strides are uncertain."""
    graph.lint()
    certain: set[fx.Node] = set()
    for node in graph.nodes:
        doubtful = set(node.all_input_nodes) - certain
        assert not (node.target in _VIEWS and doubtful), f"{node.name} views {doubtful}"
        if _has_certain_strides(node, certain):
            certain.add(node)


def _needs_contiguous(node: fx.Node) -> bool:
    """Whether an op reads its operands by their place in memory."""
    return node.target in _READERS or collective_of(node) is not None


def _has_certain_strides(node: fx.Node, certain: set[fx.Node]) -> bool:
    """Whether the strides of a result are those of its `meta["val"]` in every run."""
    if node.op != "call_function":
        return False
    if is_wait(node) or carries_on(node) or writes(node):
        return node.target is aten.contiguous.default or certain.issuperset(node.all_input_nodes)
    if node.target in _CERTAIN or collective_of(node) is not None or not node.all_input_nodes:
        return True
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() < 2


def _make_contiguous(graph: fx.Graph, node: fx.Node, certain: set[fx.Node]) -> None:
    """Make the uncertain operands contiguous that are predicted to be."""

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
