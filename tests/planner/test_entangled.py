"""Where tables would outgrow memory, the search is inexact, and its bound holds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.planner import elimination, entangled, exact_search
from autopar.planner.elimination import Table, minimise
from autopar.planner.entangled import minimise_nearly
from cost_tables import random_problem, total


def grid(sizes: Sequence[int], reach: int, seed: int) -> list[Table]:
    """Every variable is tied to the `reach` before it."""
    numbers = np.random.default_rng(seed)
    pairs = [(a, b) for b in range(len(sizes)) for a in range(max(0, b - reach), b)]
    return [Table(pair, numbers.random([sizes[v] for v in pair])) for pair in pairs]


@pytest.mark.slow_cells("8")
@pytest.mark.parametrize("largest", [8, 64, 512])
def test_values_cost_what_is_said_and_the_bound_is_below_the_minimum(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entangled, "_LARGEST", largest)
    draw, costs, least = random.Random(largest), 0.0, 0.0
    for seed in range(12):
        sizes = [draw.randint(2, 4) for _ in range(16)]
        tables = grid(sizes, 5, seed)
        exact, _ = minimise(sizes, tables)
        near = minimise_nearly(sizes, tables)
        assert near.bound <= exact + 1e-9
        assert near.cost >= exact - 1e-9
        assert near.cost == pytest.approx(total(tables, near.values))
        costs, least = costs + near.cost, least + exact
    assert costs <= 1.05 * least


def test_without_large_tables_it_is_exact() -> None:
    draw = random.Random(3)
    for _ in range(100):
        sizes, tables = random_problem(draw)
        near = minimise_nearly(sizes, tables)
        exact = pytest.approx(minimise(sizes, tables)[0])
        assert near.cost == exact and near.bound == exact


def test_equal_layers_that_are_fixed_alike_share_their_slices() -> None:
    slices, costs = entangled.Slices(), np.arange(6.0).reshape(2, 3)
    first = slices.at(Table((0, 1), costs), {0}, [1, 0, 1])
    again = slices.at(Table((2, 5), costs), {2}, [1, 0, 1])
    assert (first.variables, again.variables) == ((1,), (5,))
    assert first.costs is again.costs and first.costs.tolist() == [3, 4, 5]
    assert slices.at(Table((0, 1), costs), {3}, [1, 0, 1]).costs is costs


class Loop(nn.Module):
    """Steps of Runge-Kutta: four calls of one net in each."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.f = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(self.steps):
            a = self.f(x)
            b = self.f(x + a / 8)
            c = self.f(x + b / 8)
            x = x + (a + 2 * b + 2 * c + self.f(x + c / 4)) / 24
        return (x - y).square().mean()


@pytest.mark.slow_cells("auto")
@pytest.mark.parametrize("layout", ["auto", "megatron"])
def test_a_search_that_outgrows_memory_gives_a_plan_with_its_gap(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, inputs = Loop(2), (torch.randn(8, 8), torch.randn(8, 8))
    exact = autopar.plan(model, 2, inputs, layout)
    monkeypatch.setattr(elimination, "LARGEST", 60)
    monkeypatch.setattr(entangled, "_LARGEST", 60)
    searches = []
    monkeypatch.setattr(
        exact_search, "minimise_nearly", lambda *a: (searches.append(a), minimise_nearly(*a))[1]
    )
    near = autopar.plan(model, 2, inputs, layout)
    assert searches
    assert exact.seconds * (1 - 1e-9) <= near.seconds <= exact.seconds * 1.1
    assert near.bound <= exact.seconds * (1 + 1e-9)
    assert near.seconds * (1 - near.gap) <= exact.seconds * (1 + 1e-9)
    autopar.verify(model, 2, inputs, layout)


@pytest.mark.slow
def test_a_loop_of_one_net_is_planned_no_slower_than_by_name() -> None:
    """Its exact search would need a table over 14 variables."""

    model, inputs = Loop(4), (torch.randn(8, 8), torch.randn(8, 8))
    named = [autopar.plan(model, 4, inputs, name).seconds for name in ("ddp", "fsdp", "megatron")]
    chosen = autopar.plan(model, 4, inputs, "auto")
    assert chosen.seconds <= min(named)
