"""The figures of a step in micro-batches, and when a plan takes several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
import models
from autopar import Stages
from autopar.errors import PlanError
from autopar.planner.division_search import in_fastest_division, in_fastest_microbatches
from autopar.planner.request import PlanRequest
from priced import EMULATED

WORLD = autopar.World.preset("dgx-h100", 4)


@functools.cache
def planned(layout: str, count: int, **more: Any) -> autopar.Plan:
    with torch.device("meta"):
        model = models.GptWithLogits(vocabulary=1024, sequence=128, hidden=256, heads=4, layers=2)
        ids = torch.zeros(32, 128, dtype=torch.long)
    return autopar.plan(
        model, WORLD, (ids, ids), layout, microbatches=count, smaller=False, outputs="sharded",
        **more,
    )  # fmt: skip


@pytest.mark.slow_cells("fsdp")
@pytest.mark.slow_cells("ddp", "megatron-sp")
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron-sp"])
def test_figures_of_microbatches_agree_with_one_another(layout: str) -> None:
    plan = planned(layout, 4)
    assert plan.timeline().seconds == plan.overlapped
    assert sum(row.step_seconds for row in plan.rows) == pytest.approx(plan.overlapped)
    assert float(plan.formula().bytes()) == pytest.approx(plan.comm_bytes)
    assert plan.memory is not None and plan.memory.peak == plan.peak_bytes


@pytest.mark.slow_cells("4")
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_gradient_is_alive_between_microbatches(ranks: int) -> None:
    """Those that no ranks sum, too: all of one rank's, those of weights that megatron splits."""
    with torch.device("meta"):
        model = models.GptWithLogits(vocabulary=1024, sequence=128, hidden=256, heads=4, layers=2)
        ids = torch.zeros(32, 128, dtype=torch.long)
    layout = "megatron" if ranks > 1 else "auto"
    plan = autopar.plan(
        model, autopar.World.preset("dgx-h100", ranks), (ids, ids), layout, microbatches=4,
        smaller=False, outputs="sharded",
    )  # fmt: skip
    assert plan.memory is not None
    assert plan.memory.gradients >= 0.99 * plan.memory.parameters


@pytest.mark.slow
def test_sums_and_the_optimizer_come_once() -> None:
    single, four = planned("ddp", 1), planned("ddp", 4)
    assert four.comm_bytes == pytest.approx(single.comm_bytes, rel=1e-3)
    sums = [c for c in four.collectives if c.backward and c.kind == "all_reduce"]
    assert sum(c.bytes for c in sums) == pytest.approx(four.comm_bytes, rel=1e-3)
    optimizer = [next(r for r in p.rows if r.subgraph == "optimizer") for p in (single, four)]
    assert optimizer[1].seconds == pytest.approx(optimizer[0].seconds)


def test_weights_are_gathered_and_summed_once_where_they_fit() -> None:
    single, four = planned("fsdp", 1), planned("fsdp", 4)
    assert four.sums_once and four.gathers_once
    for kind in ("all_gather", "reduce_scatter"):
        sent = [sum(c.bytes for c in p.collectives if c.kind == kind) for p in (single, four)]
        assert sent[1] == pytest.approx(sent[0], rel=1e-3)
    step = four.timeline()
    assert step.before is not None and step.times == 3
    assert not [s for s in step.before.spans if s.kind in ("all_gather", "reduce_scatter")]
    assert [s for s in step.spans if s.kind == "all_gather"]
    assert autopar.Plan.from_json(four.to_json()).gathers_once


def test_weights_that_have_no_room_are_gathered_in_every_microbatch() -> None:
    free = planned("fsdp", 4)
    limited = planned("fsdp", 4, recompute="full")
    assert limited.recompute and not limited.gathers_once
    again = [sum(c.bytes for c in p.collectives if c.kind == "all_gather") for p in (free, limited)]
    assert again[1] > 4 * again[0]


@pytest.mark.slow
def test_scattered_sums_come_in_every_microbatch_where_they_have_no_room() -> None:
    free = planned("fsdp", 4)
    limited = planned("fsdp", 4, memory=0.9 * free.peak_bytes / 0.92)
    assert free.sums_once and not limited.sums_once
    assert limited.peak_bytes <= (limited.device_limit or 0)
    assert limited.comm_bytes > 1.2 * free.comm_bytes
    assert autopar.Plan.from_json(limited.to_json()).sums_once is False


