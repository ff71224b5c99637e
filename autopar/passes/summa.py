"""pipeline: cut gathers into pieces that overlap with the products that use them.

Here: the panels of SUMMA, for layouts that ask for them (Grid25D). Where a product gathers its X
over the column axis and its W over the row axis, both gathers and the product become one
`summa_linear`, which never holds more than two panels of each.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import fx

from autopar.ir.layout import Layout
from autopar.ir.program import Program, same_inputs
from autopar.ops import collectives, sharded
from autopar.ops.sharded.inner_collectives import Part, moving

aten = torch.ops.aten


def summa(program: Program) -> Program:
    """Panels for every product that gathers both operands for itself alone; the program as it is
    for layouts without panels.
    """
    assert program.plan is not None
    if not program.plan.panels:
        return program
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(program.module.graph, copied)
    assert output is not None
    graph.output(output)
    row, column = program.plan.panels
    for node in list(graph.nodes):
        product = _product(node, row, column)
        if product is not None:
            _replace(graph, node, product, (row, column), str(program.plan.mesh))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return dataclasses.replace(program, module=fx.GraphModule(program.module, graph))


def check(program: Program) -> None:
    """The contract: no panel product is left with a gathered operand, and placeholders are what the
    signature says.
    """
    same_inputs(program)
    for node in program.module.graph.nodes:
        if node.target is sharded.summa_linear:
            gathered = [n.name for n in node.args[:2] if _gathers(n, *node.args[3:5])]
            assert not gathered, f"{node.name} takes {gathered}, which are gathered already"


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product and the gathers of its operands: X over the column axis, W over the row axis."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


def _product(node: fx.Node, row: str, column: str) -> _Product | None:
    """The parts of a product that panels can take over; None for any other node."""
    transposed = node.target is aten.addmm.default
    arguments = [a if isinstance(a, fx.Node) else None for a in node.args]
    if node.target is aten.linear.default:
        x, weight, bias = (*arguments, None)[:3]
    elif transposed and not node.kwargs:
        bias, x, weight = arguments
    else:
        return None
    inner = 0 if transposed else -1  # the dim of the weight that is k
    if x is None or weight is None:
        return None
    if not (_gathered(x, column, -1) and _gathered(weight, row, inner)):
        return None
    if any(_gathers(gathered.all_input_nodes[0], row, column) for gathered in (x, weight)):
        return None  # what is broadcast in panels lies on both axes
    return _Product(x, weight, bias, transposed)


def _gathered(node: fx.Node, axis: str, dim: int) -> bool:
    """Whether a node gathers contiguous blocks of this dim over this axis alone, for one user."""
    if node.target is not collectives.all_gather or len(node.users) > 1:
        return False
    before: Layout = node.meta["step"].before
    dim %= len(before.shape)
    whole = node.kwargs["axis"] == axis and node.kwargs["dim"] == dim
    contiguous = node.kwargs["inner"] == before.local_shape[dim] and len(before.digits(dim)) == 1
    return bool(whole and contiguous and node.kwargs.get("to", "R") == "R")


def _gathers(node: fx.Node, *axes: str) -> bool:
    return node.target is collectives.all_gather and node.kwargs["axis"] in axes


_MOVES: tuple[tuple[Literal["broadcast", "reduce"], bool], ...] = (
    ("broadcast", False),
    ("broadcast", True),
    ("reduce", True),
)


def _replace(
    graph: fx.Graph, node: fx.Node, product: _Product, axes: tuple[str, str], mesh: str
) -> None:
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    coordinates = [placeholders[f"coordinate_{axis}"] for axis in axes]
    x, weight = product.x.all_input_nodes[0], product.weight.all_input_nodes[0]
    with graph.inserting_before(node):
        arguments = (x, weight, product.bias, *axes, mesh, coordinates, product.transposed)
        wide = {k: v for k, v in product.weight.kwargs.items() if k == "reduce_dtype"}
        new = graph.call_function(sharded.summa_linear, arguments, wide)
    new.meta = dict(node.meta)
    places = (1, 2) if product.transposed else (0, 1)  # of X and W among the operands
    moved = [
        (Part.all(place, gathered.meta["step"].after), axis, gathered.meta["element"])
        for place, gathered, axis in zip(places, (product.x, product.weight), reversed(axes))
    ]
    new.meta["inside"] = [
        moving(kind, part, (axis,), late, element.of(kind, late))
        for kind, late in _MOVES
        for part, axis, element in moved
    ]
    node.replace_all_uses_with(new)
    graph.erase_node(node)
