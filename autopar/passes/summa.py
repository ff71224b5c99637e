"""Replaces matmuls that gather both operands by SUMMA, for layouts that ask for it (Grid25D).

    all_gather(x, column), all_gather(w, row), linear    ->    summa_linear(x, w, ...)

Where a matmul gathers its X over the column axis and its W over the row axis, and nothing else uses
the gathered values, one `summa_linear` broadcasts both in panels and multiplies panel by panel. It
overlaps communication with computation and never holds more than two panels of each operand.
planner/planner.py and `emit_program` run this after `hierarchy`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.ir.layout import Layout
from autopar.ir.program import Program, same_inputs
from autopar.ops import collectives, sharded
from autopar.ops.sharded import Part, moving
from autopar.world import World

aten = torch.ops.aten


def summa(program: Program, world: World) -> Program:
    """Return the program with SUMMA in place of every matmul that gathers both of its operands for
    itself alone; the same program for layouts without panels.
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
        matmul = _gathered_matmul(node, row, column)
        if matmul is not None:
            _replace(graph, node, matmul, (row, column), str(program.plan.mesh))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return dataclasses.replace(program, module=LazyGraphModule(program.module, graph))


def check(program: Program) -> None:
    """The contract: placeholders match the signature, and no `summa_linear` takes an operand that
    is gathered already.
    """
    same_inputs(program)
    for node in program.module.graph.nodes:
        if node.target is sharded.summa_linear:
            gathered = [n.name for n in node.args[:2] if _gathers(n, *node.args[3:5])]
            assert not gathered, f"{node.name} takes {gathered}, which are gathered already"


@dataclasses.dataclass(frozen=True)
class _GatheredMatmul:
    """A matmul with the gathers of its operands: X over the column axis, W over the row axis."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


def _gathered_matmul(node: fx.Node, row: str, column: str) -> _GatheredMatmul | None:
    """Return the parts of a matmul that SUMMA can take over; None for any other node."""
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
        return None  # a panel is broadcast from shards that lie on both axes
    return _GatheredMatmul(x, weight, bias, transposed)


def _gathered(node: fx.Node, axis: str, dim: int) -> bool:
    """Whether a node all-gathers contiguous blocks of this dim over this axis alone, and has one
    user.
    """
    if node.target is not collectives.all_gather or len(node.users) > 1:
        return False
    before: Layout = node.meta["step"].before
    dim %= len(before.shape)
    same_axis_and_dim = node.kwargs["axis"] == axis and node.kwargs["dim"] == dim
    contiguous = node.kwargs["inner"] == before.local_shape[dim] and len(before.digits(dim)) == 1
    return bool(same_axis_and_dim and contiguous and node.kwargs.get("to", "R") == "R")


def _gathers(node: fx.Node, *axes: str) -> bool:
    """Whether a node all-gathers over one of these axes."""
    return node.target is collectives.all_gather and node.kwargs["axis"] in axes


_COLLECTIVES: tuple[tuple[Literal["broadcast", "reduce"], bool], ...] = (
    ("broadcast", False),
    ("broadcast", True),
    ("reduce", True),
)


def _replace(
    graph: fx.Graph, node: fx.Node, matmul: _GatheredMatmul, axes: tuple[str, str], mesh: str
) -> None:
    """Put a `summa_linear` in the place of a matmul. Its `meta["inside"]` lists the collectives
    that it sends, for the cost model.
    """
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    coordinates = [placeholders[f"coordinate_{axis}"] for axis in axes]
    x, weight = matmul.x.all_input_nodes[0], matmul.weight.all_input_nodes[0]
    with graph.inserting_before(node):
        arguments = (x, weight, matmul.bias, *axes, mesh, coordinates, matmul.transposed)
        wide = {k: v for k, v in matmul.weight.kwargs.items() if k == "reduce_dtype"}
        new = graph.call_function(sharded.summa_linear, arguments, wide)
    new.meta = dict(node.meta)
    places = (1, 2) if matmul.transposed else (0, 1)  # of X and W among the operands
    moved = [
        (Part.all(place, gathered.meta["step"].after), axis, gathered.meta["element"])
        for place, gathered, axis in zip(places, (matmul.x, matmul.weight), reversed(axes))
    ]
    new.meta["inside"] = [
        moving(kind, part, (axis,), late, element.of(kind, late))
        for kind, late in _COLLECTIVES
        for part, axis, element in moved
    ]
    node.replace_all_uses_with(new)
    graph.erase_node(node)