# -- how many ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_microbatches_are_taken_before_blocks_are_computed_again() -> None:
    with torch.device("meta"):
        model = models.GptWithLogits(vocabulary=256, sequence=512, hidden=1024, heads=8, layers=2)
        ids = torch.zeros(64, 512, dtype=torch.long)
    free = autopar.plan(model, WORLD, (ids, ids), "ddp", smaller=False)
    limit = 0.7 * free.peak_bytes / 0.92
    single, best = (
        autopar.plan(
            model, WORLD, (ids, ids), "ddp", memory=limit, smaller=False, microbatches=count
        )
        for count in (1, "auto")
    )
    assert single.recompute and single.microbatches == 1
    assert best.microbatches > 1 and not best.recompute
    assert best.step_seconds < single.step_seconds
    assert best.peak_bytes <= (best.device_limit or 0)


def test_one_microbatch_stands_where_it_fits_and_errors_are_those_of_one() -> None:
    tried: list[int] = []
    plan = planned("ddp", 1)

    def attempt(request: PlanRequest) -> autopar.Plan:
        tried.append(request.microbatches)
        if request.microbatches < 8 and tried[0] != 1:
            raise PlanError("no room")
        return plan

    assert in_fastest_microbatches(attempt, PlanRequest("ddp"), 12) is plan
    assert tried == [1]

    def refuse(request: PlanRequest) -> autopar.Plan:
        tried.append(request.microbatches)
        raise PlanError(f"no room in {request.microbatches}")

    tried.clear()
    with pytest.raises(PlanError, match="no room in 1"):
        in_fastest_microbatches(refuse, PlanRequest("ddp"), 12)
    assert tried == [1, 2, 4, 12]


