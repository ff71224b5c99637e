"""A second plan of one traced model pays for what is new alone: calls are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import autopar
import models
from autopar.cost.memory import Budget
from autopar.ir import deep_models
from autopar.ir.program import Program
from autopar.passes import annotate
from autopar.planner import named_layouts, padding, simulate, solve
from autopar.planner.bounds import factor_graph
from autopar.planner.planner import search_plan
from autopar.planner.request import PlanRequest
from autopar.tools.report.alternatives import alternatives
from autopar.world import World
from traced import annotated

WORLD = World.preset("ethernet-25g", 2)
COUNTED = (
    (factor_graph._Builder, "build"),
    (deep_models, "block_keys"),
    (named_layouts, "dim_kinds"),
    (padding, "_annotated_anew"),
    (annotate, "annotate"),
    (solve, "best_within"),
    (solve, "best_at_shares"),
    (simulate, "_step"),
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function was called."""
    counts: Counter[str] = Counter()

    def counted(name: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return honest(*args, **kwargs)

        return call

    for owner, name in COUNTED:
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    return counts


def program(build: Callable[[], Any] = models.mlp) -> Program:
    model, args, _ = build()
    return annotated(model, args, {})


def within(limit: float | None, layout: str = "auto") -> PlanRequest:
    return PlanRequest(layout, Budget(limit), overlap=True)


@pytest.mark.slow
def test_the_same_request_again_works_out_nothing(calls: Counter[str]) -> None:
    traced = program(models.gpt)
    first = search_plan(traced, WORLD, within(None)).plan
    worked_out = {"build", "block_keys", "dim_kinds", "best_within", "best_at_shares", "_step"}
    assert worked_out <= calls.keys()
    calls.clear()
    assert search_plan(traced, WORLD, within(None)).plan == first
    assert not calls


def test_another_limit_pays_for_what_fits_alone(calls: Counter[str]) -> None:
    traced = program()
    search_plan(traced, WORLD, within(None))
    calls.clear()
    limited = within(0.7 * peak_of(traced))
    plan = search_plan(traced, WORLD, limited).plan
    assert calls.keys() <= {"build", "_step"}  # weights gathered again; others that may fit
    assert plan == search_plan(program(), WORLD, limited).plan


def peak_of(traced: Program) -> float:
    """Of the plan without a limit."""
    plan = search_plan(traced, WORLD, within(1e15)).plan
    assert plan is not None and plan.memory is not None
    return plan.memory.peak


def test_another_world_pays_for_its_searches_alone(calls: Counter[str]) -> None:
    traced, other = program(), World.preset("laptop", 4)
    search_plan(traced, WORLD, within(None))
    calls.clear()
    plan = search_plan(traced, other, within(None)).plan
    assert calls.keys() == {"best_within", "best_at_shares", "_step"}
    assert plan == search_plan(program(), other, within(None)).plan


@pytest.mark.slow
def test_named_layouts_of_a_report_share_one_graph_of_factors(calls: Counter[str]) -> None:
    model, args, _ = models.gpt()
    plan = autopar.plan(model, WORLD, args, smaller=False)
    calls.clear()
    others = alternatives(plan)
    assert len([each for each in others if each.seconds is not None]) > 4
    assert not calls.keys() & {"build", "block_keys", "dim_kinds", "annotate"}


def test_what_is_cached_goes_with_the_tensors() -> None:
    model, args, _ = models.mlp()
    plan = autopar.plan(model, WORLD, args, smaller=False)
    assert plan.context is not None
    graph = plan.context.source.module.graph
    assert "_remembered_by_autopar" in vars(graph)
    plan.context.without_tensors()
    assert "_remembered_by_autopar" not in vars(graph)
