"""The fastest plan under a limit of memory, held against trying everything."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import brute
import models
from autopar.cost.activations import ActivationMemory, Price
from autopar.cost.least_bytes import least_bytes
from autopar.cost.memory import Budget
from autopar.cost.peak import peak
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner import fit
from autopar.planner.elimination import Table
from autopar.planner.planner import search_plan
from autopar.planner.rematerialize import RematerializationSearch, RematerializationSteps
from autopar.planner.request import PlanRequest
from autopar.planner.rungs import Names, Rematerialized
from autopar.planner.small_models import ascending, by_cost
from autopar.planner.solve import best
from autopar.planner.space import candidates
from autopar.world import World
from random_nets import random_problem
from traced import annotated

slow = pytest.mark.slow
OPTIMIZER = "adamw"


# -- against trying everything ---------------------------------------------------------------------
def peak_of(program: Program, plan: Plan, world: World) -> float:
    emitted = emit_program(dataclasses.replace(program, plan=plan), world)
    return peak(emitted, OPTIMIZER, world).peak


def drawn_limit(program: Program, world: World, draw: random.Random) -> float:
    """Between the least that one of many plans needs and what the fastest does."""
    free = Budget(None, OPTIMIZER, "none")
    fastest = search_plan(program, world, PlanRequest("auto", budget=free)).plan
    assert fastest is not None
    several = [
        ascending(program, mesh, world, rules)
        for mesh, rules in candidates("auto", world.ranks, program)
    ]
    many = list(itertools.islice(heapq.merge(*several, key=lambda plan: plan.seconds), 800))
    peaks = [peak_of(program, plan, world) for plan in draw.sample(many, min(20, len(many)))]
    least, most = min(peaks), peak_of(program, fastest, world)
    return least + draw.random() * max(0.0, most - least)


def fits_and_is_the_fastest(seed: int) -> None:
    """By the exact peak of every plan that is faster, on every mesh: none fits. Nothing is made
    twice here (recompute="none"), so a plan is its strategies, stored layouts and copies.
    """
    program, _, world = random_problem(seed)
    limit = drawn_limit(program, world, random.Random(seed))
    result = search_plan(
        program, world, PlanRequest("auto", budget=Budget(limit, OPTIMIZER, "none"))
    ).plan
    assert result is not None
    assert peak_of(program, result, world) <= limit, seed
    assert result.bound <= result.seconds
    if result.limit is not None:
        assert result.bound == pytest.approx(result.seconds, rel=1e-9), seed
    least = least_bytes(program, world.ranks, OPTIMIZER)
    below = result.seconds * (1 - 1e-9) if result.limit is not None else 0.0
    for mesh, _ in candidates("auto", world.ranks, program):
        for plan in brute.faster(program, mesh, world, below):
            needs = peak_of(program, plan, world)
            assert needs >= least, (seed, needs, least)
            assert needs > limit, (seed, plan.seconds, result.seconds, needs, limit)


@pytest.mark.slow_cells("0")
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=slow) for n in range(4, 200, 4))])
def test_the_fastest_plan_that_fits_against_trying_everything(first: int) -> None:
    for seed in range(first, first + 4):
        fits_and_is_the_fastest(seed)


@pytest.mark.slow_cells("gpt-0.02")
@pytest.mark.parametrize(("name", "part"), [("gpt", 0.02)])
def test_a_price_bounds_what_fits(name: str, part: float) -> None:
    """In larger graphs: above the bound that knows no limit, and above no plan that was found."""
    program, world = annotated(*getattr(models, name)()), World.preset("ethernet-25g", 4)
    free = search_plan(
        program, world, PlanRequest("auto", budget=Budget(None, OPTIMIZER, "none"))
    ).plan
    assert free is not None
    pairs = list(candidates("auto", world.ranks, program))
    frugal = best(program, pairs, world, price=Price(ActivationMemory(program), 1.0))
    least, most = (peak_of(program, plan, world) for plan in (frugal, free))
    limit = least + part * (most - least)
    result = search_plan(
        program, world, PlanRequest("auto", budget=Budget(limit, OPTIMIZER, "none"))
    ).plan
    assert result is not None and result.memory is not None and result.memory.peak <= limit < most
    # equal where the bound that knows no limit is the better one
    assert free.bound <= result.bound <= result.seconds
    said = "within this memory" if result.bound > free.bound else "of unlimited memory"
    assert said in str(result.table().caption)


@pytest.mark.slow
def test_bytes_have_the_price_of_saving_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the plan of least time fits by what it drops, one search at the price that it pays."""
    prices: list[float] = []
    at = fit.LimitedSearch._at

    def noted(self: Any, price: Price) -> Any:
        prices.append(price.seconds_per_byte)
        return at(self, price)

    monkeypatch.setattr(fit.LimitedSearch, "_at", noted)
    program, world = annotated(*models.gpt()), World.preset("ethernet-25g", 4)
    free = search_plan(program, world, PlanRequest("4d")).plan
    assert free is not None
    limit = 0.8 * peak_of(program, free, world)
    result = search_plan(program, world, PlanRequest("4d", budget=Budget(limit, OPTIMIZER, "auto")))
    assert result.plan is not None and result.plan.peak_bytes <= limit
    assert any((result.plan.recompute, result.plan.regather, result.plan.rerun))
    assert len(prices) == 1 and prices[0] > 0


