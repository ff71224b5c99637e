"""Pipelines within a limit of memory."""

from __future__ import annotations

import pytest
import torch

import autopar
import models
from autopar import Stages

WORLD = autopar.World.preset("dgx-h100", 4)
RESERVED = 0.92  # of a device's memory is for the step


def test_a_rank_that_keeps_too_many_micro_batches_recomputes_blocks() -> None:
    with torch.device("meta"):
        model = models.Gpt(vocabulary=256, sequence=512, hidden=512, heads=8, layers=8)
        ids = torch.zeros(32, 512, dtype=torch.long)
    options = {"layout": Stages(4, "ddp"), "microbatches": 8, "smaller": False}
    free = autopar.plan(model, WORLD, (ids, ids), recompute="none", **options)  # type: ignore[arg-type]
    limit = 0.6 * free.peak_bytes
    tight = autopar.plan(model, WORLD, (ids, ids), memory=limit / RESERVED, **options)  # type: ignore[arg-type]
    assert tight.peak_bytes <= limit * 1.0001 and tight.device_limit == pytest.approx(limit)
    assert (tight.recompute or tight.rerun) and tight.stage_starts
    with pytest.raises(autopar.PlanError, match=r"no plan fits: rank \d of the pipeline needs"):
        autopar.plan(model, WORLD, (ids, ids), memory=limit / RESERVED, recompute="none", **options)  # type: ignore[arg-type]
