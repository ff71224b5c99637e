"""Chooses the kernel of each linear's matmuls: in which order in memory they take their operands.

A GEMM library has a kernel for each form (NN, NT, TN), and for some sizes one form is so much
slower that copying an operand into the other order first is faster. Calibration measures this
(`Device.forms`), and this pass replaces such linears by `sharded.linear`, which copies. Linears
that gain nothing, or that were not measured, stay as they are. planner/planner.py runs it after
`summa`, on the graph of one rank.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.ir.program import Program, same_inputs
from autopar.ops import sharded
from autopar.world import Copied, Device, World

aten = torch.ops.aten
_CopyPerMatmul = tuple[Copied, Copied, Copied]


def kernel_choice(program: Program, world: World) -> Program:
    """Return the program with every linear that gains by a copy replaced by `sharded.linear`."""
    copies = {
        node.name: copied
        for node in program.module.graph.nodes
        if any(copied := _operands_to_copy(node, program, world.device))
    }
    if not copies:
        return program
    graph = fx.Graph()
    output = graph.graph_copy(program.module.graph, {})
    assert output is not None
    graph.output(output)
    for node in list(graph.nodes):
        if node.name in copies:
            _replace(graph, node, copies[node.name])
    return dataclasses.replace(program, module=LazyGraphModule(program.module, graph))


def check(program: Program) -> None:
    """The contract: placeholders match the signature, and every `sharded.linear` copies at least
    one operand.
    """
    same_inputs(program)
    for node in program.module.graph.nodes:
        if node.target is sharded.linear:
            assert any(node.args[3]), f"{node.name} copies nothing: it is an ordinary linear"


def _operands_to_copy(node: fx.Node, program: Program, device: Device) -> _CopyPerMatmul:
    """Return which operand to copy in each of the three matmuls of a linear: the forward, the
    gradient of x, and the gradient of the weight. An entry is "" where nothing is copied.
    """
    nothing: _CopyPerMatmul = ("", "", "")
    if node.target is not aten.linear.default or node.kwargs or not device.forms:
        return nothing
    assert program.plan is not None
    x, weight = program.plan.choices[node.meta["source"]].operands[:2]
    assert x is not None and weight is not None
    *rows, k = x.local_shape
    n, dtype, m = weight.local_shape[0], node.meta["dtype"], math.prod(rows)
    if not rows:
        return nothing
    return (
        device.to_copy(dtype, m, n, k, "NT"),
        device.to_copy(dtype, m, k, n, "NN"),
        device.to_copy(dtype, n, k, m, "TN"),
    )


def _replace(graph: fx.Graph, node: fx.Node, copied: _CopyPerMatmul) -> None:
    """Put a `sharded.linear` that copies these operands in the place of a linear."""
    x, weight, bias = (*node.args, None)[:3]
    with graph.inserting_before(node):
        new = graph.call_function(sharded.linear, (x, weight, bias, copied))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
