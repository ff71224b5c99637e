"""Plans compared by a step in which communication runs under computation."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
import models
from autopar import Plan
from autopar.cost.activations import Middle, activation_bytes
from autopar.cost.memory import Budget
from autopar.ir.program import Program
from autopar.passes import annotate, trace
from autopar.planner import mesh_search, overlap_search
from autopar.planner.deep_models import DeepModel, ShortenedModel
from autopar.planner.exact_search import search
from autopar.planner.mesh_search import best
from autopar.planner.named_layouts import candidates
from autopar.planner.objective import cost_terms
from autopar.planner.planner import fastest_plans
from autopar.planner.request import PlanRequest
from autopar.world import World
from benchmarks.planning.quality import cluster, small_gpt
from random_nets import analysed

WORLD = cluster()


@lru_cache
def program() -> Program:
    model, inputs = small_gpt()
    return annotate.chains(annotate.annotate(trace.trace(model, inputs, {})))


@lru_cache
def several() -> list[Program]:
    return fastest_plans(ShortenedModel(program(), WORLD), PlanRequest(overlap=True))


def test_the_shortest_step_comes_first() -> None:
    steps = [overlap_search.simulate_plan(one, WORLD) for one in several()]
    assert steps == sorted(steps) and len(steps) > 1


def test_the_sum_is_not_what_a_step_takes() -> None:
    """On a slow link a plan that gathers and sums more, but where it hides, is a tenth faster."""
    first, summed = several()[0], min(several(), key=lambda one: one.plan.seconds)  # type: ignore[union-attr]
    assert overlap_search.simulate_plan(first, WORLD) < 0.9 * overlap_search.simulate_plan(
        summed, WORLD
    )
    assert first.plan is not None and summed.plan is not None
    mesh, rules = next(
        one for one in candidates("auto", WORLD.ranks, program()) if one[0] == summed.plan.mesh
    )
    least = search(program(), mesh, WORLD, rules).seconds  # among all options, not the near ones
    assert first.plan.seconds > summed.plan.seconds == pytest.approx(least, rel=1e-9)
    assert first.plan.bound <= least


def test_what_holds_more_than_the_memory_for_sure_is_not_run() -> None:
    held = Middle(program(), "adamw")
    sizes = [activation_bytes(held, one.plan) for one in several() if one.plan is not None]
    limit, best = (min(sizes) + max(sizes)) / 2, several()[sizes.index(max(sizes))]
    others = overlap_search._Others(
        best, ShortenedModel(program(), WORLD), PlanRequest(budget=Budget(limit))
    )
    for one in several():
        others._enter(DeepModel(one))
    left = {id(one.deep.program) for one in others.near()} - {id(best)}
    assert left <= {id(one) for one, size in zip(several(), sizes, strict=True) if size <= limit}
    assert left and others.deep in {one.deep for one in others.near()}


def test_the_most_promising_by_either_measure_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_search, "_RUN", 1)
    best = several()[0]
    others = overlap_search._Others(best, ShortenedModel(program(), WORLD), PlanRequest())
    for one in several():
        others._enter(DeepModel(one))
    rated = list(others.found.values())
    for one in rated:
        summed = overlap_search._plan(one.deep.program).seconds
        assert one.middle == pytest.approx(one.light + summed)
    first = {min(rated, key=lambda one: one.light), min(rated, key=lambda one: one.middle)}
    assert len(first) == 2
    assert {one.deep for one in others.near()} == {one.deep for one in first} | {others.deep}


def test_of_every_name_a_plan_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others are more promising; of several plans of it the one that is the most."""
    monkeypatch.setattr(overlap_search, "_RUN", 1)
    monkeypatch.setattr(overlap_search, "_NEAR", 10.0)
    best = several()[0]
    others = overlap_search._Others(best, ShortenedModel(program(), WORLD), PlanRequest())
    for one in several():
        others._enter(DeepModel(one), "these")
    others.take_named("megatron")
    these, megatron = (
        min(others.names[name].values(), key=lambda one: one.middle)
        for name in ("these", "megatron")
    )
    light = min(others.found.values(), key=lambda one: one.light)
    assert len(others.names["megatron"]) > 1 and megatron.middle > these.middle
    near = {one.deep for one in others.near()}
    assert near == {light.deep, these.deep, megatron.deep, others.deep}


def rated(light: float, bare: float, name: str) -> Any:
    """A plan that takes `bare` seconds where what can overlap takes no time."""
    full = bare + (light - bare) / overlap_search.shares(WORLD)[-1]
    deep: Any = SimpleNamespace(program=name, runs=())
    return overlap_search._Rated(light, light + full, deep)


