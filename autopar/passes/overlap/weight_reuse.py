"""The derived forward in two further forms, by which weights are gathered across ranks once for
several forwards.

    mm(x, all_gather(w))          the derived forward gathers a weight
    …, all_gather(w)              gathering: it returns the gathered weight, too
    mm(x, whole)                  reusing: it takes that in place of what it would gather

What is kept is computed of the parameters alone, which no forward of a step changes: the value that
the first other call takes, so a change of dtype or of shape after the gather is made once, too. The
backward takes the same memory, as it was saved. Source: FullyShardedDataParallel's
SHARD_GRAD_OP; ZeRO, arXiv 1910.02054, section 7.

A copy of a derived forward enters before it is scheduled, and one of the forms leaves.
runtime/backends.py schedules and runs both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from autopar.cost.simulator.graph_events import collective_of
from autopar.ir.graph import copy_graph, values_of_alone
from autopar.passes.overlap import erase_unused


def gathered_weights(forward: fx.Graph, parameters: Collection[str]) -> tuple[str, ...]:
    """Return the names of the nodes that are the gathered weights of a derived forward.
    `parameters`: the names of the placeholders that no forward of a step changes.
    """
    values = values_of_alone(forward, parameters, lambda n: collective_of(n) is not None)
    return tuple(node.name for node in values)


def with_gathered(forward: fx.Graph, names: Sequence[str]) -> fx.Graph:
    """Return a copy that returns these values, too, after its other results."""
    graph = copy_graph(forward)
    output, nodes = graph.output_node(), {node.name: node for node in graph.nodes}
    (results,) = output.args
    assert isinstance(results, tuple | list)
    output.args = ((*results, *(nodes[name] for name in names)),)
    return graph


def from_gathered(forward: fx.Graph, names: Sequence[str]) -> fx.Graph:
    """Return a copy that takes these values after its other operands, and gathers none of them."""
    graph = copy_graph(forward)
    nodes = {node.name: node for node in graph.nodes}
    last = graph.find_nodes(op="placeholder")[-1]
    for number, name in enumerate(names):
        with graph.inserting_after(last):
            last = graph.placeholder(f"gathered_{number}")
        last.meta["val"] = nodes[name].meta["val"]
        nodes[name].replace_all_uses_with(last)
    erase_unused(graph)
    return graph
