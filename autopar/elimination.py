"""The minimum of a sum of small tables, exactly: variables are eliminated one by one, the cheapest first.

A table gives a cost for every joint value of a few variables. Eliminating a variable adds up the tables that hold it and minimises over
it, which leaves one table over its neighbours (Bertelè and Brioschi, Nonserial Dynamic Programming, 1972). Tables are compared by identity
and eliminations are remembered, so that the layers of a model, which share their tables, are worked out once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import PlanError

_LARGEST = 1 << 27  # entries of one table: 1 GiB of float64


class Table(NamedTuple):
    """Costs over `variables` (ascending), one array dim each."""

    variables: tuple[int, ...]
    costs: NDArray[np.float64]


class _Eliminated(NamedTuple):
    variable: int
    neighbours: tuple[int, ...]
    best: NDArray[np.intp]


Memo = dict[tuple[object, ...], tuple[NDArray[np.float64], NDArray[np.intp], tuple[NDArray[np.float64], ...]]]


def minimise(sizes: Sequence[int], tables: Sequence[Table], memo: Memo | None = None) -> tuple[float, list[int]]:
    """The least total cost and the values that reach it; ties go to the lowest value of each variable.

    `sizes`: how many values each variable has. Raises PlanError where the graph is too entangled for tables that fit in memory.
    """
    memo = {} if memo is None else memo
    state = _State(sizes, tables)
    order: list[_Eliminated] = []
    constant = math.fsum(float(table.costs) for table in tables if not table.variables)
    while (variable := state.next()) is not None:
        neighbours, parts = state.take(variable)
        if math.prod(sizes[n] for n in neighbours) * sizes[variable] > _LARGEST:
            raise PlanError(
                f"the search would need a table over {len(neighbours) + 1} variables of "
                f"{[sizes[n] for n in (*neighbours, variable)]} values; give a layout by name, or fewer axes"
            )
        costs, best = _eliminate(variable, neighbours, parts, sizes, memo)
        order.append(_Eliminated(variable, neighbours, best))
        if neighbours:
            state.add(Table(neighbours, costs))
        else:
            constant += float(costs)
    values = [0] * len(sizes)
    for variable, neighbours, best in reversed(order):
        values[variable] = int(best[tuple(values[n] for n in neighbours)])
    return constant, values


class _State:
    """The tables that are left, by variable, and a queue of variables by the size of the table their elimination makes."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Table]) -> None:
        self.sizes = sizes
        self.held: list[dict[int, Table]] = [{} for _ in sizes]
        self.left = set(range(len(sizes)))
        self.count = 0
        for table in tables:
            self._enter(table)
        self.queue = [(self._size(v), v) for v in range(len(sizes))]
        heapq.heapify(self.queue)

    def _enter(self, table: Table) -> None:
        self.count += 1
        for variable in table.variables:
            self.held[variable][self.count] = table

    def _neighbours(self, variable: int) -> tuple[int, ...]:
        found = {v for table in self.held[variable].values() for v in table.variables}
        return tuple(sorted(found - {variable}))

    def _size(self, variable: int) -> int:
        return math.prod(self.sizes[n] for n in self._neighbours(variable)) * self.sizes[variable]

    def next(self) -> int | None:
        while self.queue:
            size, variable = heapq.heappop(self.queue)
            if variable in self.left:
                now = self._size(variable)
                if now == size:
                    return variable
                heapq.heappush(self.queue, (now, variable))
        return None

    def take(self, variable: int) -> tuple[tuple[int, ...], list[Table]]:
        neighbours = self._neighbours(variable)
        keys = list(self.held[variable])
        parts = [self.held[variable][key] for key in keys]
        for key, table in zip(keys, parts, strict=True):
            for other in table.variables:
                del self.held[other][key]
        self.left.discard(variable)
        return neighbours, parts

    def add(self, table: Table) -> None:
        self._enter(table)
        for variable in table.variables:
            heapq.heappush(self.queue, (self._size(variable), variable))


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
            total += _spread(table, where, len(dims))
        best = total.argmin(-1)
        costs = np.take_along_axis(total, best[..., None], -1)[..., 0]
        memo[key] = costs, best, tuple(table.costs for table in parts)  # the last keeps their ids from being used again
    costs, best, _ = memo[key]
    return costs, best


def _spread(table: Table, where: dict[int, int], dims: int) -> NDArray[np.float64]:
    """The table's array with its dims in the places of `where`, ready to broadcast."""
    places = [where[v] for v in table.variables]
    array = table.costs.transpose(np.argsort(places))
    shape = [1] * dims
    for place in places:
        shape[place] = table.costs.shape[places.index(place)]
    return array.reshape(shape)
