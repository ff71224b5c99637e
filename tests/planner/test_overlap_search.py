"""Plans compared by a step in which communication runs under computation."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
import models
from autopar import Plan
from autopar.cost.activations import MidstepMemory, activation_bytes
from autopar.cost.memory import Budget
from autopar.ir.deep_models import DeepModel
from autopar.ir.program import IN_FULL, Program
from autopar.planner import simulate, solve
from autopar.planner.bound import bound_rivals
from autopar.planner.exact_search import search
from autopar.planner.objective import cost_terms
from autopar.planner.planner import fastest_plans
from autopar.planner.request import PlanRequest
from autopar.planner.solve import Contender, ShortenedModel, best
from autopar.planner.space import Candidate, candidates
from autopar.world import World
from benchmarks.planning.quality import cluster, small_gpt
from traced import annotated

WORLD = cluster()
LEAST_SHARE = solve.shares(WORLD)[-1]


@lru_cache
def program() -> Program:
    return annotated(*small_gpt())


@lru_cache
def several() -> list[Contender]:
    return fastest_plans(program(), WORLD, PlanRequest(overlap=True))


def contenders(least: Contender, request: PlanRequest, name: str = "") -> solve.Contenders:
    """All plans beside the one that counts as that of the least sum."""
    entered = solve.Contenders(least.program, ShortenedModel(program(), WORLD), request)
    for rival in several():
        entered.enter(DeepModel(rival.program), name)
    return entered


def bounded(name: str, model: Program, world: World) -> tuple[list[Candidate], list[float]]:
    """The candidates of a named layout, with their bounds."""
    meshes = candidates(name, world.ranks, model)
    return meshes, bound_rivals(model, {name: meshes}, world)[name]


@pytest.mark.slow
def test_the_shortest_step_comes_first() -> None:
    """Also of those at the end, which are not simulated as they could hardly be the fastest."""
    steps = [simulate.simulate_plan(rival.program, WORLD) for rival in several()]
    assert steps[0] == min(steps) and len(steps) > 1


@pytest.mark.slow
def test_the_sum_is_not_what_a_step_takes() -> None:
    """On a slow link a plan that gathers and sums more, but where it hides, is a tenth faster."""
    first, summed = several()[0], min(several(), key=lambda each: each.plan.seconds)
    assert simulate.simulate_plan(first.program, WORLD) < 0.9 * simulate.simulate_plan(
        summed.program, WORLD
    )
    mesh, rules = next(
        pair for pair in candidates("auto", WORLD.ranks, program()) if pair[0] == summed.plan.mesh
    )
    least = search(program(), mesh, WORLD, rules).seconds  # among all options, not the near ones
    assert first.plan.seconds > summed.plan.seconds == pytest.approx(least, rel=1e-9)
    assert first.plan.bound <= least


@pytest.mark.slow
def test_what_holds_more_than_the_memory_for_sure_is_not_run() -> None:
    memory = MidstepMemory(program(), "adamw")
    sizes = [activation_bytes(memory, rival.plan) for rival in several()]
    limit, most = (min(sizes) + max(sizes)) / 2, several()[sizes.index(max(sizes))]
    others = contenders(most, PlanRequest(budget=Budget(limit)))
    run = simulate.most_promising(others, others.request)
    left = {id(rival.program) for rival in run} - {id(most.program)}
    sized = zip(several(), sizes, strict=True)
    assert left <= {id(rival.program) for rival, size in sized if size <= limit}
    assert left and others.least_sum in run


def test_the_most_promising_by_either_measure_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_RUN", 1)
    others = contenders(several()[0], PlanRequest())
    every = list(others.all.values())
    first = {
        min(every, key=lambda each: each.least_step), min(every, key=simulate.half_hidden),
    }  # fmt: skip
    assert len(first) == 2
    assert {*simulate.most_promising(others, others.request)} == {*first, others.least_sum}


def test_of_every_name_a_plan_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others are more promising; of several plans of it the one that is the most."""
    monkeypatch.setattr(simulate, "_RUN", 1)
    for module in (simulate, solve):
        monkeypatch.setattr(module, "NEAR", 10.0)
    others = contenders(several()[0], PlanRequest(), "these")
    others.take_named("megatron", *bounded("megatron", program(), WORLD))
    these, megatron = (
        min(others.named[name].values(), key=simulate.half_hidden) for name in ("these", "megatron")
    )
    hidden = min(others.all.values(), key=lambda each: each.least_step)
    assert len(others.named["megatron"]) > 1 and simulate.half_hidden(
        megatron
    ) > simulate.half_hidden(these)
    assert {*simulate.most_promising(others, others.request)} == {
        hidden,
        these,
        megatron,
        others.least_sum,
    }


