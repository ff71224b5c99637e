"""Variable elimination: the exact minimum of a sum of small cost tables.

A table gives a cost for every joint value of a few variables. Eliminating a variable adds up the
tables that hold it and minimises over it, which leaves one table over its neighbours (Bertelè and
Brioschi, Nonserial Dynamic Programming, 1972). Variables are eliminated one by one, the cheapest
first. Tables are compared by identity and eliminations are remembered, so that the layers of a
model, which share their tables, are worked out once.

Sizes and tables enter, the least cost and its values leave. Called by exact_search.py.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanError

LARGEST = 1 << 27  # entries of one table: 1 GiB of float64
_BLOCK = 1 << 15  # entries that are added up at a time
_SMALL = 1 << 14  # entries of one table: adding up takes no longer than looking for an order


class Table(NamedTuple):
    """Costs over `variables` (ascending), one array dim each."""

    variables: tuple[int, ...]
    costs: NDArray[np.float64]


Arrays = tuple[NDArray[np.float64], ...]


class _Eliminated(NamedTuple):
    """A variable that is gone. The sum of `terms` has its values in dim 0 and those of each of its
    `neighbours` in the next ones.
    """

    variable: int
    neighbours: tuple[int, ...]
    terms: Arrays

    def best(self, values: Sequence[int]) -> int:
        """Return the variable's best value where all variables have these values."""
        total: NDArray[np.float64] | float = 0.0
        for term in self.terms:
            each = zip(self.neighbours, term.shape[1:], strict=True)
            at: tuple[Any, ...] = tuple(values[v] if n > 1 else 0 for v, n in each)
            total = total + term[:, *at]
        return int(np.argmin(total))


_ALL = slice(None)

Memo = dict[tuple[object, ...], tuple[NDArray[np.float64], Arrays, Arrays]]


def minimise(
    sizes: Sequence[int],
    tables: Sequence[Table],
    memo: Memo | None = None,
    order: Sequence[int] | None = None,
) -> tuple[float, list[int]]:
    """Return the least total cost and the values that reach it; ties go to the lowest value of each
    variable.

    `sizes`: the number of values of each variable; `order`: in which to eliminate all that tables
    hold, the best known by default. Raises PlanError where the graph is too entangled for tables
    that fit in memory.
    """
    memo = {} if memo is None else memo
    tables = drop_settled_variables(tables)
    tables_of: list[dict[int, Table]] = [{} for _ in sizes]
    count = itertools.count()

    def enter(table: Table) -> None:
        number = next(count)
        for variable in table.variables:
            tables_of[variable][number] = table

    for table in tables:
        enter(table)
    eliminated: list[_Eliminated] = []
    constant = math.fsum(float(table.costs) for table in tables if not table.variables)
    scopes = [table.variables for table in tables]
    for variable in order_of(sizes, scopes) if order is None else order:
        own_tables = list(tables_of[variable].items())
        for number, table in own_tables:
            for other in table.variables:
                del tables_of[other][number]
        neighbours = tuple(
            sorted({v for _, table in own_tables for v in table.variables} - {variable})
        )
        costs, terms = eliminate(
            variable, neighbours, [table for _, table in own_tables], sizes, memo
        )
        eliminated.append(_Eliminated(variable, neighbours, terms))
        if neighbours:
            enter(Table(neighbours, costs))
        else:
            constant += float(costs)
    values = [0] * len(sizes)
    for each in reversed(eliminated):
        values[each.variable] = each.best(values)
    return constant, values


def drop_settled_variables(tables: Sequence[Table]) -> list[Table]:
    """Return the tables without variables of a single value: these connect nothing, though all
    layers may share one (rotary angles, say), and an array has at most 64 dims.
    """
    squeezed: dict[int, NDArray[np.float64]] = {}  # by identity, which the layers share
    reduced = []
    for variables, costs in tables:
        open_variables = tuple(
            v for v, size in zip(variables, costs.shape, strict=True) if size > 1
        )
        if len(open_variables) < len(variables):
            costs = squeezed.setdefault(id(costs), costs.squeeze())
        reduced.append(Table(open_variables, costs))
    return reduced


def order_of(
    sizes: Sequence[int], scopes: Sequence[Sequence[int]], most: int | None = None
) -> list[int]:
    """Return an order in which to eliminate: that of the first heuristic whose tables are all
    small, else of the one whose largest table is smallest. `scopes`: the variables of each table.
    Raises PlanError where that table has more than `most` entries, by default LARGEST.
    """
    neighbours = neighbours_of(sizes, [[v for v in scope if sizes[v] > 1] for scope in scopes])
    orders: list[tuple[float, list[int], list[int]]] = []
    for rate in _RATES:
        orders.append(simulate_order(sizes, neighbours, rate))
        if orders[-1][0] <= _SMALL:
            break
    largest, order, entangled = min(orders, key=lambda attempt: attempt[0])
    if largest > (LARGEST if most is None else most):
        raise too_large([sizes[v] for v in entangled])
    return order


