"""Two micro-batches in one graph, turn by turn: one computes while the other communicates.

    all_reduce(mm(x, w)), all_reduce(mm(x_2, w))    the products and sums of both, alternating

The micro-batches share what depends on stored tensors alone, such as gathered weights, so weights
are gathered and their gradients summed once for both. All else is there twice. The order within the
graph alternates; the schedule of the derived graphs moves collectives under the other micro-batch's
products (overlap/schedule.py). What it gains is modelled by `python -m
benchmarks.model.interleaved`.

An emitted program of one micro-batch enters, that of two leaves: after its own placeholders those
of the second micro-batch, after its own results the second micro-batch's. runtime/apply.py asks
where a plan says so.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from autopar.ir.graph import stored_nodes
from autopar.ir.program import Input, Program

_SECOND = "{}_2"


def interleave_microbatches(program: Program) -> Program:
    """Return the program of two micro-batches of an emitted program of one. Inputs of the second
    micro-batch have the names of the first's with "_2" after them.
    """
    shared = stored_nodes(program)
    graph = fx.Graph()
    twins: tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]] = {}, {}
    placeholders = program.module.graph.find_nodes(op="placeholder")
    entries = list(program.signature.inputs)
    own = [e for e in entries if is_own(e)]
    by_name = {node.name: node for node in placeholders}
    for node in placeholders:
        twins[0][node] = twins[1][node] = graph.node_copy(node)
    for entry in own:
        second = graph.placeholder(_SECOND.format(entry.node))
        second.meta = dict(by_name[entry.node].meta)
        twins[1][by_name[entry.node]] = second
    for node in program.module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        twins[0][node] = graph.node_copy(node, lambda n: twins[0][n])
        once = node.op == "get_attr" or node in shared
        twins[1][node] = twins[0][node] if once else graph.node_copy(node, lambda n: twins[1][n])
    (results,) = program.module.graph.output_node().args
    assert isinstance(results, tuple | list)
    nodes = [node for node in results if isinstance(node, fx.Node)]
    graph.output(tuple(env[node] for env in twins for node in nodes))
    return _of_both(program, fx.GraphModule(program.module, graph), own)


def is_own(entry: Input) -> bool:
    """Whether each micro-batch has its own value of an input: the user's, and seeds."""
    return entry.kind in ("user", "seed")


def _of_both(program: Program, module: fx.GraphModule, own: list[Input]) -> Program:
    names = {entry.node: _SECOND.format(entry.node) for entry in own}
    signature = dataclasses.replace(
        program.signature,
        inputs=(
            *program.signature.inputs,
            *(dataclasses.replace(entry, node=names[entry.node]) for entry in own),
        ),
        outputs=program.signature.outputs * 2,
    )
    layouts, dtypes = dict(program.layouts), dict(program.dtypes)
    for first, second in names.items():
        if first in layouts:
            layouts[second] = layouts[first]
        if first in dtypes:
            dtypes[second] = dtypes[first]
    return dataclasses.replace(
        program, module=module, signature=signature, layouts=layouts, dtypes=dtypes
    )