# -- stages --------------------------------------------------------------------------------------
class _Tried:
    """Plans whose step takes what `seconds` says of (stages, micro-batches), and what was tried."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.seconds, self.tried = seconds, list[tuple[int, int, bool]]()
        self.plan = planned("ddp", 1)

    def __call__(self, request: PlanRequest) -> autopar.Plan:
        stages, count = request.layout, request.microbatches
        number = int(stages.count) if isinstance(stages, Stages) else 1
        self.tried.append((number, count, not request.overlap))
        step = self.seconds(number, count)
        starts = tuple(f"blocks.{i}" for i in range(1, number))
        schedule = "1f1b" if number > 1 else ""
        return dataclasses.replace(
            self.plan, overlapped=step, microbatches=count, stage_starts=starts, schedule=schedule
        )


ROWS = (torch.zeros(64, 2),)
AUTO = PlanRequest("auto", overlap=True)


def test_auto_takes_stages_where_a_step_is_a_twentieth_shorter() -> None:
    def seconds(stages: int, count: int) -> float:
        return 8.0 / stages + (stages - 1) / count + 1.0

    attempt = _Tried(seconds)
    plan = in_fastest_division(attempt, autopar.World.of(8), AUTO, "auto", ROWS)
    assert len(plan.stage_starts) == 7 and plan.microbatches == 64
    assert attempt.tried[-1] == (8, 64, False), "the fastest is planned as any plan"
    assert all(quickly for _, _, quickly in attempt.tried[1:-1])


def test_auto_stays_without_stages_where_they_save_little() -> None:
    attempt = _Tried(lambda stages, count: 2.0 if stages == 1 else 1.95)
    plan = in_fastest_division(attempt, autopar.World.of(8), AUTO, "auto", ROWS)
    assert not plan.stage_starts
    fixed = _Tried(lambda stages, count: 1.0 / stages)
    assert not in_fastest_division(fixed, autopar.World.of(8), AUTO, 8, ROWS).stage_starts
    alone = _Tried(lambda stages, count: 1.0 / stages)
    plan = in_fastest_division(alone, autopar.World.of(8), AUTO, "auto", ROWS, pipelines=False)
    assert not plan.stage_starts and alone.tried == [(1, 1, False)]


def test_stages_whose_bubble_alone_is_too_long_are_not_planned() -> None:
    computed = sum(row.computation or row.seconds for row in planned("ddp", 1).rows)
    attempt = _Tried(lambda stages, count: 1.02 * computed)
    in_fastest_division(attempt, autopar.World.of(4), AUTO, "auto", ROWS)
    assert attempt.tried == [(1, 1, False)]


def test_one_division_is_planned_once() -> None:
    attempt = _Tried(lambda stages, count: 1.0)
    stages = AUTO.under(Stages(4, schedule="auto"))
    in_fastest_division(attempt, autopar.World.of(8), stages, 8, ROWS)
    assert attempt.tried == [(4, 8, False)]


def test_divisions_share_their_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.passes import trace

    rows: list[int] = []
    before = trace.trace

    def counted(module: Any, args: Any, kwargs: Any) -> Any:
        rows.append(len(args[0]))
        return before(module, args, kwargs)

    monkeypatch.setattr(trace, "trace", counted)
    model = models.GptWithLogits(vocabulary=64, sequence=16, hidden=32, heads=4, layers=4)
    ids = torch.zeros(8, 16, dtype=torch.long)
    plan = autopar.plan(
        model, 4, (ids, ids), Stages(within="ddp"), microbatches="auto", smaller=False
    )
    assert plan.stage_starts and len(rows) > 2
    assert len(rows) == len(set(rows)), "all rows, and a part of each number of micro-batches"


def test_numbers_of_stages_that_are_refused_are_passed_over() -> None:
    def seconds(stages: int, count: int) -> float:
        if stages in (1, 2):
            raise PlanError(f"no room in {stages}")
        return 1.0

    attempt = _Tried(seconds)
    plan = in_fastest_division(attempt, autopar.World.of(8), AUTO, "auto", ROWS)
    assert len(plan.stage_starts) == 3

    def never(stages: int, count: int) -> float:
        raise PlanError(f"no room in {stages}")

    with pytest.raises(PlanError, match="no room in 1"):
        in_fastest_division(_Tried(never), autopar.World.of(8), AUTO, "auto", ROWS)
    with pytest.raises(PlanError, match="no room in 2"):
        in_fastest_division(_Tried(never), autopar.World.of(8), AUTO.under(Stages()), "auto", ROWS)


def test_auto_plans_a_pipeline_over_slow_links() -> None:
    with torch.device("meta"):
        model = models.GptWithLogits(vocabulary=64, sequence=64, hidden=512, heads=4, layers=2)
        ids = torch.zeros(4, 64, dtype=torch.long)
    plan = autopar.plan(model, EMULATED, (ids, ids), microbatches="auto", smaller=False)
    whole = autopar.plan(model, EMULATED, (ids, ids), smaller=False)
    assert len(plan.stage_starts) == 1 and plan.ranks == 4
    assert plan.schedule in ("1f1b", "zero-bubble")
    assert plan.step_seconds <= 0.95 * whole.step_seconds


@pytest.mark.slow
def test_a_schedule_that_is_left_open_is_the_fastest() -> None:
    with torch.device("meta"):
        model = models.GptWithLogits(vocabulary=64, sequence=64, hidden=512, heads=4, layers=4)
        ids = torch.zeros(8, 64, dtype=torch.long)
    plans = [
        autopar.plan(model, 2, (ids, ids), layout, smaller=False, microbatches=4)
        for layout in (
            Stages(2),
            Stages(2, schedule="interleaved", rounds=2),
            Stages(2, schedule="auto"),
        )
    ]
    steps = [plan.step_seconds for plan in plans]
    assert steps[2] == min(steps) < steps[0] and plans[2].rounds == 2


def test_parallelize_searches_a_division_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.planner import planner

    searched: list[Any] = []
    search = planner.search_plan

    def counted(program: Any, world: Any, request: Any) -> Any:
        searched.append(request)
        return search(program, world, request)

    monkeypatch.setattr(planner, "search_plan", counted)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    par = autopar.parallelize(model, 1, (torch.ones(4, 8),), microbatches="auto")
    assert len(searched) == 1 and par.plan.microbatches == 1


def test_fewer_micro_batches_are_tried_where_their_rows_are_too_few() -> None:
    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x.square().mean()

    layout = Stages(2, "fsdp")  # eight micro-batches have a row each, not one for each of two ranks
    inputs = (torch.ones(8, 8),)
    plan = autopar.plan(Deep(), 4, inputs, layout, microbatches="auto", smaller=False)
    assert plan.microbatches in (2, 4)