@pytest.mark.slow_cells("gpt-fsdp-4-kinds0", "gpt-megatron-2-kinds1", "llama-fsdp-4-kinds2")
@pytest.mark.parametrize(
    ("name", "layout", "ranks", "kinds"),
    [
        ("gpt", "fsdp", 4, {"regather", "rerun"}),
        ("gpt", "megatron", 2, {"recompute", "rerun"}),
        ("llama", "fsdp", 4, {"recompute", "regather", "rerun"}),
    ],
)
def test_the_cheapest_of_all_rungs_is_found(
    name: str, layout: str, ranks: int, kinds: set[str]
) -> None:
    """Against the exact peak and seconds of every rung, whatever the limit."""
    program, world = annotated(*getattr(models, name)()), World.preset("ethernet-25g", ranks)
    free = search_plan(program, world, PlanRequest(layout, budget=Budget(1e15, OPTIMIZER)))
    emitted, used = emit_program(free, world), set[str]()
    every = RematerializationSteps(emitted, world, Budget(1e15, OPTIMIZER))
    rungs = prefixes(every.names, every.fetching, every.cheap)
    tried = [every.tried(rung) for rung in dict.fromkeys(rungs)]
    for limit in sorted({each.memory.peak for each in tried}):
        best_rung = RematerializationSteps(emitted, world, Budget(limit, OPTIMIZER)).best()
        least = min(each.seconds for each in tried if each.memory.peak <= limit)
        assert best_rung.memory.peak <= limit
        if best_rung.rung != every.start:
            assert best_rung.seconds == pytest.approx(least, rel=1e-9), (limit, best_rung.rung)
            used |= {kind for kind, names in best_rung.rung._asdict().items() if names}
    assert used == kinds


def prefixes(names: Names, fetching: Names, cheap: Names) -> Iterator[Rematerialized]:
    """What the first n blocks may do, where the others do one thing or nothing."""
    for n in range(1, len(names) + 1):
        yield Rematerialized((), fetching[:n])
        yield Rematerialized((), (), cheap[:n])
        yield Rematerialized((), fetching, cheap[:n])
        yield Rematerialized((), fetching[:n], cheap)
        done, left = names[:n], names[n:]
        for others in itertools.product(((), fetching), ((), cheap)):
            yield Rematerialized(done, *(tuple(x for x in each if x in left) for each in others))


class Drawn(RematerializationSearch):
    """Of drawn blocks: each way takes its own bytes off the peak of a block, and seconds."""

    def __init__(self, draw: random.Random, count: int) -> None:
        names = tuple(f"blocks.{n}" for n in range(count))
        nothing: Any = types.SimpleNamespace(recompute=(), regather=(), rerun=())
        super().__init__(names, names, names, nothing, Budget(draw.uniform(20.0, 100.0)))
        self.bytes = {name: (draw.uniform(3, 6), draw.random(), draw.random()) for name in names}
        self.each_s = draw.uniform(1, 2), draw.random(), draw.random()

    def seconds_of(self, rung: Rematerialized) -> float:
        return sum(s * len(names) for s, names in zip(self.each_s, rung, strict=True))

    def memory_of(self, rung: Rematerialized) -> Memory:
        taken = [self.bytes[n][level] for level, names in enumerate(rung) for n in names]
        peak = 100.0 - 80.0 / (6 * len(self.names)) * sum(taken)
        return Memory(0.0, 0.0, 0.0, peak, 0.0, peak)


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_of_drawn_rungs_is_found(seed: int) -> None:
    draw = random.Random(seed)
    search = Drawn(draw, draw.randint(1, 40))
    cheapest, looked_at = search.best(), len(search.known)
    rungs = prefixes(search.names, search.fetching, search.cheap)
    within = [x for x in map(search.tried, rungs) if search.budget.fits(x.memory)]
    if within:
        least = min(each.seconds for each in within)
        assert search.budget.fits(cheapest.memory) and cheapest.seconds == pytest.approx(least)
    else:
        assert cheapest.memory.peak == min(each.memory.peak for each in search.known.values())
    assert looked_at <= 40  # of up to 320


# -- the order of plans ----------------------------------------------------------------------------
def random_tables(draw: random.Random) -> tuple[list[int], list[Table], list[Table]]:
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 6))]
    numbers = np.random.default_rng(draw.randint(0, 1 << 30))
    tables = []
    for _ in range(8):
        several = sorted(draw.sample(range(len(sizes)), min(len(sizes), draw.randint(1, 3))))
        tables.append(Table(tuple(several), numbers.random([sizes[v] for v in several])))
    return sizes, tables, [Table((v,), numbers.random(size)) for v, size in enumerate(sizes)]


def everything(
    sizes: list[int], tables: list[Table], bytes_of: list[Table], cap: float
) -> Iterator[float]:
    for values in itertools.product(*map(range, sizes)):
        costs, needs = (
            sum(float(t.costs[tuple(values[v] for v in t.variables)]) for t in several)
            for several in (tables, bytes_of)
        )
        if needs <= cap:
            yield costs


@pytest.mark.parametrize("seed", range(40))
def test_ranked_gives_all_within_the_cap_in_order(seed: int) -> None:
    draw = random.Random(seed)
    sizes, tables, bytes_of = random_tables(draw)
    cap = draw.uniform(0, len(sizes)) if seed % 4 else float("inf")
    solutions = list(by_cost(sizes, tables, [(bytes_of, cap)]))
    wanted = sorted(everything(sizes, tables, bytes_of, cap))
    np.testing.assert_allclose([cost for cost, _ in solutions], wanted, rtol=1e-12)
    assert len({tuple(values) for _, values in solutions}) == len(wanted)
