"""The objective of the search as a plain integer program for HiGHS, straight from the prices: no
regions, no tables, no elimination.

A binary for every strategy of a node, every layout of a stored parameter and of an output, and
every layout in which a copy of a value may be kept. A value flows from the layout in which it is
made, or from its copy, to the layout of each use; what flows pays for the conversion, and its
margins are what the binaries say. So flows need not be whole numbers themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from autopar.cost.compute import optimizer_seconds
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Value
from autopar.ir.sharding_rule import results_of
from autopar.world import World
from brute import Objective, _shared, _Uses

Columns = list[int]
ColumnsByLayout = Mapping[Layout | None, Columns]  # those that say that a value has the layout


class Program01:
    """Columns, rows, and what they cost, as they are noted down."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.integral: list[bool] = []
        self.rows: list[tuple[float, list[int], list[float]]] = []

    def columns(self, costs: Iterable[float], integral: bool = False) -> Columns:
        start = len(self.costs)
        self.costs.extend(costs)
        self.integral.extend([integral] * (len(self.costs) - start))
        return list(range(start, len(self.costs)))

    def one_of(self, columns: Columns) -> None:
        self.rows.append((1.0, columns, [1.0] * len(columns)))

    def equal(self, left: Columns, right: Columns) -> None:
        self.rows.append((0.0, [*left, *right], [1.0] * len(left) + [-1.0] * len(right)))

    def least(self) -> float:
        highspy = pytest.importorskip("highspy")
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("mip_rel_gap", 1e-9)
        count, scale = len(self.costs), 1e3 / max(self.costs)  # tolerances are of about 1e-6
        solver.addVars(count, np.zeros(count), np.full(count, highspy.kHighsInf))
        every = np.arange(count, dtype=np.int32)
        solver.changeColsCost(count, every, scale * np.array(self.costs))
        for column in np.flatnonzero(self.integral):
            solver.changeColIntegrality(int(column), highspy.HighsVarType.kInteger)
        starts = np.cumsum([0, *(len(columns) for _, columns, _ in self.rows)])
        sides = np.array([side for side, _, _ in self.rows])
        places = np.concatenate([np.array(c, dtype=np.int32) for _, c, _ in self.rows])
        weights = np.concatenate([np.array(w) for _, _, w in self.rows])
        rows = len(self.rows)
        solver.addRows(
            rows, sides, sides, len(places), starts[:-1].astype(np.int32), places, weights
        )
        solver.run()
        assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return float(solver.getInfo().objective_function_value) / scale


def least(program: Program, mesh: Mesh, world: World) -> float:
    """The least modelled seconds of a step on one mesh without a constraint."""
    objective, problem = Objective(program, mesh, world), Program01()
    uses, options = _Uses(objective).of, []
    operands: list[dict[int, ColumnsByLayout]] = []
    columns_of: dict[Value, ColumnsByLayout] = {}
    for node in objective.nodes:
        rated = [(objective.node_seconds(node, s), s) for s in objective.strategies(node)]
        options.append(rated)
        columns = problem.columns((seconds for seconds, _ in rated), integral=True)
        problem.one_of(columns)
        several = range(len(rated[0][1].operands))
        operands.append(
            {i: _by(columns, [strategy.operands[i] for _, strategy in rated]) for i in several}
        )
        for index in range(len(rated[0][1].results)):
            layouts = [strategy.results[index] for _, strategy in rated]
            columns_of[node.name, index] = _by(columns, layouts)
    for value, takers in uses.items():
        if value not in columns_of:
            columns_of[value] = _stored(objective, problem, value)
        wanted: list[ColumnsByLayout] = []
        for taker in takers:
            if isinstance(taker[0], int):
                wanted.append(operands[taker[0]][taker[1]])  # type: ignore[index]
            else:
                columns = problem.columns([0.0] * len(taker), integral=True)
                problem.one_of(columns)
                wanted.append(_by(columns, taker))
        _carry(objective, problem, value, columns_of[value], wanted, _shared(takers, options))
    return problem.least()


def _by(columns: Columns, layouts: Iterable[Any]) -> ColumnsByLayout:
    by_layout: dict[Layout | None, Columns] = defaultdict(list)
    for column, layout in zip(columns, layouts, strict=True):
        by_layout[layout].append(column)
    return by_layout


def _stored(objective: Objective, solution: Program01, value: Value) -> ColumnsByLayout:
    """A parameter, for which the optimizer pays, or an input as it is given."""
    node = objective.named[value[0]]
    layouts, size = objective.placed(node), results_of(node)[value[1]].dtype.itemsize
    if value[0] not in objective.parameters:
        layouts, seconds = layouts[:1], [0.0]
    else:
        seconds = [optimizer_seconds(layout, size, objective.world) for layout in layouts]
    columns = solution.columns(seconds, integral=True)
    solution.one_of(columns)
    return _by(columns, layouts)


def _carry(
    objective: Objective,
    solution: Program01,
    value: Value,
    origin: ColumnsByLayout,
    wanted: list[ColumnsByLayout],
    shared: Iterable[Layout],
) -> None:
    """Bring a value from where it is made, or from one copy of it, to all of its uses."""
    node = objective.named[value[0]]
    size = results_of(node)[value[1]].dtype.itemsize
    gradient = value in objective.notes.gradient

    def flow(sources: Iterable[Any], targets: Iterable[Any]) -> dict[tuple[Any, Any], int]:
        pairs = [(a, b) for a in sources for b in targets]
        costs = (objective.reshard(a, b, size, gradient) for a, b in pairs)
        return dict(zip(pairs, solution.columns(costs), strict=True))

    def at_most(flows: Mapping[tuple[Any, Any], int], layouts: ColumnsByLayout) -> None:
        """No more leaves a layout than is there."""
        leaving: dict[Any, Columns] = defaultdict(list)
        for (source, _), column in flows.items():
            leaving[source].append(column)
        for source, columns in leaving.items():
            solution.equal([*columns, *solution.columns([0.0])], layouts[source])

    copies: ColumnsByLayout = {}
    if copied := list(shared):
        columns = solution.columns([0.0] * (1 + len(copied)), integral=True)  # the first is no copy
        solution.one_of(columns)
        copies = _by(columns[1:], copied)
        making = flow(origin, copies)
        at_most(making, origin)
        for copy, taking in copies.items():
            solution.equal([column for (_, c), column in making.items() if c == copy], taking)
    for use in wanted:
        direct, through = flow(origin, use), flow(copies, use)
        at_most(direct, origin)
        at_most(through, copies)
        for layout, taking in use.items():
            arriving = [
                c for flows in (direct, through) for (_, b), c in flows.items() if b == layout
            ]
            solution.equal(arriving, taking)
