"""Pipelines within a limit of memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import autopar
import models
from autopar import Stages
from autopar.cost.memory import Budget
from autopar.passes.stages import cut
from autopar.planner.pipelines import memory_by_rank
from autopar.planner.request import PlanRequest
from autopar.planner.stage_memory import stage_key
from autopar.runtime.apply import renew_plan

WORLD = autopar.World.preset("dgx-h100", 4)
RESERVED = 0.92  # of a device's memory is for the step


def gpt_of(layers: int) -> tuple[models.GptWithLogits, torch.Tensor]:
    with torch.device("meta"):
        model = models.GptWithLogits(
            vocabulary=256, sequence=512, hidden=512, heads=8, layers=layers
        )
        return model, torch.zeros(32, 512, dtype=torch.long)


def test_a_rank_that_keeps_too_many_micro_batches_recomputes_blocks() -> None:
    model, ids = gpt_of(4)
    stages = Stages(4, "ddp")
    plan = partial(autopar.plan, model, WORLD, (ids, ids), stages, microbatches=8, smaller=False)
    limit = 0.7 * plan(recompute="none").peak_bytes
    tight = plan(memory=limit / RESERVED)
    assert tight.peak_bytes <= limit * 1.0001 and tight.device_limit == pytest.approx(limit)
    assert (tight.recompute or tight.rerun) and tight.stage_starts
    with pytest.raises(autopar.PlanError, match=r"no plan fits: rank \d of the pipeline needs"):
        plan(memory=limit / RESERVED, recompute="none")
    # what is planned later for the same device: a plan from a file, and another call
    read = renew_plan(model, autopar.Plan.from_json(tight.to_json()), (ids, ids))
    assert read.device_limit == tight.device_limit
    later = PlanRequest.like(tight, "auto", Budget(tight.device_limit))
    assert later.memory_bytes == pytest.approx(4 * limit), "stages share what a layout may hold"


@pytest.mark.slow
def test_every_rank_runs_as_much_again_as_it_must() -> None:
    model, ids = gpt_of(16)
    stages = Stages(4, "ddp")
    plan = partial(autopar.plan, model, WORLD, (ids, ids), stages, microbatches=8, smaller=False)
    free = plan(recompute="none")
    limit = 0.6 * free.peak_bytes
    tight = plan(memory=limit / RESERVED)
    by_rank = [memory.peak for memory in memory_by_rank(tight)]
    assert max(by_rank) <= limit * 1.0001
    # the first rank has the most micro-batches in flight, the last one room for all that it saves
    again = [{*tight.recompute, *tight.regather, *tight.rerun} & {*blocks} for blocks in _four()]
    assert len(again[0]) >= len(again[1]) > 0 and not again[3]
    everywhere = plan(recompute="full")
    assert free.step_seconds < tight.step_seconds < everywhere.step_seconds
    assert max(memory.peak for memory in memory_by_rank(everywhere)) < by_rank[0]
    read = renew_plan(model, autopar.Plan.from_json(tight.to_json()), (ids, ids))
    assert [memory.peak for memory in memory_by_rank(read)] == pytest.approx(by_rank)


def _four() -> list[list[str]]:
    return [[f"blocks.{n}" for n in range(first, first + 4)] for first in (0, 4, 8, 12)]


def test_stages_of_equal_blocks_look_alike() -> None:
    model, ids = models.GptWithLogits(layers=4), torch.zeros(16, models.SEQUENCE, dtype=torch.long)
    plan = autopar.plan(model, WORLD, (ids, ids), Stages(4, "ddp"), microbatches=4, smaller=False)
    assert plan.context is not None
    stages = cut(plan.context.program, plan.stage_starts)
    keys = [stage_key(stage) for stage in stages]
    assert keys[1] == keys[2] and len(set(keys)) == 3
    assert [stage.blocks for stage in stages] == [(f"blocks.{n}",) for n in range(4)]
