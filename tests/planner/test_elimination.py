"""minimise equals trying everything on small problems, and an integer program on larger ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.errors import PlanError
from autopar.planner import elimination
from autopar.planner.elimination import Memo, Table, minimise
from cost_tables import random_problem, total


def test_equals_trying_everything() -> None:
    draw = random.Random(0)
    finite = 0
    for _ in range(400):
        sizes, tables = random_problem(draw)
        cost, values = minimise(sizes, tables)
        least = min(total(tables, v) for v in itertools.product(*map(range, sizes)))
        assert cost == pytest.approx(least, abs=1e-12)
        assert all(0 <= v < size for v, size in zip(values, sizes, strict=True))
        assert total(tables, values) == pytest.approx(least, abs=1e-12)
        finite += math.isfinite(least)
    assert finite > 200


def test_a_table_without_variables_is_a_constant_and_a_lone_variable_is_free() -> None:
    tables = [Table((), np.array(2.5)), Table((1,), np.array([3.0, 1.0]))]
    assert minimise([3, 2], tables) == (3.5, [0, 1])
    assert minimise([], []) == (0.0, [])


def test_ties_go_to_the_lowest_value_whatever_the_order_of_the_tables() -> None:
    flat = [Table((0, 1), np.zeros((3, 3))), Table((1, 2), np.zeros((3, 3)))]
    assert minimise([3, 3, 3], flat) == (0.0, [0, 0, 0])
    draw = random.Random(1)
    for _ in range(50):
        sizes, tables = random_problem(draw)
        assert minimise(sizes, tables)[0] == pytest.approx(minimise(sizes, tables[::-1])[0])
        assert minimise(sizes, tables) == minimise(sizes, tables)


@pytest.mark.parametrize("seed", range(4))
def test_equals_an_integer_program(seed: int) -> None:
    """A chain of 24 variables with edges that skip, as residuals do."""
    numbers, count = np.random.default_rng(seed), 24
    sizes = [int(n) for n in numbers.integers(2, 6, count)]
    edges = [(v, v + 1) for v in range(count - 1)] + [(v, v + 3) for v in range(0, count - 3, 2)]
    triples = [(v, v + 1, v + 2) for v in range(0, count - 2, 5)]
    tables = [Table(vs, numbers.random([sizes[v] for v in vs])) for vs in (*edges, *triples)]
    cost, values = minimise(sizes, tables)
    assert total(tables, values) == pytest.approx(cost, abs=1e-9)
    assert cost == pytest.approx(integer_program(sizes, tables), abs=1e-6)


def integer_program(sizes: Sequence[int], tables: Sequence[Table]) -> float:
    """The same minimum by HiGHS: a binary for each value of a variable, a weight for each entry of
    a table, whose margins are the binaries.
    """
    highspy = pytest.importorskip("highspy")
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    starts = np.cumsum([0, *sizes])
    costs = np.concatenate([np.zeros(starts[-1]), *(t.costs.ravel() for t in tables)])
    solver.addVars(len(costs), np.zeros(len(costs)), np.ones(len(costs)))
    solver.changeColsCost(len(costs), np.arange(len(costs), dtype=np.int32), costs)
    for column in range(starts[-1]):
        solver.changeColIntegrality(column, highspy.HighsVarType.kInteger)
    for variable, size in enumerate(sizes):
        solver.addRow(1, 1, size, starts[variable] + np.arange(size, dtype=np.int32), np.ones(size))
    first = starts[-1]
    for table in tables:
        entries = first + np.arange(table.costs.size, dtype=np.int32).reshape(table.costs.shape)
        for place, variable in enumerate(table.variables):
            for value in range(sizes[variable]):
                margin = np.append(entries.take(value, place).ravel(), starts[variable] + value)
                weights = np.append(np.ones(len(margin) - 1), -1)
                solver.addRow(0, 0, len(margin), margin.astype(np.int32), weights)
        first += table.costs.size
    solver.run()
    return float(solver.getInfo().objective_function_value)


# -- layers that share their tables ----------------------------------------------------------------
def layers(count: int, shared: bool) -> tuple[list[int], list[Table]]:
    """A chain of streams with a branch between neighbours, over the same arrays or equal copies."""
    numbers = np.random.default_rng(7)
    arrays = numbers.random((5, 5)), numbers.random((4, 5)), numbers.random((4, 5))
    tables = []
    for layer in range(count):
        before, after = count + layer, count + layer + 1
        skip, into, out = arrays if shared else (a.copy() for a in arrays)
        tables += [Table((before, after), skip), Table((layer, before), into)]
        tables.append(Table((layer, after), out))
    return [4] * count + [5] * (count + 1), tables


def test_layers_that_share_their_tables_are_worked_out_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    spread = elimination.spread
    monkeypatch.setattr(elimination, "spread", lambda *a: (calls.append(a), spread(*a))[1])
    memo: Memo = {}
    shared = minimise(*layers(64, shared=True), memo)
    work = len(calls)
    calls.clear()
    assert minimise(*layers(64, shared=False)) == shared
    # The branches are one elimination for all layers; only the chain of streams is left.
    assert (work, len(calls)) == (2 + 3 * 64, (2 + 3) * 64)
    calls.clear()
    assert minimise(*layers(64, shared=True)) == shared
    assert len(calls) == work


def test_a_memo_carries_over_and_never_confuses_new_tables_with_old() -> None:
    memo: Memo = {}
    draw = random.Random(2)
    for _ in range(200):  # tables die in between: their addresses are used again
        sizes, tables = random_problem(draw)
        assert minimise(sizes, tables, memo) == minimise(sizes, tables)


def test_a_second_search_over_the_same_tables_costs_nothing() -> None:
    memo: Memo = {}
    sizes, tables = layers(8, shared=True)
    first = minimise(sizes, tables, memo)
    known = len(memo)
    assert minimise(sizes, tables, memo) == first
    assert len(memo) == known


def test_too_entangled_is_refused_before_memory_is_taken() -> None:
    shared = np.zeros((100, 100))
    tables = [Table((a, b), shared) for a, b in itertools.combinations(range(6), 2)]
    with pytest.raises(
        PlanError, match=r"table over 6 variables of \[100, 100.*give a layout by name"
    ):
        minimise([100] * 6, tables)
    assert minimise([100] * 3, [t for t in tables if max(t.variables) < 3]) == (0.0, [0, 0, 0])


def test_a_variable_of_one_value_may_be_tied_to_any_number_of_others() -> None:
    costs = np.array([[[1.0], [3.0]], [[2.0], [0.5]]])
    tables = [Table((i, i + 1, 100), costs) for i in range(99)]
    assert minimise([*[2] * 100, 1], tables) == (0.5 * 99, [*[1] * 100, 0])


@pytest.mark.parametrize("shape", [(9,), (4, 2, 3), (3, 60, 50, 70), (2, 512, 512), (1 << 16,)])
def test_blocks_add_up_to_the_full_model_to_the_bit(shape: tuple[int, ...]) -> None:
    """Ties too: the first of equal values is the best."""
    draw = np.random.default_rng(len(shape))
    sizes = [[n if draw.random() < 0.6 else 1 for n in shape] for _ in range(4)]
    sizes.append([shape[0], *[1] * (len(shape) - 1)])
    parts = [draw.integers(0, 9, size) / 7 for size in sizes]
    whole = np.zeros(shape)
    for part in parts:
        whole += part
    costs = elimination._lowest(parts, shape)
    assert np.array_equal(costs, whole.min(0))
    gone = elimination._Eliminated(0, tuple(range(1, len(shape))), tuple(parts))
    for _ in range(50):
        values = [int(draw.integers(n)) for n in shape]
        assert gone.best(values) == whole[(slice(None), *values[1:])].argmin()
