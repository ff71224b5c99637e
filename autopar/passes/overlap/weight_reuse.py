"""The derived forward in two further forms, by which weights are gathered across ranks once for
several forwards.

    mm(x, all_gather(w))          the derived forward gathers a weight
    …, all_gather(w)              gathering: it returns the gathered weight, too
    mm(x, whole)                  reusing: it takes that in place of what it would gather

What is kept is computed of the parameters alone, which no forward of a step changes: the value that
the first other call takes, so a change of dtype or of shape after the gather is made once, too. The
backward takes the same memory, as it was saved. Source: FullyShardedDataParallel's
SHARD_GRAD_OP; ZeRO, arXiv 1910.02054, section 7.

A derived forward enters before it is scheduled. `gathered_weights` says what is kept, the gathering
form returns it as well (`with_more_results` of ir/graph.py), and `from_gathered` makes the reusing
one. runtime/reusing_forward.py asks, and runtime/backends.py schedules and runs both.
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