def test_plans_that_could_hardly_be_the_fastest_are_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor are those whose light step is long, unless little of it cannot overlap."""
    steps = {"slow": 1.9, "first": 0.95, "leans": 0.9, "near": 1.0, "slower": 1.5}
    simulated: list[str] = []

    def step(deep: Any, _: World) -> float:
        simulated.append(deep.program)
        return steps[deep.program]

    monkeypatch.setattr(overlap_search, "_step", step)
    monkeypatch.setattr(overlap_search, "_blocks_of_step", lambda deep: deep)
    given = [
        rated(2.0, 1.9, "slow"), rated(1.0, 0.9, "first"), rated(1.3, 0.95, "leans"),
        rated(1.05, 1.04, "near"), rated(1.4, 1.3, "slower"),
    ]  # fmt: skip
    found = [one.deep.program for one in overlap_search._by_step(given, WORLD)]
    assert found == ["leans", "first", "near", "slower", "slow"]
    assert simulated == ["first", "near", "leans"]


def test_the_fastest_of_deep_models_is_confirmed_on_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan whose estimate from fewer blocks was too low does not come first."""
    estimates, whole = {"a": 1.0, "b": 1.1, "c": 1.2}, {"a": 1.3, "b": 1.15, "c": 0.5}
    looked: list[str] = []

    def bucket_seconds(name: str, _: World) -> tuple[float, ...]:
        looked.append(name)
        return 2 * whole[name], whole[name]

    monkeypatch.setattr(overlap_search, "_step", lambda deep, _: estimates[deep.program])
    monkeypatch.setattr(
        overlap_search, "_blocks_of_step", lambda deep: SimpleNamespace(runs=(("blocks",),))
    )
    monkeypatch.setattr(overlap_search, "emit_program", lambda name, _: name)
    monkeypatch.setattr(overlap_search, "bucket_seconds", bucket_seconds)
    given = [rated(1.0, 0.9, name) for name in estimates]
    found = [one.deep.program for one in overlap_search._by_step(given, WORLD)]
    assert found == ["b", "c", "a"] and looked == ["a", "b"]


def test_what_leans_on_hiding_is_asked_of_every_named_layout() -> None:
    """3d's plan of the sum is far off here, what it finds where weights count less is near."""
    gpt, inputs = models.Gpt(), (torch.zeros(16, 16, dtype=torch.int64),) * 2
    given, world = analysed(gpt, inputs, {}), World.preset("pcie-4090", 16)
    others = overlap_search._Others(
        mesh_search.search_meshes(given, world, PlanRequest("ddp")),
        ShortenedModel(given, world),
        PlanRequest(),
    )
    others.take_named("3d")
    seconds = [
        one.light
        for one in others.found.values()
        if overlap_search._plan(one.deep.program).layout == "3d"
    ]
    assert min(seconds) < overlap_search._NEAR * others.least < max(seconds)


def test_every_plan_has_its_real_price() -> None:
    for one in several():
        assert one.plan is not None and one.annotations is not None
        assert one.annotations.share == 1.0
        assert sum(cost_terms(program(), one.plan, WORLD).values()) == pytest.approx(
            one.plan.seconds
        )


@pytest.mark.parametrize("share", [0.4, 0.1])
def test_a_share_lowers_the_bound_with_the_price(share: float) -> None:
    """The bound stays one where weights count less: of each mesh, what the search finds."""
    notes = program().annotations
    assert notes is not None
    light = replace(program(), annotations=replace(notes, share=share))
    given = list(candidates("auto", WORLD.ranks, light))
    found, whole = (best(p, given, WORLD) for p in (light, program()))
    assert found.bound <= found.plan.seconds * (1 + 1e-6) < whole.plan.seconds
    assert found.bound == pytest.approx(found.plan.seconds, rel=1e-2)


def test_plan_says_both_and_a_file_keeps_them() -> None:
    model, inputs = small_gpt()
    plan = autopar.plan(model, WORLD, inputs, memory=1e18, smaller=False, overlap=True)
    assert plan.overlapped == pytest.approx(plan.timeline().seconds)
    assert plan.overlapped < plan.seconds
    table = plan.table()
    assert str(table.title).endswith(f": {plan.overlapped * 1e3:.2f} ms a step, modelled")
    assert f"proven: with every collective by itself {plan.seconds * 1e3:.2f} ms, " in str(
        table.caption
    )
    assert Plan.from_json(plan.to_json()).overlapped == plan.overlapped
    headings = [str(column.header) for column in plan.table().columns]
    parts = ["compute", "comm.", "hidden", "exposed"]
    assert [heading.split()[0] for heading in headings[-4:]] == parts
    step, rows = plan.timeline(), plan.rows
    assert sum(r.communication for r in rows) == pytest.approx(step.communication)
    assert sum(r.hidden for r in rows) == pytest.approx(step.hidden_seconds)
    assert sum(r.computation + r.exposed for r in rows) == pytest.approx(plan.overlapped)
    assert all(-1e-12 <= r.exposed <= r.communication + 1e-12 for r in rows)
    assert f"= {plan.overlapped * 1e3:.2f} ms a step" in str(plan.table().caption)
    assert Plan.from_json(plan.to_json()).rows == rows
    in_order = autopar.plan(model, WORLD, inputs, memory=1e18, smaller=False, overlap=False)
    assert [str(column.header) for column in in_order.table().columns][-1] == "ms"
    assert in_order.overlapped is None and in_order.seconds < plan.seconds
    assert in_order.timeline().seconds > plan.overlapped


def test_one_rank_has_nothing_to_hide() -> None:
    model, inputs = torch.nn.Linear(4, 4), torch.zeros(2, 4)
    assert autopar.plan(model, 1, inputs, smaller=False, overlap=True).overlapped is None
