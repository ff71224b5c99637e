"""Deep models read off shorter ones: what is said of them is what working them out whole finds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import models
from autopar import PlanError, World
from autopar.cost.memory import Budget, Recompute
from autopar.cost.simulator import timeline
from autopar.ir.deep_models import DeepModel
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner import solve
from autopar.planner.fit import LimitedSearch
from autopar.planner.planner import search_plan
from autopar.planner.rematerialize import (
    Estimated,
    RematerializationSteps,
    Rematerialized,
    rematerialize_to_fit,
)
from autopar.planner.request import PlanRequest
from autopar.planner.simulate import simulate_plan
from end_rungs import end_rungs
from traced import annotated

LAYERS = 6
TWO = World.preset("dgx-h100", ranks=2)
BUDGET = Budget(1.0, "adamw", "auto")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Deepened(nn.Module):
    """Blocks one after the other, number `odd` wider than the others; `skip`: all of them are used
    at the end.
    """

    def __init__(self, odd: int | None = None, skip: bool = False) -> None:
        super().__init__()
        width = [64 if layer != odd else 96 for layer in range(LAYERS)]
        self.blocks = nn.ModuleList(Block(each) for each in width)
        self.skip = skip
        self.into = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return (sum(outputs) if self.skip else x).square().mean()


class Sharing(Block):
    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + shared)


class InTurns(nn.Module):
    """Narrow and wide blocks in turns, all of which add what the first one makes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sharing((64, 96)[layer % 2]) for layer in range(layers))
        self.blocks[0].shared = nn.Linear(32, 1)
        self.into = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        shared = self.blocks[0].shared(x)
        for block in self.blocks:
            x = block(x, shared)
        return x.square().mean()


def chosen(name: str, layout: str, ranks: int) -> tuple[Program, World]:
    if name == "gpt":
        model, (args, kwargs) = models.GptWithLogits(layers=LAYERS).train(), (models.gpt()[1], {})
    else:
        model, args, kwargs = models.llama(num_hidden_layers=LAYERS)
    world = World.preset("dgx-h100", ranks=ranks)
    return solve.search_meshes(annotated(model, args, kwargs), world, PlanRequest(layout)), world


@pytest.mark.slow_cells("gpt-auto", "gpt-megatron-sp", "llama-*")
@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt", "auto"), ("gpt", "megatron-sp"), ("llama", "fsdp"), ("llama", "ddp")],
)
def test_steps_and_peaks_are_those_of_the_full_model(name, layout):
    program, world = chosen(name, layout, 4)
    deep = DeepModel(program)
    assert [len(run) for run in deep.runs] in ([LAYERS], [LAYERS - 1], [LAYERS - 2])
    check_against_full(program, deep, world)


@pytest.mark.slow_cells("fsdp")
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_blocks_that_come_in_turns_are_units(layout: str) -> None:
    world, model = World.preset("dgx-h100", ranks=4), InTurns(2 * 10 + 1)
    program = solve.search_meshes(
        annotated(model, (torch.randn(8, 4, 32),)), world, PlanRequest(layout)
    )
    deep = DeepModel(program)
    assert [(len(run), len(run[0])) for run in deep.runs] == [(9, 2)]  # after the first two
    # the first block has an op of its own, and is taken to run again what the third one does
    check_against_full(program, deep, world, seconds_apart=2e-5)


def check_against_full(
    program: Program, deep: DeepModel, world: World, seconds_apart: float = 1e-9
) -> None:
    assert simulate_plan(program, world) == pytest.approx(
        timeline(emit_program(program, world), world).seconds
    )
    # With AdamW on GPUs the peak of a shallow program may lie at the optimizer's step and that of a
    # deep one before it: no straight line, and what `worked_out` is for.
    budget = dataclasses.replace(BUDGET, optimizer="sgd-momentum")
    estimate, whole = (
        Estimated(deep, world, budget),
        RematerializationSteps(emit_program(program, world), world, budget),
    )
    assert (estimate.names, estimate.fetching) == (whole.names, whole.fetching)
    assert estimate.cheap == whole.cheap == whole.names
    for rung in end_rungs(whole):
        estimated, other = estimate.tried(rung), whole.tried(rung)
        assert estimated.memory.peak == pytest.approx(other.memory.peak, rel=5e-3)
        assert estimated.seconds == pytest.approx(other.seconds, abs=seconds_apart)


