"""emit: the last touches that make a rewritten graph run where the ranks are."""

from __future__ import annotations

import dataclasses

from torch import fx

from ..program import Input, Program, same_inputs


def emit(program: Program) -> Program:
    """The program with what nothing uses removed."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(program.module.graph, copied)
    assert output is not None
    graph.output(output)
    for node in graph.nodes:
        # what torch hands on to the graphs that it derives, for timelines
        node.meta["custom"] = {"node": node.name, "module": node.meta.get("chain", "")}
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    entries = _used(graph, program.signature.inputs)
    module = fx.GraphModule(program.module, graph, class_name="Parallel")
    return dataclasses.replace(
        program, module=module, signature=dataclasses.replace(program.signature, inputs=entries)
    )


def check(program: Program) -> None:
    """The contract: placeholders are what the signature says, every call is used, and no tensor is
    made on a numbered device.
    """
    same_inputs(program)
    for node in program.module.graph.nodes:
        assert node.op != "call_function" or node.users, f"nothing uses {node.name}"
        device = node.kwargs.get("device")
        assert device is None or device.index is None, f"{node.name} is made on {device}"


def _used(graph: fx.Graph, inputs: tuple[Input, ...]) -> tuple[Input, ...]:
    """The inputs less the coordinates and the seed that nothing uses; their placeholders are
    removed.
    """
    unused = {
        node.name: node for node in graph.nodes if node.op == "placeholder" and not node.users
    }
    gone = {e.node for e in inputs if e.kind in ("coordinate", "seed") and e.node in unused}
    for name in gone:
        graph.erase_node(unused[name])
    return tuple(e for e in inputs if e.node not in gone)
