"""Gives collectives that may share a bucket the same hierarchy, so that the bucket can hold them
all.

rewrite.py picks for each gradient reduction and weight gather the hierarchical collective that is
fastest for it alone. A small bias may then be sent in other levels than the weight of the same
layer, and no bucket (passes/overlap/bucket.py) could join the two. This pass picks again: one
hierarchy for all that agree in collective, axes, element size and direction, the fastest for their
bytes together (at most those of the largest bucket). planner/planner.py runs it after `rewrite`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterator

from autopar._compat import LazyGraphModule
from autopar.cost.communication import SentCollective, fastest_hierarchy, sent_collectives
from autopar.cost.simulator.buckets import SIZES
from autopar.ir.graph import copy_graph, stored_nodes
from autopar.ir.program import Program, same_inputs
from autopar.ops.collectives import set_hierarchy
from autopar.world import World


def hierarchy(program: Program, world: World) -> Program:
    """Return the program in which collectives that may share a bucket have the same hierarchy; the
    same program where they agree already.
    """
    new_levels = {}
    for group in _bucket_groups(program):
        first = group[0]
        bucket_bytes = min(sum(move.bytes for move in group), SIZES[-1])
        kind, mesh = first.traffic.collective, first.layout.mesh
        levels = fastest_hierarchy(kind, first.axes, mesh, bucket_bytes, world)
        new_levels.update(
            {(m.node.name, m.backward): levels for m in group if m.hierarchy != levels}
        )
    if not new_levels:
        return program
    graph = copy_graph(program.module.graph)
    nodes = {node.name: node for node in graph.nodes}
    for (name, backward), levels in new_levels.items():
        set_hierarchy(nodes[name], backward, levels)
    return dataclasses.replace(program, module=LazyGraphModule(program.module, graph))


def check(program: Program) -> None:
    """The contract: placeholders match the signature, and collectives that may share a bucket have
    the same hierarchy.
    """
    same_inputs(program)
    for group in _bucket_groups(program):
        hierarchies = {move.hierarchy for move in group}
        first = group[0]
        assert len(hierarchies) == 1, (
            f"what may be joined with {first.node.name} goes in {hierarchies}"
        )


def _bucket_groups(program: Program) -> Iterator[list[SentCollective]]:
    """Yield the collectives of stored tensors that are small enough for a bucket, grouped by what a
    bucket requires to be equal: collective, axes, element size, forward or backward.
    """
    groups: dict[Hashable, list[SentCollective]] = defaultdict(list)
    on_stored = stored_nodes(program)
    for move in sent_collectives(program):
        if (
            move.node in on_stored
            and not (move.inside or move.again)
            and move.bytes <= SIZES[-1] / 2
        ):
            kind, late = move.traffic.collective, move.backward
            groups[kind, move.axes, move.element_bytes, late].append(move)
    yield from groups.values()