def test_only_equal_blocks_are_left_out():
    world = World.of(2)
    x = torch.randn(4, 32)
    plain = solve.search_meshes(annotated(Deepened(), (x,)), world, PlanRequest("ddp"))
    odd = solve.search_meshes(annotated(Deepened(odd=3), (x,)), world, PlanRequest("ddp"))
    skip = solve.search_meshes(annotated(Deepened(skip=True), (x,)), world, PlanRequest("ddp"))
    assert [len(run) for run in DeepModel(plain).runs] == [LAYERS - 1]  # the first takes the input
    assert DeepModel(odd).runs == ()  # too few on either side of it
    assert DeepModel(skip).runs == ()  # every block is used at the end
    assert DeepModel(odd).shorter() is odd


def test_blocks_under_other_layouts_are_not_equal():
    program, _ = chosen("gpt", "ddp", 4)
    assert program.plan is not None
    middle = f"blocks.{LAYERS // 2}"
    nodes = [
        n
        for (prefix, number), ns in DeepModel(program).blocks.items()
        for n in ns
        if f"{prefix}.{number}" == middle
    ]
    names = [n.name for n in nodes if n.name in program.plan.stored]
    assert names
    other = {**program.plan.stored, names[0]: None}
    plan = dataclasses.replace(program.plan, stored=other)
    assert DeepModel(dataclasses.replace(program, plan=plan)).runs == ()


@pytest.fixture
def too_low(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Estimates of peaks are a tenth too low. What is filled: by how much they were found to be,
    where planning had to aim lower for it.
    """
    honest, aim_lower, offsets = Estimated.memory_of, LimitedSearch.lower, list[float]()

    def less(self: Estimated, rung: Rematerialized) -> Memory:
        memory = honest(self, rung)
        return dataclasses.replace(memory, peak=0.9 * memory.peak)

    def lower(self: LimitedSearch, off: float) -> LimitedSearch:
        offsets.append(off)
        return aim_lower(self, off)

    monkeypatch.setattr(Estimated, "memory_of", less)
    monkeypatch.setattr(LimitedSearch, "lower", lower)
    return offsets


def needs(program: Program, layout: str, recompute: Recompute) -> float:
    """The peak of the plan of least time."""
    fullest = Budget(1e15, "adamw", recompute)
    free = search_plan(program, TWO, PlanRequest(layout, budget=fullest)).plan
    assert free is not None
    return free.peak_bytes


def worked_out(program: Program, plan: Plan, limit: float) -> float:
    whole = emit_program(dataclasses.replace(program, plan=plan), TWO)
    return RematerializationSteps(whole, TWO, Budget(limit)).planned().memory.peak


@pytest.mark.slow
def test_an_estimate_that_is_too_low_costs_no_memory(too_low):
    """The plan still fits what there is: a block or two more are dropped."""
    program = annotated(models.GptWithLogits(layers=LAYERS).train(), models.gpt()[1])
    limit = 0.7 * needs(program, "fsdp", "auto")
    plan = search_plan(program, TWO, PlanRequest("fsdp", budget=Budget(limit))).plan
    assert plan is not None and plan.memory is not None
    assert plan.memory.peak <= limit == plan.limit
    assert worked_out(program, plan, limit) == plan.memory.peak
    assert too_low == []


@pytest.mark.slow_cells("True")
@pytest.mark.slow_cells("False")
@pytest.mark.parametrize("overlap", [False, True])
def test_another_plan_is_found_where_blocks_cannot_make_up_for_an_estimate(too_low, overlap):
    """By the step with communication hidden several plans compete: the next one fits as it is."""
    program = annotated(Deepened(), (torch.randn(512, 32),))
    limit = 0.95 * needs(program, "auto", "none")
    budget = Budget(limit, "adamw", "none")
    plan = search_plan(program, TWO, PlanRequest("auto", budget=budget, overlap=overlap)).plan
    assert plan is not None and plan.memory is not None
    assert worked_out(program, plan, limit) == plan.memory.peak <= limit
    assert (plan.limit, too_low) == ((None, []) if overlap else (limit, [pytest.approx(0.9)]))


@pytest.mark.slow
def test_what_fits_by_an_estimate_alone_is_refused(too_low):
    """No layout of so many ranks needs less than with every block recomputed: told, not planned."""
    program = annotated(Deepened(), (torch.randn(512, 32),))
    budget = Budget(0.95 * needs(program, "fsdp", "full"))
    plan = search_plan(program, TWO, PlanRequest("fsdp", budget=budget))
    (off,) = too_low
    assert (
        0.9 <= off < 0.91
    )  # the exact peak is that of a neighbouring rung, which needs a little less
    with pytest.raises(PlanError, match="every block recomputed, needs"):
        rematerialize_to_fit(emit_program(plan, TWO), TWO, budget)
