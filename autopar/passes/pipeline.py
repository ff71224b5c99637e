"""pipeline: cut gathers into pieces that overlap with the products that use them.

Here: the panels of SUMMA, for layouts that ask for them (Grid25D). Where a product gathers its X
over the column axis and its W over the row axis, both gathers and the product become one
`panel_linear`, which never holds more than two panels of each.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from .. import collectives, sharded
from ..cost.inside import Inside
from ..layout import Layout, Traffic
from ..program import Program

aten = torch.ops.aten


def pipeline(program: Program) -> Program:
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
            _replace(graph, node, product, str(program.plan.mesh))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    outputs = tuple(
        o if o.node is None else dataclasses.replace(o, node=new.name)
        for o, new in zip(program.signature.outputs, _returned(program, copied), strict=True)
    )
    layouts = dict(program.layouts)
    for old, new in zip(program.signature.outputs, outputs, strict=True):
        if old.node is not None and new.node is not None:
            layouts[new.node] = program.layouts[old.node]
    signature = dataclasses.replace(program.signature, outputs=outputs)
    return dataclasses.replace(
        program, module=fx.GraphModule(program.module, graph), signature=signature, layouts=layouts
    )


def check(program: Program) -> None:
    """The contract: no panel product is left with a gathered operand, and placeholders are what the
    signature says.
    """
    program.module.graph.lint()
    names = [node.name for node in program.module.graph.nodes if node.op == "placeholder"]
    assert names == [entry.node for entry in program.signature.inputs], (
        "placeholders and signature differ"
    )
    for node in program.module.graph.nodes:
        if node.target is sharded.panel_linear:
            gathered = [
                n.name
                for n in node.args[:2]
                if n.target is collectives.all_gather and n.kwargs["axis"] in node.args[3:5]
            ]
            assert not gathered, f"{node.name} takes {gathered}, which are gathered already"


def _returned(program: Program, copied: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The copy of every output's node, None where an output is a constant."""
    nodes = {node.name: node for node in program.module.graph.nodes}
    return [
        copied[nodes[o.node]] if o.node is not None else None for o in program.signature.outputs
    ]  # type: ignore[misc]


@dataclasses.dataclass(frozen=True)
class _Product:
    x: fx.Node  # before the gather over the column axis
    weight: fx.Node  # before the gather over the row axis
    bias: fx.Node | None
    transposed: bool
    axes: tuple[str, str]


def _product(node: fx.Node, row: str, column: str) -> _Product | None:
    """The parts of a product that panels can take over; None for any other node."""
    if node.target is aten.linear.default:
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else None
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
    else:
        return None
    transposed = node.target is aten.addmm.default
    inner = -1 if not transposed else 0  # the dim of the weight that is k
    if not (_gathered(x, column, -1) and _gathered(weight, row, inner)):
        return None
    return _Product(x.args[0], weight.args[0], bias, transposed, (row, column))


def _gathered(node: object, axis: str, dim: int) -> bool:
    """Whether a node is a gather of contiguous blocks of this dim over this axis alone, for one
    user.
    """
    if (
        not isinstance(node, fx.Node)
        or node.target is not collectives.all_gather
        or len(node.users) > 1
    ):
        return False
    before: Layout = node.meta["step"].before
    dim %= len(before.shape)
    whole = (
        node.kwargs["axis"] == axis
        and node.kwargs["dim"] == dim
        and node.kwargs.get("to", "R") == "R"
    )
    return (
        whole and node.kwargs["inner"] == before.local_shape[dim] and len(before.digits(dim)) == 1
    )


def _replace(graph: fx.Graph, node: fx.Node, product: _Product, mesh: str) -> None:
    places = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    missing = [axis for axis in product.axes if f"coordinate_{axis}" not in places]
    assert not missing, f"no coordinate of {missing}"
    coordinates = [places[f"coordinate_{axis}"] for axis in product.axes]
    with graph.inserting_before(node):
        new = graph.call_function(
            sharded.panel_linear,
            (
                product.x,
                product.weight,
                product.bias,
                *product.axes,
                mesh,
                coordinates,
                product.transposed,
            ),
        )
    new.meta = dict(node.meta)
    # type: ignore[union-attr]
    x, weight = (n.meta["step"] for n in (node.args[1:] if product.transposed else node.args[:2]))
    moved = ((x.after.local_size, product.axes[1]), (weight.after.local_size, product.axes[0]))
    new.meta["inside"] = [
        Inside(Traffic(kind, size), (axis,), late)
        for kind, late in (("broadcast", False), ("broadcast", True), ("reduce", True))
        for size, axis in moved
    ]
    node.replace_all_uses_with(new)
    graph.erase_node(node)
