"""The minimum of a sum of small tables, exactly: variables are eliminated one by one, the cheapest
first.

A table gives a cost for every joint value of a few variables. Eliminating a variable adds up the
tables that hold it and minimises over it, which leaves one table over its neighbours (Bertelè and
Brioschi, Nonserial Dynamic Programming, 1972). Tables are compared by identity and eliminations are
remembered, so that the layers of a model, which share their tables, are worked out once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanError

LARGEST = 1 << 27  # entries of one table: 1 GiB of float64
_SMALL = 1 << 14  # entries of one table: adding up takes no longer than looking for an order


class Table(NamedTuple):
    """Costs over `variables` (ascending), one array dim each."""

    variables: tuple[int, ...]
    costs: NDArray[np.float64]


class _Eliminated(NamedTuple):
    variable: int
    neighbours: tuple[int, ...]
    best: NDArray[np.intp]


Memo = dict[
    tuple[object, ...],
    tuple[NDArray[np.float64], NDArray[np.intp], tuple[NDArray[np.float64], ...]],
]


def minimise(
    sizes: Sequence[int], tables: Sequence[Table], memo: Memo | None = None
) -> tuple[float, list[int]]:
    """The least total cost and the values that reach it; ties go to the lowest value of each
    variable.

    `sizes`: how many values each variable has. Raises PlanError where the graph is too entangled
    for tables that fit in memory.
    """
    memo = {} if memo is None else memo
    tables = _without_settled(tables)
    held: list[dict[int, Table]] = [{} for _ in sizes]
    count = itertools.count()

    def enter(table: Table) -> None:
        number = next(count)
        for variable in table.variables:
            held[variable][number] = table

    for table in tables:
        enter(table)
    eliminated: list[_Eliminated] = []
    constant = math.fsum(float(table.costs) for table in tables if not table.variables)
    for variable in order_of(sizes, tables):
        parts = list(held[variable].items())
        for number, table in parts:
            for other in table.variables:
                del held[other][number]
        neighbours = tuple(sorted({v for _, table in parts for v in table.variables} - {variable}))
        costs, best = _eliminate(variable, neighbours, [table for _, table in parts], sizes, memo)
        eliminated.append(_Eliminated(variable, neighbours, best))
        if neighbours:
            enter(Table(neighbours, costs))
        else:
            constant += float(costs)
    values = [0] * len(sizes)
    for variable, neighbours, best in reversed(eliminated):
        values[variable] = int(best[tuple(values[n] for n in neighbours)])
    return constant, values


def _without_settled(tables: Sequence[Table]) -> list[Table]:
    """The tables without variables of one value only: those tie nothing together, though all layers
    may hang on one (on rotary angles, say), and an array has at most 64 dims.
    """
    known: dict[int, NDArray[np.float64]] = {}  # by identity, which the layers share
    found = []
    for variables, costs in tables:
        open_variables = tuple(
            v for v, size in zip(variables, costs.shape, strict=True) if size > 1
        )
        if len(open_variables) < len(variables):
            costs = known.setdefault(id(costs), costs.squeeze())
        found.append(Table(open_variables, costs))
    return found


def order_of(sizes: Sequence[int], tables: Sequence[Table]) -> list[int]:
    """An order in which to eliminate: that of the first heuristic whose tables are all small, else
    of the one whose largest is smallest. (They look only at sizes.)
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for table in tables:
        for variable in table.variables:
            neighbours[variable].update(set(table.variables) - {variable})
    tried: list[tuple[float, list[int], list[int]]] = []
    for rate in _RATES:
        tried.append(_simulated(sizes, neighbours, rate))
        if tried[-1][0] <= _SMALL:
            break
    largest, order, entangled = min(tried, key=lambda found: found[0])
    if largest > LARGEST:
        raise too_large([sizes[v] for v in entangled])
    return order


