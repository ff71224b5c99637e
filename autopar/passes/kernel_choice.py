"""forms: products take their operands in the order in memory that calibration found the fastest
(`Device.forms`); where nothing gains, or nothing was measured, they stay as they are.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from autopar.ir.program import Program, same_inputs
from autopar.ops import sharded
from autopar.world import Copied, Device, World

aten = torch.ops.aten
_Three = tuple[Copied, Copied, Copied]


def choose_kernels(program: Program, world: World) -> Program:
    """The program with every linear for which a copy gains as `sharded.linear`."""
    found = {
        node.name: copied
        for node in program.module.graph.nodes
        if any(copied := _copied(node, program, world.device))
    }
    if not found:
        return program
    graph = fx.Graph()
    output = graph.graph_copy(program.module.graph, {})
    assert output is not None
    graph.output(output)
    for node in list(graph.nodes):
        if node.name in found:
            _replace(graph, node, found[node.name])
    return dataclasses.replace(program, module=fx.GraphModule(program.module, graph))


def check(program: Program) -> None:
    """The contract: placeholders are what the signature says, and what stands for a linear copies
    something.
    """
    same_inputs(program)
    for node in program.module.graph.nodes:
        if node.target is sharded.linear:
            assert any(node.args[3]), f"{node.name} copies nothing: it is an ordinary linear"


def _copied(node: fx.Node, program: Program, device: Device) -> _Three:
    """What to copy in the product itself, and in those for the gradients of x and the weight."""
    nothing: _Three = ("", "", "")
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


def _replace(graph: fx.Graph, node: fx.Node, copied: _Three) -> None:
    x, weight, bias = (*node.args, None)[:3]
    with graph.inserting_before(node):
        new = graph.call_function(sharded.linear, (x, weight, bias, copied))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
