"""Pipelines within a limit of memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import autopar
import models
from autopar import Stages
from autopar.cost.memory import Budget
from autopar.planner.request import PlanRequest
from autopar.runtime.apply import renew_plan

WORLD = autopar.World.preset("dgx-h100", 4)
RESERVED = 0.92  # of a device's memory is for the step


def test_a_rank_that_keeps_too_many_micro_batches_recomputes_blocks() -> None:
    with torch.device("meta"):
        model = models.Gpt(vocabulary=256, sequence=512, hidden=512, heads=8, layers=4)
        ids = torch.zeros(32, 512, dtype=torch.long)
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
