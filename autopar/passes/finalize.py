"""The last changes to a rewritten graph before it runs: dead nodes and unused inputs are removed,
nodes are labelled for timelines, and results that alias one another are copied.

The program's graph of one rank enters, and the graph that is compiled and run leaves (class
"Parallel"). planner/planner.py and `emit_program` call this after `kernel_choice`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from autopar.ir.program import Input, Program, same_inputs
from autopar.ops import collectives
from autopar.world import World

aten = torch.ops.aten


def finalize(program: Program, world: World) -> Program:
    """Return the program without unused nodes and inputs, and with copies of the results that would
    share memory with another result or an input by way of a change of state.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(program.module.graph, copied)
    assert output is not None
    graph.output(output)
    for node in graph.nodes:
        # torch copies meta["custom"] to the graphs that it derives; timelines read it
        node.meta["custom"] = {"node": node.name, "module": node.meta.get("chain", "")}
    _copy_shared(graph)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    entries = _used(graph, program.signature.inputs)
    module = fx.GraphModule(program.module, graph, class_name="Parallel")
    return dataclasses.replace(
        program, module=module, signature=dataclasses.replace(program.signature, inputs=entries)
    )


def check(program: Program) -> None:
    """The contract: placeholders match the signature, every call is used, and no tensor is made on
    a numbered device.
    """
    same_inputs(program)
    for node in program.module.graph.nodes:
        assert node.op != "call_function" or node.users, f"nothing uses {node.name}"
        device = node.kwargs.get("device")
        assert device is None or device.index is None, f"{node.name} is made on {device}"


# Changes of state whose result may alias their operand.
_MAY_ALIAS = (
    collectives.invariant,
    collectives.partial,
    collectives.place,
    collectives.replicate,
    collectives.take_slice,
)


def _copy_shared(graph: fx.Graph) -> None:
    """Copy every result that shares memory with an earlier result, or with an input, by way of a
    change of state. AOTAutograd would regenerate such a result as a view of what it shares memory
    with, and so leave out the backward of the change.

    Example: in `return loss, loss.detach()` the second is copied, where `invariant` gives the loss.
    """
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    roots = [_memory_root(x) if isinstance(x, fx.Node) else (None, False) for x in results]
    seen: set[fx.Node] = set()
    for place, (root, changed) in enumerate(roots):
        if root is None:
            continue
        shared = root in seen or (root.op == "placeholder" and changed)
        if shared and any(other for same, other in roots if same is root):
            meta = results[place].meta
            with graph.inserting_before(output):
                results[place] = graph.call_function(aten.clone.default, (results[place],))
            results[place].meta = {k: meta[k] for k in ("val", "chain", "custom") if k in meta}
        seen.add(root)
    output.args = (tuple(results),)


def _memory_root(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return the node whose memory this node shares, and whether a change of state lies between the
    two.
    """
    changed = False
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        view = schema is not None and any(r.alias_info for r in schema.returns)
        if not (view or node.target in _MAY_ALIAS or node.target is aten.detach.default):
            break
        changed = changed or node.target in _MAY_ALIAS
        node = node.all_input_nodes[0]
    return node, changed


def _used(graph: fx.Graph, inputs: tuple[Input, ...]) -> tuple[Input, ...]:
    """Return the inputs without the coordinates and seeds that nothing uses, and erase the
    placeholders of those.
    """
    unused = {
        node.name: node for node in graph.nodes if node.op == "placeholder" and not node.users
    }
    erased = {e.node for e in inputs if e.kind in ("coordinate", "seed") and e.node in unused}
    for name in erased:
        graph.erase_node(unused[name])
    return tuple(e for e in inputs if e.node not in erased)