def contender(least_step: float, exposed: float, name: str) -> Contender:
    """A plan that takes `exposed_seconds` seconds where what can overlap takes no time."""
    full = exposed + (least_step - exposed) / LEAST_SHARE
    program = SimpleNamespace(name=name, plan=SimpleNamespace(seconds=full))
    deep: Any = SimpleNamespace(program=program, runs=())
    result = Contender(deep, least_step)
    assert simulate.exposed_seconds(result, LEAST_SHARE) == pytest.approx(exposed)
    return result


def test_plans_that_could_hardly_be_the_fastest_are_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor are those whose light step is long, unless little of it cannot overlap."""
    steps = {"slow": 1.9, "first": 0.95, "leans": 0.9, "near": 1.0, "slower": 1.5}
    simulated: list[str] = []

    def step(deep: Any, _: World) -> float:
        simulated.append(deep.program.name)
        return steps[deep.program.name]

    monkeypatch.setattr(simulate, "_step", step)
    monkeypatch.setattr(simulate, "_blocks_of_step", lambda deep: deep)
    rivals = [
        contender(2.0, 1.9, "slow"), contender(1.0, 0.9, "first"), contender(1.3, 0.95, "leans"),
        contender(1.05, 1.04, "near"), contender(1.4, 1.3, "slower"),
    ]  # fmt: skip
    names = [rival.deep.program.name for rival in simulate._by_step(rivals, WORLD, LEAST_SHARE, {})]
    assert names == ["leans", "first", "near", "slower", "slow"]
    assert simulated == ["first", "near", "leans"]


def test_what_is_exposed_by_the_sum_may_be_less_in_steps_of_many_small_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one's step is shorter than what is exposed of it, so those are simulated too of
    which little more is exposed: EfficientNet-B4's fastest plan on eight H100 was one of them.
    """
    steps = {"first": 0.8, "next": 0.75, "far": 0.9}
    monkeypatch.setattr(simulate, "_step", lambda deep, _: steps[deep.program.name])
    monkeypatch.setattr(simulate, "_blocks_of_step", lambda deep: deep)
    known: dict[Contender, float] = {}
    rivals = [contender(1.0, 0.97, "first"), contender(1.05, 1.02, "next"),
             contender(1.3, 1.25, "far")]  # fmt: skip
    names = [
        rival.deep.program.name for rival in simulate._by_step(rivals, WORLD, LEAST_SHARE, known)
    ]
    assert names == ["next", "first", "far"]
    assert [rival.deep.program.name for rival in known] == ["first", "next"]


