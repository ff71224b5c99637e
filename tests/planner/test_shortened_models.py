"""Plans searched on a shorter model are plans for the whole one, at its price."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from autopar.ir.deep_models import DeepModel
from autopar.ir.program import Program, check_choices
from autopar.passes import emit_program
from autopar.planner import solve
from autopar.planner.objective import cost_terms, sum_of_blocks
from autopar.planner.plan_notes import replicated_matmuls
from autopar.planner.request import PlanRequest
from autopar.planner.solve import ShortenedModel, promising
from autopar.planner.space import candidates
from autopar.world import World
from models import GptWithLogits
from traced import annotated

WORLD = World.preset("laptop", ranks=4)
LAYERS = 6


@lru_cache
def program() -> Program:
    ids = torch.zeros(8, 16, dtype=torch.int64)
    return annotated(GptWithLogits(layers=LAYERS), (ids, ids), {})


@pytest.mark.slow_cells("4d", "auto")
@pytest.mark.parametrize("layout", ["auto", "4d", "ddp"])  # of ddp there is one mesh
def test_as_good_as_searched_on_the_full_model(layout: str) -> None:
    shortened, pairs = ShortenedModel(program(), WORLD), list(candidates(layout, 4, program()))
    assert len(list(shortened.deep.longer.module.graph.nodes)) < len(
        list(program().module.graph.nodes)
    )
    deep = shortened.chosen(shortened.best(pairs), PlanRequest())
    check_choices(deep.program)
    emit_program(deep.program, WORLD)
    plan, whole = (
        deep.program.plan,
        solve.search_meshes(program(), WORLD, PlanRequest(layout)).plan,
    )
    assert plan is not None and whole is not None
    assert plan.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert plan.seconds == pytest.approx(sum(cost_terms(program(), plan, WORLD).values()), rel=1e-6)
    replicated = [
        [str(each) for each in replicated_matmuls(program(), every)] for every in (plan, whole)
    ]
    assert replicated[0] == replicated[1]


def test_of_two_meshes_the_one_that_is_better_for_the_full_model() -> None:
    shortened, pairs = ShortenedModel(program(), WORLD), list(candidates("4d", 4, program()))
    near = promising(shortened.bounds(pairs), pairs, 2)
    each = [shortened.chosen(shortened.plan([pair]), PlanRequest()).program.plan for pair in near]
    least = min(plan.seconds for plan in each if plan is not None)
    best_plan = shortened.chosen(shortened.best(pairs), PlanRequest()).program.plan
    assert len(each) == 2 and best_plan is not None and best_plan.seconds == pytest.approx(least)


def test_a_run_of_blocks_ends_where_layouts_do() -> None:
    """Known structure, another plan: blocks are alike only while their layouts are."""
    chosen = solve.search_meshes(program(), WORLD, PlanRequest("ddp"))
    plan, deep = chosen.plan, DeepModel(replace(chosen, plan=None))
    assert plan is not None
    (run,) = deep.runs
    assert deep.under(plan).runs == deep.runs
    name = next(n.name for n in deep.blocks[run[2][0]] if n.op == "placeholder")
    odd = replace(plan, stored={k: v for k, v in plan.stored.items() if k != name})
    assert all(run[2] not in run_blocks for run_blocks in deep.under(odd).runs)
    assert sum_of_blocks(deep.under(plan), WORLD) == pytest.approx(plan.seconds, rel=1e-6)
