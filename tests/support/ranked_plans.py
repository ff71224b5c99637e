"""Every plan on one mesh in ascending order of its modelled seconds: an oracle for searches.

`ranked` gives joint values of many variables by their total cost, the least first, without those
that exceed a cap on other totals. Eliminating the variables one by one (planner/elimination.py)
leaves, for each of them, what all that comes before it costs at least. Read backwards that is an
exact estimate for a best-first search (Hart, Nilsson and Raphael's A*, 1968). Tables of bytes,
eliminated in the same order, say what a branch needs at least.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.activations import ActivationMemory, bytes_of
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.sharding_rule import value_of
from autopar.planner.constraint import Constraint
from autopar.planner.elimination import Table, order_of, spread
from autopar.planner.exact_search import Search
from autopar.world import World

Cap = tuple[ActivationMemory, float]  # a count of bytes, and the most of them that a plan may need
Array = NDArray[np.float64]
_TINY = 1e-9  # of a cap: what rounding may add to a total that meets it


class _Step(NamedTuple):
    """One variable: what all before it costs for each of its values, less the least of these, given
    the places of its neighbours among the variables that are settled first.
    """

    neighbours: tuple[int, ...]
    more: Array


def ranked(
    sizes: Sequence[int],
    tables: Sequence[Table],
    capped: Sequence[tuple[Sequence[Table], float]] = (),
) -> Iterator[tuple[float, list[int]]]:
    """(total cost, value of every variable), in ascending order of the cost, of those whose total
    of each of the `capped` tables is at most its cap.

    `sizes`: how many values each variable has. Raises PlanError where the graph is too entangled
    for tables that fit in memory.
    """
    order = order_of(sizes, [*tables, *(t for others, _ in capped for t in others)])
    start, steps = _estimated(sizes, tables, order)
    others = [_estimated(sizes, tables, order) for tables, _ in capped]
    caps = [cap * (1 + _TINY) for _, cap in capped]
    if any(least > cap for (least, _), cap in zip(others, caps, strict=True)):
        return
    count, last = itertools.count(), len(order)
    heap: list[Any] = [(start, 0, next(count), (), tuple(least for least, _ in others))]
    while heap:
        cost, done, _, chosen, totals = heapq.heappop(heap)
        if -done == last:
            values = [0] * last
            for variable, value in zip(reversed(order), chosen, strict=True):
                values[variable] = value
            yield cost, values
            continue
        costs = cost + _row(steps[-done], chosen)
        found = [t + _row(s[-done], chosen) for t, (_, s) in zip(totals, others, strict=True)]
        left = np.ones(len(costs), dtype=bool)
        for total, cap in zip(found, caps, strict=True):
            left &= total <= cap
        kept: list[int] = np.flatnonzero(left).tolist()
        for value in kept:
            after = tuple(float(total[value]) for total in found)
            entry = (float(costs[value]), done - 1, next(count), (*chosen, value), after)
            heapq.heappush(heap, entry)


def _row(step: _Step, chosen: tuple[int, ...]) -> Array:
    found: Array = step.more[tuple(chosen[place] for place in step.neighbours)]
    return found


def _estimated(
    sizes: Sequence[int], tables: Sequence[Table], order: Sequence[int]
) -> tuple[float, list[_Step]]:
    """The least total, and the steps in which variables are settled: the last eliminated first."""
    held = list(tables)
    place = {variable: len(order) - 1 - i for i, variable in enumerate(order)}
    least, steps = 0.0, []
    for variable in order:
        parts = [table for table in held if variable in table.variables]
        held = [table for table in held if variable not in table.variables]
        neighbours = tuple(sorted({v for t in parts for v in t.variables} - {variable}))
        dims = (*neighbours, variable)
        where = {v: i for i, v in enumerate(dims)}
        total = np.zeros(tuple(sizes[v] for v in dims))
        for table in parts:
            total += spread(table, where, len(dims))
        lowest = total.min(-1)
        steps.append(_Step(tuple(place[v] for v in neighbours), total - lowest[..., None]))
        held.append(Table(neighbours, lowest))
    least = math.fsum(float(table.costs) for table in held)
    return least, steps[::-1]


def ascending(
    program: Program,
    mesh: Mesh,
    world: World,
    constraint: Constraint,
    caps: Sequence[Cap] = (),
) -> Iterator[Plan]:
    """Every plan of the search on this mesh that is within these caps, in ascending order of its
    seconds. For small graphs: nothing is left out. Raises PlanError where tables outgrow memory.
    """
    found = Search(program, mesh, world, constraint)
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
            own = kept.bytes_per_element(size, trained)
            each = [own * layout.local_size for layout in items]
        else:
            continue
        tables.append(Table((variable,), np.array(each, dtype=np.float64)))
    return tables
