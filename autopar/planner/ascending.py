"""All plans on one mesh in the order of their modelled seconds, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autopar.cost.activations import ActivationMemory, bytes_of
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.sharding_rule import value_of
from autopar.planner.constraint import Constraint
from autopar.planner.elimination import Table
from autopar.planner.exact_search import Search
from autopar.planner.ranking import ranked
from autopar.world import World

Cap = tuple[ActivationMemory, float]  # a count of bytes, and the most of them that a plan may need


def ascending(
    program: Program,
    mesh: Mesh,
    world: World,
    constraint: Constraint,
    redundant: bool = False,
    caps: Sequence[Cap] = (),
) -> Iterator[Plan]:
    """Every plan of the search on this mesh that is within these caps, in ascending order of its
    seconds. For small graphs: nothing is left out. Raises PlanError where tables outgrow memory.
    """
    found = Search(program, mesh, world, constraint, redundant)
    found.enter()
    capped = [(_bytes(found, kept), cap) for kept, cap in caps]
    for seconds, values in ranked(found.sizes, found.tables, capped):
        yield found.plan(seconds, values)


def _bytes(found: Search, kept: ActivationMemory) -> list[Table]:
    """What every option of the variables keeps."""
    nodes = {node.name: node for node in found.program.module.graph.nodes}
    parameters = {e.node for e in found.program.signature.inputs if e.kind == "parameter"}
    tables = []
    for name, variable in found.index.items():
        items = found.variables[variable].items
        if variable in found.members:
            shares = [kept.of(nodes[member]) for member in found.members[variable].nodes]
            each = [sum(map(bytes_of, shares, item)) for item in items]
        elif name in parameters:
            size, trained = value_of(nodes[name]).dtype.itemsize, (name, 0) in found.notes.gradient
            own = kept.stored(size, trained)
            each = [own * layout.local_size for layout in items]
        else:
            continue
        tables.append(Table((variable,), np.array(each, dtype=np.float64)))
    return tables