def too_large(sizes: Sequence[int]) -> PlanError:
    """Of a table over variables of so many values."""
    return PlanError(
        f"the search would need a table over {len(sizes)} variables of {list(sizes)} values; give "
        "a layout by name, or fewer axes"
    )


def _table_size(
    variable: int, sizes: Sequence[int], neighbours: Sequence[set[int]]
) -> tuple[float, ...]:
    return (float(math.prod(sizes[n] for n in neighbours[variable]) * sizes[variable]),)


def _left_over(
    variable: int, sizes: Sequence[int], neighbours: Sequence[set[int]]
) -> tuple[float, ...]:
    return float(math.prod(sizes[n] for n in neighbours[variable])), float(sizes[variable])


def _degree(
    variable: int, sizes: Sequence[int], neighbours: Sequence[set[int]]
) -> tuple[float, ...]:
    return float(len(neighbours[variable])), *_table_size(variable, sizes, neighbours)


def _fill(variable: int, sizes: Sequence[int], neighbours: Sequence[set[int]]) -> tuple[float, ...]:
    """The weight of the pairs that the elimination ties together anew."""
    around = sorted(neighbours[variable])
    new = sum(
        float(sizes[a] * sizes[b])
        for a, b in itertools.combinations(around, 2)
        if b not in neighbours[a]
    )
    return new, *_table_size(variable, sizes, neighbours)


_RATES = (_table_size, _left_over, _degree, _fill)


def _simulated(
    sizes: Sequence[int], start: Sequence[set[int]], rate: Callable[..., tuple[float, ...]]
) -> tuple[float, list[int], list[int]]:
    """(entries of the largest table, the order, the variables of that table) when the lowest rated
    variable always goes first.
    """
    neighbours = [set(found) for found in start]
    queue = [(rate(v, sizes, neighbours), v) for v in range(len(sizes))]
    heapq.heapify(queue)
    gone: set[int] = set()
    largest, order, entangled = 0.0, [], []
    while queue:
        rated, variable = heapq.heappop(queue)
        if variable in gone:
            continue
        now = rate(variable, sizes, neighbours)
        if now != rated:
            heapq.heappush(queue, (now, variable))
            continue
        size = _table_size(variable, sizes, neighbours)[0]
        if size > largest:
            largest, entangled = size, [variable, *neighbours[variable]]
        order.append(variable)
        gone.add(variable)
        for other in neighbours[variable]:
            neighbours[other] |= neighbours[variable] - {other}
            neighbours[other].discard(variable)
        for other in neighbours[variable]:
            heapq.heappush(queue, (rate(other, sizes, neighbours), other))
    return largest, order, entangled


def _eliminate(
    variable: int, neighbours: tuple[int, ...], parts: list[Table], sizes: Sequence[int], memo: Memo
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    dims = (*neighbours, variable)
    where = {v: i for i, v in enumerate(dims)}
    shape = tuple(sizes[v] for v in dims)
    parts = sorted(parts, key=lambda table: [where[v] for v in table.variables])
    key = (shape, *((id(table.costs), tuple(where[v] for v in table.variables)) for table in parts))
    if key not in memo:
        total = np.zeros(shape)
        for table in parts:
            total += spread(table, where, len(dims))
        best = total.argmin(-1)
        costs = np.take_along_axis(total, best[..., None], -1)[..., 0]
        memo[key] = (
            costs,
            best,
            tuple(table.costs for table in parts),
        )  # the last keeps their ids from being used again
    costs, best, _ = memo[key]
    return costs, best


def spread(table: Table, where: dict[int, int], dims: int) -> NDArray[np.float64]:
    """The table's array with its dims in the places of `where`, ready to broadcast."""
    places = [where[v] for v in table.variables]
    array = table.costs.transpose(np.argsort(places))
    shape = [1] * dims
    for place in places:
        shape[place] = table.costs.shape[places.index(place)]
    return array.reshape(shape)
