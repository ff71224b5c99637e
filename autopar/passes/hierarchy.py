"""route: gradients' sums and weights' gathers that may go as one (passes/overlap/bucket.py) all
go in the levels that are the fastest for all of them together.

rewrite.py takes for each the levels that are the fastest for it alone. A bias may then go in others
than the weight beside it, and no bucket can hold both.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterator

from torch import fx

from autopar.cost.communication import SentCollective, fastest_hierarchy, sent_collectives
from autopar.cost.simulator.buckets import SIZES
from autopar.ir.graph import copied, stored
from autopar.ir.program import Program, same_inputs
from autopar.ops.collectives import set_hierarchy
from autopar.world import World


def choose_hierarchies(program: Program, world: World) -> Program:
    """The program with these levels; itself where all go so already."""
    others = {}
    for several in _alike(program):
        first = several[0]
        whole = min(sum(move.bytes for move in several), SIZES[-1])
        kind, mesh = first.traffic.collective, first.layout.mesh
        inside = fastest_hierarchy(kind, first.axes, mesh, whole, world)
        others.update({(m.node.name, m.backward): inside for m in several if m.levels != inside})
    if not others:
        return program
    graph = copied(program.module.graph)
    nodes = {node.name: node for node in graph.nodes}
    for (name, backward), inside in others.items():
        set_hierarchy(nodes[name], backward, inside)
    return dataclasses.replace(program, module=fx.GraphModule(program.module, graph))


def check(program: Program) -> None:
    """The contract: placeholders are what the signature says, and what may go as one goes in the
    same levels.
    """
    same_inputs(program)
    for several in _alike(program):
        found = {move.levels for move in several}
        first = several[0]
        assert len(found) == 1, f"what may be joined with {first.node.name} goes in {found}"


def _alike(program: Program) -> Iterator[list[SentCollective]]:
    """The collectives of stored tensors that are small enough for a bucket, by what they share."""
    found: dict[Hashable, list[SentCollective]] = defaultdict(list)
    early = stored(program)
    for move in sent_collectives(program):
        if move.node in early and not (move.inside or move.again) and move.bytes <= SIZES[-1] / 2:
            kind, late = move.traffic.collective, move.backward
            found[kind, move.axes, move.element_bytes, late].append(move)
    yield from found.values()