def test_the_fastest_of_deep_models_is_confirmed_on_the_full_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan whose estimate from fewer blocks was too low does not come first."""
    estimates, whole = {"a": 1.0, "b": 1.1, "c": 1.2}, {"a": 1.3, "b": 1.15, "c": 0.5}
    looked: list[str] = []

    def bucket_seconds(program: Any, _: World) -> tuple[float, ...]:
        looked.append(program.name)
        return 2 * whole[program.name], whole[program.name]

    monkeypatch.setattr(simulate, "_step", lambda deep, _: estimates[deep.program.name])
    monkeypatch.setattr(
        simulate, "_blocks_of_step", lambda deep: SimpleNamespace(runs=(("blocks",),))
    )
    monkeypatch.setattr(simulate, "emit_program", lambda program, _: program)
    monkeypatch.setattr(simulate, "bucket_seconds", bucket_seconds)
    rivals = [contender(1.0, 0.9, name) for name in estimates]
    names = [rival.deep.program.name for rival in simulate._by_step(rivals, WORLD, LEAST_SHARE, {})]
    assert names == ["b", "c", "a"] and looked == ["a", "b"]


@pytest.mark.slow
def test_what_leans_on_overlap_is_tried_under_every_named_layout() -> None:
    """3d's plan of the sum is far off here, what it finds where weights count less is near."""
    gpt, inputs = models.GptWithLogits(), (torch.zeros(16, 16, dtype=torch.int64),) * 2
    traced_gpt, world = annotated(gpt, inputs, {}), World.preset("pcie-4090", 16)
    others = solve.Contenders(
        solve.search_meshes(traced_gpt, world, PlanRequest("ddp")),
        ShortenedModel(traced_gpt, world),
        PlanRequest(),
    )
    others.take_named("3d", *bounded("3d", traced_gpt, world))
    seconds = [rival.least_step for rival in others.all.values() if rival.plan.layout == "3d"]
    assert min(seconds) < solve.NEAR * others.least_step < max(seconds)


def test_every_plan_has_its_real_price() -> None:
    for rival in several():
        assert rival.program.counting == IN_FULL
        assert sum(cost_terms(program(), rival.plan, WORLD).values()) == pytest.approx(
            rival.plan.seconds
        )


@pytest.mark.slow_cells("0.1")
@pytest.mark.parametrize("share", [0.4, 0.1])
def test_a_share_lowers_the_bound_with_the_price(share: float) -> None:
    """The bound stays one where weights count less: of each mesh, what the search finds."""
    light = solve.with_share(program(), share)
    pairs = list(candidates("auto", WORLD.ranks, light))
    light_plan, whole = (best(p, pairs, WORLD) for p in (light, program()))
    assert light_plan.bound <= light_plan.seconds * (1 + 1e-6) < whole.seconds
    assert light_plan.bound == pytest.approx(light_plan.seconds, rel=1e-2)


@pytest.mark.slow
def test_plan_says_both_and_a_file_keeps_them() -> None:
    model, inputs = small_gpt()
    plan = autopar.plan(model, WORLD, inputs, memory=1e18, smaller=False, overlap=True)
    assert plan.overlapped == pytest.approx(plan.timeline().seconds)
    assert plan.overlapped < plan.seconds
    table = plan.table()
    assert str(table.title).endswith(f": {plan.overlapped * 1e3:,.2f} ms a step, modelled")
    waited = f"gap: this plan would take {plan.seconds * 1e3:,.2f} ms if every collective were sent"
    assert waited in str(table.caption)
    loose = dataclasses.replace(plan, bound=0.9 * plan.seconds)  # another may take a tenth less
    assert "would take at most 10.00% less" in str(loose.table().caption)
    assert Plan.from_json(plan.to_json()).overlapped == plan.overlapped
    headings = [str(column.header) for column in plan.table().columns]
    parts = ["compute", "comm.", "hidden", "exposed"]
    assert [heading.split()[0] for heading in headings[-4:]] == parts
    step, rows = plan.timeline(), plan.rows
    assert sum(r.communication for r in rows) == pytest.approx(step.communication)
    assert sum(r.hidden for r in rows) == pytest.approx(step.hidden_seconds)
    assert sum(r.computation + r.exposed for r in rows) == pytest.approx(plan.overlapped)
    assert all(-1e-12 <= r.exposed <= r.communication + 1e-12 for r in rows)
    assert f"= {plan.overlapped * 1e3:,.2f} ms a step" in str(plan.table().caption)
    assert Plan.from_json(plan.to_json()).rows == rows
    in_order = autopar.plan(model, WORLD, inputs, memory=1e18, smaller=False, overlap=False)
    assert [str(column.header) for column in in_order.table().columns][-1] == "ms"
    assert in_order.overlapped is None and in_order.seconds < plan.seconds
    assert in_order.timeline().seconds > plan.overlapped


def test_one_rank_has_nothing_to_hide() -> None:
    model, inputs = torch.nn.Linear(4, 4), torch.zeros(2, 4)
    assert autopar.plan(model, 1, inputs, smaller=False, overlap=True).overlapped is None
