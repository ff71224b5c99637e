"""A sum of cost tables that is too entangled for elimination: values near its minimum, and a bound.

Example: in a DenseNet every layer reads all layers before it, so the exact search would need one
table over 32 variables. Two approximations of elimination.py stand in for it.

The bound and the first values come from mini-buckets (Dechter and Rish, Journal of the ACM 50,
2003): where eliminating a variable would take too large a table, its tables are minimised in groups
of their own, and the sum of the groups' minima is at most the minimum of their sum. From there, and
from the first value of each, the values descend: some variables are held, so that the others can be
eliminated exactly, in turns until no turn lowers the cost.

Sizes and tables enter, a cost with its values and a lower bound leave. Called by exact_search.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.planner.elimination import (
    Memo,
    Table,
    drop_settled_variables,
    eliminate,
    minimise,
    neighbours_of,
    simulate_order,
    table_size,
)

_LARGEST = 1 << 20  # entries of one table
_TURNS = 24  # of a descent, at most
_PATIENCE = 4  # turns without a gain that end it
_GAIN = 1e-6  # of the cost: what counts as a gain

Array = NDArray[np.float64]


class NearMinimum(NamedTuple):
    """A total cost, the values that reach it, and a bound that no values are below."""

    cost: float
    values: list[int]
    bound: float


def minimise_nearly(sizes: Sequence[int], tables: Sequence[Table]) -> NearMinimum:
    """Return values whose total cost is near the least, and a lower bound of it.

    `sizes`: the number of values of each variable.
    """
    tables = drop_settled_variables(tables)
    bound, greedy = mini_buckets(sizes, tables)
    starts = greedy, [0] * len(sizes)  # a variable's first value fits the first of its neighbours
    cost, values = min(descend(sizes, tables, start) for start in starts)
    return NearMinimum(cost, values, min(bound, cost))


def total_cost(tables: Sequence[Table], values: Sequence[int]) -> float:
    """Return the sum of the tables' entries at these values."""
    return math.fsum(float(t.costs[tuple(values[v] for v in t.variables)]) for t in tables)


def mini_buckets(sizes: Sequence[int], tables: Sequence[Table]) -> tuple[float, list[int]]:
    """Return a lower bound of the total cost, and values that are chosen greedily in the order in
    which the bound settles them.
    """
    memo: Memo = {}
    fixed: list[list[Table]] = [[] for _ in sizes]
    neighbours = neighbours_of(sizes, [table.variables for table in tables])
    _, order, _ = simulate_order(sizes, neighbours, table_size)
    place = {variable: i for i, variable in enumerate(order)}
    bound = math.fsum(float(table.costs) for table in tables if not table.variables)

    def enter(table: Table) -> None:
        fixed[min(table.variables, key=lambda v: place[v])].append(table)

    for table in tables:
        if table.variables:
            enter(table)
    for variable in order:
        for group in _groups(fixed[variable], sizes):
            around = tuple(sorted({v for t in group for v in t.variables} - {variable}))
            costs, _ = eliminate(variable, around, group, sizes, memo)
            if around:
                enter(Table(around, costs))
            else:
                bound += float(costs)
    values = [0] * len(sizes)
    for variable in reversed(order):
        values[variable] = _best_value(variable, fixed[variable], sizes, values)
    return bound, values


def _groups(tables: Sequence[Table], sizes: Sequence[int]) -> list[list[Table]]:
    """Return the tables in groups whose sums are not too large, the largest tables first."""
    groups: list[tuple[set[int], list[Table]]] = []
    for table in sorted(tables, key=lambda t: -t.costs.size):
        for variables, group in groups:
            if math.prod(sizes[v] for v in variables | set(table.variables)) <= _LARGEST:
                variables.update(table.variables)
                group.append(table)
                break
        else:
            groups.append((set(table.variables), [table]))
    return [group for _, group in groups]


def _best_value(
    variable: int, tables: Sequence[Table], sizes: Sequence[int], values: Sequence[int]
) -> int:
    """Return the best value of a variable where the others of its tables have theirs."""
    total = np.zeros(sizes[variable])
    for table in tables:
        total += table.costs[
            tuple(slice(None) if v == variable else values[v] for v in table.variables)
        ]
    return int(total.argmin())


def descend(
    sizes: Sequence[int], tables: Sequence[Table], values: Sequence[int]
) -> tuple[float, list[int]]:
    """Return values of no higher cost, and their cost. Every turn holds as few variables as leave
    the others to elimination, first those that were held least.
    """
    values, cost = list(values), total_cost(tables, values)
    memo: Memo = {}
    times_fixed, slices = [0] * len(sizes), Slices()
    turns_without_gain = 0
    for _ in range(_TURNS):
        fixed, order = _cut_set(sizes, tables, times_fixed)
        sliced = [slices.at(table, fixed, values) for table in tables]
        _, turned = minimise(sizes, sliced, memo, order)
        turned = [values[v] if v in fixed else value for v, value in enumerate(turned)]
        turned_cost = total_cost(tables, turned)
        turns_without_gain = 0 if turned_cost < cost * (1 - _GAIN) else turns_without_gain + 1
        if turned_cost < cost:
            values, cost = turned, turned_cost
        if not fixed or turns_without_gain == _PATIENCE:
            break
        for variable in fixed:
            times_fixed[variable] += 1
    return cost, values


class Slices:
    """Tables with some variables held at values; equal slices of one array are one array, so that
    eliminations of equal layers are remembered.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Array] = {}

    def at(self, table: Table, fixed: Collection[int], values: Sequence[int]) -> Table:
        """Return the table over the variables that are not held."""
        index = tuple(values[v] if v in fixed else None for v in table.variables)
        if all(value is None for value in index):
            return table
        key = (id(table.costs), index)
        if key not in self._known:
            place = tuple(slice(None) if value is None else value for value in index)
            self._known[key] = np.asarray(table.costs[place])
        return Table(tuple(v for v in table.variables if v not in fixed), self._known[key])


def _cut_set(
    sizes: Sequence[int], tables: Sequence[Table], times_fixed: Sequence[int]
) -> tuple[set[int], list[int]]:
    """Return variables without which no elimination takes a large table, and an order of the
    others. Where the smallest table would be large, the variable of that table is held that was
    held least, then the one of most neighbours.
    """
    neighbours = neighbours_of(sizes, [table.variables for table in tables])
    queue = [(table_size(v, sizes, neighbours), v) for v in range(len(sizes))]
    heapq.heapify(queue)
    gone: set[int] = set()
    fixed: set[int] = set()
    order: list[int] = []
    while queue:
        size, variable = heapq.heappop(queue)
        if variable in gone:
            continue
        if size != (now := table_size(variable, sizes, neighbours)):
            heapq.heappush(queue, (now, variable))
            continue
        around = neighbours[variable]
        if size[0] > _LARGEST:
            leaving = min(
                {variable, *around}, key=lambda v: (times_fixed[v], -len(neighbours[v]), v)
            )
            fixed.add(leaving)
            changed = set(neighbours[leaving])
        else:
            leaving, changed = variable, set(around)
            order.append(variable)
            for other in around:
                neighbours[other] |= around - {other}
        gone.add(leaving)
        for other in changed:
            neighbours[other].discard(leaving)
            heapq.heappush(queue, (table_size(other, sizes, neighbours), other))
        if leaving != variable:
            heapq.heappush(queue, (table_size(variable, sizes, neighbours), variable))
    return fixed, order
