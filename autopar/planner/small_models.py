"""The fastest plan that fits, of a small model: its plans are tried in turn, the fastest
first, until one fits by its exact peak.

What a plan stores of its parameters, and what one that drops nothing keeps for its backward, are
bytes that no peak is below: a plan that exceeds the limit with these is never made.

`by_cost` gives the order. Eliminating the variables one by one (elimination.py) leaves, for each of
them, what all that comes before it costs at least. Read backwards that is an exact estimate for a
best-first search (Hart, Nilsson and Raphael's A*, 1968): a branch is entered only for what it
holds. Tables of bytes, eliminated in the same order, say what a branch needs at least.

Prices of bytes (fit.py) leave gaps between plans that few layers do not fill: of small
models that fit, they would refuse some. Called by fit.py.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.activations import ActivationMemory, MidstepMemory, ParameterMemory, bytes_of
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.sharding_rule import value_of
from autopar.passes import emit_program
from autopar.planner.bounds.factor_graph import frame
from autopar.planner.constraint import Constraint
from autopar.planner.elimination import Table, order_of, spread
from autopar.planner.exact_search import Search
from autopar.planner.rematerialize import RematerializationSteps, TriedRematerialization
from autopar.planner.request import PlanRequest
from autopar.planner.solve import with_requested_recomputation
from autopar.planner.space import Candidate
from autopar.world import World

Array = NDArray[np.float64]
Cap = tuple[ActivationMemory, float]  # a count of bytes, and the most of them that a plan may need
_TINY = 1e-9  # of a cap: what rounding may add to a total that meets it
_VARIABLES, _MESHES, _AXES = 16, 6, 2  # of a graph that counts as small
_TRIES = 1000  # plans whose peak is worked out


def is_small(program: Program, candidates: Sequence[Candidate]) -> bool:
    """Whether there are few plans enough to try all that are faster than the best that fits."""
    few = len(candidates) <= _MESHES and all(len(mesh.axes) <= _AXES for mesh, _ in candidates)
    return few and len(frame(program).variables) <= _VARIABLES


def fastest(
    program: Program,
    candidates: Sequence[Candidate],
    world: World,
    request: PlanRequest,
    below: float,
) -> tuple[Program | None, TriedRematerialization | None, float]:
    """Return the fastest plan that fits of those that take fewer than `below` seconds, as chosen,
    what it rematerializes (None and None where there is none), and a bound: no plan within the
    limit takes fewer seconds. It is `below` or the seconds of that plan, unless there were too
    many.
    """
    budget = request.budget
    assert budget is not None
    best: tuple[Program, TriedRematerialization] | None = None
    bound = below
    try:
        several = _all_ascending(program, candidates, world, request)
    except PlanError:  # too entangled to look at all of it
        return None, None, 0.0
    for number, plan in enumerate(several):
        if plan.seconds >= below * (1 - 1e-12) or number == _TRIES:
            bound = min(bound, plan.seconds)
            break
        chosen = with_requested_recomputation(dataclasses.replace(program, plan=plan), request)
        rematerialized = RematerializationSteps(emit_program(chosen, world), world, budget).least(
            below - plan.seconds
        )
        if rematerialized is not None and budget.fits(rematerialized.memory):
            best, below = (chosen, rematerialized), plan.seconds + rematerialized.seconds
            bound = below
    return (*best, bound) if best else (None, None, bound)


def _all_ascending(
    program: Program,
    candidates: Sequence[Candidate],
    world: World,
    request: PlanRequest,
) -> Iterator[Plan]:
    """Yield the plans of all meshes; ties go to the first. Raises PlanError before the first."""
    budget = request.budget
    assert budget is not None and budget.memory_bytes is not None
    caps: list[Cap] = [(ParameterMemory(program, budget.optimizer), budget.memory_bytes)]
    if budget.recompute == "none":
        caps.append((MidstepMemory(program, budget.optimizer), budget.memory_bytes))
    several = [ascending(program, mesh, world, rules, caps) for mesh, rules in candidates]
    first = [list(itertools.islice(plans, 1)) for plans in several]
    joined = [itertools.chain(*pair) for pair in zip(first, several, strict=True)]
    return heapq.merge(*joined, key=lambda plan: plan.seconds)


def ascending(
    program: Program,
    mesh: Mesh,
    world: World,
    constraint: Constraint,
    caps: Sequence[Cap] = (),
) -> Iterator[Plan]:
    """Yield every plan of the search on this mesh that is within these caps, in ascending order
    of its seconds. For small graphs: nothing is left out. Raises PlanError where tables outgrow
    memory.
    """
    problem = Search(program, mesh, world, constraint).enter()
    capped = [(_bytes(problem, saved), cap) for saved, cap in caps]
    for seconds, values in by_cost(problem.sizes, problem.tables, capped):
        yield problem.plan(seconds, values)


def _bytes(problem: Search, saved: ActivationMemory) -> list[Table]:
    """Return the bytes that every option of the variables saves."""
    nodes = {node.name: node for node in problem.program.module.graph.nodes}
    parameters = {e.node for e in problem.program.signature.inputs if e.kind == "parameter"}
    tables = []
    for name, variable in problem.index.items():
        items = problem.variables[variable].items
        if variable in problem.members:
            shares = [saved.of(nodes[member]) for member in problem.members[variable].nodes]
            each = [sum(map(bytes_of, shares, item)) for item in items]
        elif name in parameters:
            size = value_of(nodes[name]).dtype.itemsize
            own = saved.bytes_per_element(size, (name, 0) in problem.notes.gradient)
            each = [own * layout.local_size for layout in items]
        else:
            continue
        tables.append(Table((variable,), np.array(each, dtype=np.float64)))
    return tables


class _Step(NamedTuple):
    """One variable: what all before it costs for each of its values, less the least of these, given
    the places of its neighbours among the variables that are settled first.
    """

    neighbours: tuple[int, ...]
    more: Array


def by_cost(
    sizes: Sequence[int],
    tables: Sequence[Table],
    capped: Sequence[tuple[Sequence[Table], float]],
) -> Iterator[tuple[float, list[int]]]:
    """Yield (total cost, value of every variable) in ascending order of the cost, of those whose
    total of each of the `capped` tables is at most its cap.

    `sizes`: how many values each variable has. Raises PlanError where the graph is too entangled
    for tables that fit in memory.
    """
    every = [*tables, *(table for others, _ in capped for table in others)]
    order = order_of(sizes, [table.variables for table in every])
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
        sums = [t + _row(s[-done], chosen) for t, (_, s) in zip(totals, others, strict=True)]
        left = np.ones(len(costs), dtype=bool)
        for total, cap in zip(sums, caps, strict=True):
            left &= total <= cap
        left_values: list[int] = np.flatnonzero(left).tolist()
        for value in left_values:
            after = tuple(float(total[value]) for total in sums)
            entry = (float(costs[value]), done - 1, next(count), (*chosen, value), after)
            heapq.heappush(heap, entry)


def _row(step: _Step, chosen: tuple[int, ...]) -> Array:
    row: Array = step.more[tuple(chosen[place] for place in step.neighbours)]
    return row


def _estimated(
    sizes: Sequence[int], tables: Sequence[Table], order: Sequence[int]
) -> tuple[float, list[_Step]]:
    """Return the least total, and the steps in which variables are settled, the last eliminated
    first.
    """
    remaining = list(tables)
    place = {variable: len(order) - 1 - i for i, variable in enumerate(order)}
    least, steps = 0.0, []
    for variable in order:
        terms = [table for table in remaining if variable in table.variables]
        remaining = [table for table in remaining if variable not in table.variables]
        neighbours = tuple(sorted({v for t in terms for v in t.variables} - {variable}))
        dims = (*neighbours, variable)
        where = {v: i for i, v in enumerate(dims)}
        total = np.zeros(tuple(sizes[v] for v in dims))
        for table in terms:
            total += spread(table, where, len(dims))
        lowest = total.min(-1)
        steps.append(_Step(tuple(place[v] for v in neighbours), total - lowest[..., None]))
        remaining.append(Table(neighbours, lowest))
    least = math.fsum(float(table.costs) for table in remaining)
    return least, steps[::-1]