def neighbours_of(sizes: Sequence[int], scopes: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return, for every variable, the others that share a table with it."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            neighbours[variable].update(set(scope) - {variable})
    return neighbours


def too_large(sizes: Sequence[int]) -> PlanError:
    """Return the error for a table over variables of these numbers of values."""
    return PlanError(
        f"the search would need a table over {len(sizes)} variables of {list(sizes)} values; give "
        "a layout by name, or fewer axes"
    )


def table_size(
    variable: int, sizes: Sequence[int], neighbours: Sequence[set[int]]
) -> tuple[float, ...]:
    """Rate an elimination by the entries of the table that it adds up."""
    return (float(math.prod(sizes[n] for n in neighbours[variable]) * sizes[variable]),)


def _left_over(
    variable: int, sizes: Sequence[int], neighbours: Sequence[set[int]]
) -> tuple[float, ...]:
    """Rate an elimination by the entries of the table that it leaves."""
    return float(math.prod(sizes[n] for n in neighbours[variable])), float(sizes[variable])


def _degree(
    variable: int, sizes: Sequence[int], neighbours: Sequence[set[int]]
) -> tuple[float, ...]:
    """Rate an elimination by its number of neighbours, then by its table."""
    return float(len(neighbours[variable])), *table_size(variable, sizes, neighbours)


def _fill(variable: int, sizes: Sequence[int], neighbours: Sequence[set[int]]) -> tuple[float, ...]:
    """Rate an elimination by the weight of the pairs that it newly connects."""
    around = sorted(neighbours[variable])
    new_weight = sum(
        float(sizes[a] * sizes[b])
        for a, b in itertools.combinations(around, 2)
        if b not in neighbours[a]
    )
    return new_weight, *table_size(variable, sizes, neighbours)


_RATES = (table_size, _left_over, _degree, _fill)


def simulate_order(
    sizes: Sequence[int], start: Sequence[set[int]], rate: Callable[..., tuple[float, ...]]
) -> tuple[float, list[int], list[int]]:
    """Return (entries of the largest table, the order, the variables of that table) if the variable
    of the lowest rating always goes first.
    """
    neighbours = [set(adjacent) for adjacent in start]
    queue = [(rate(v, sizes, neighbours), v) for v in range(len(sizes))]
    heapq.heapify(queue)
    eliminated: set[int] = set()
    largest, order, entangled = 0.0, [], []
    while queue:
        rated, variable = heapq.heappop(queue)
        if variable in eliminated:
            continue
        current = rate(variable, sizes, neighbours)
        if current != rated:
            heapq.heappush(queue, (current, variable))
            continue
        size = table_size(variable, sizes, neighbours)[0]
        if size > largest:
            largest, entangled = size, [variable, *neighbours[variable]]
        order.append(variable)
        eliminated.add(variable)
        for other in neighbours[variable]:
            neighbours[other] |= neighbours[variable] - {other}
            neighbours[other].discard(variable)
        for other in neighbours[variable]:
            heapq.heappush(queue, (rate(other, sizes, neighbours), other))
    return largest, order, entangled


def eliminate(
    variable: int, neighbours: tuple[int, ...], terms: list[Table], sizes: Sequence[int], memo: Memo
) -> tuple[NDArray[np.float64], Arrays]:
    """Return the table that is left over the neighbours, and the arrays of which it is the least
    sum: the variable's values are their dim 0.
    """
    dims = (*neighbours, variable)
    where = {v: i for i, v in enumerate(dims)}
    terms = sorted(terms, key=lambda table: [where[v] for v in table.variables])
    shape = tuple(sizes[v] for v in dims)
    key = (shape, *((id(table.costs), tuple(where[v] for v in table.variables)) for table in terms))
    if key not in memo:
        first = {v: i for i, v in enumerate((variable, *neighbours))}
        arrays = tuple(np.ascontiguousarray(spread(table, first, len(dims))) for table in terms)
        memo[key] = (
            _lowest(arrays, tuple(sizes[v] for v in first)),
            arrays,
            tuple(table.costs for table in terms),
        )  # holding the tables keeps their ids from being reused
    costs, arrays, _ = memo[key]
    return costs, arrays


def _lowest(terms: Sequence[NDArray[np.float64]], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the least over dim 0 of the sum of these arrays. They are added up in blocks that a
    cache holds: the whole sum is large, and memory is slow.
    """
    if not terms:
        return np.zeros(shape[1:])
    *terms, last = terms
    costs, room = np.empty(shape[1:]), np.empty(min(_BLOCK, math.prod(shape)))
    for block in _blocks(shape):
        total: NDArray[np.float64] | float = 0.0
        for term in terms:
            total = total + _entries_of_block(term, block)
        place: tuple[Any, ...] = (*block, ...)
        into = costs[place]
        if (size := into.size * shape[0]) > len(room):
            room = np.empty(size)
        summed = room[:size].reshape(shape[0], *into.shape)
        np.add(total, _entries_of_block(last, block), out=summed)
        np.minimum.reduce(summed, axis=0, out=into)
    return costs


def _entries_of_block(term: NDArray[np.float64], block: tuple[slice, ...]) -> NDArray[np.float64]:
    """Return a term's entries of a block, where its dim has more than one."""
    each = zip(block, term.shape[1:], strict=True)
    at: tuple[Any, ...] = tuple(at if n > 1 else _ALL for at, n in each)
    return term[:, *at]


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield slices of all dims but the first, of at most _BLOCK entries in all if that can be."""
    inner, *rest = shape
    split = len(rest)
    while split > 0 and inner * rest[split - 1] <= _BLOCK:
        split -= 1
        inner *= rest[split]
    if split == 0:
        yield (_ALL,) * len(rest)
        return
    step = max(1, _BLOCK // inner)
    for place in np.ndindex(*rest[: split - 1]):
        for start in range(0, rest[split - 1], step):
            outer = tuple(slice(i, i + 1) for i in place)
            yield (*outer, slice(start, start + step), *(_ALL,) * (len(rest) - split))


def spread(table: Table, where: dict[int, int], dims: int) -> NDArray[np.float64]:
    """Return the table's array with its dims at the places of `where`, ready to broadcast."""
    places = [where[v] for v in table.variables]
    array = table.costs.transpose(np.argsort(places))
    shape = [1] * dims
    for place in places:
        shape[place] = table.costs.shape[places.index(place)]
    return array.reshape(shape)
