"""Tokens a second and model FLOPs utilisation, by hand on small models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
import models
from autopar import Plan, World
from autopar.cost.throughput import throughput
from autopar.world.gpus import GPUS
from commands import run
from targets import Mlp


def test_utilisation_counts_the_models_own_products() -> None:
    """Three products a linear (the first has no gradient of its input to make, which counts all the
    same: so do the published figures), at the peak of the dtype.
    """
    inputs = torch.ones(16, 64), torch.ones(16, 64)
    plan = autopar.plan(Mlp(), 4, inputs, "ddp", smaller=False)
    rates = throughput(plan, inputs)
    assert rates is not None and rates.unit == "samples" and rates.off is None
    step = plan.overlapped or plan.seconds
    assert rates.rate == pytest.approx(16 / step)
    flops = 3 * 2 * 16 * 2 * 64 * 256
    peak = 4 * World.of(4).device.rate(torch.float32)
    assert rates.utilization == pytest.approx(flops / peak / step)


def test_recomputation_is_no_work_of_the_model() -> None:
    """The same FLOPs in a longer step."""
    model, args, _ = models.gpt()
    none, full = (
        throughput(autopar.plan(model, 2, args, "ddp", recompute=how, smaller=False), args)
        for how in ("none", "full")
    )
    assert none is not None and full is not None and none.unit == "tokens"
    assert full.utilization < none.utilization
    assert full.utilization / full.rate == pytest.approx(none.utilization / none.rate)


def test_what_was_compared_with_published_runs_says_how_far_it_was() -> None:
    model, args, _ = models.gpt()
    world = World.preset("dgx-h100", 2)
    rates = throughput(autopar.plan(model, world, args, "ddp", smaller=False), args)
    assert rates is not None and "published runs on such devices were 7% off" in str(rates)
    measured = replace(GPUS["H100"], launch_s=9e-6)  # another device than the nominal one
    own = replace(world, device=measured)
    rates = throughput(autopar.plan(model, own, args, "ddp", smaller=False), args)
    assert rates is not None and rates.off is None and str(rates).endswith("utilisation")


def test_without_a_batch_or_a_graph_there_is_none(tmp_path: Path) -> None:
    plan = autopar.plan(nn.Linear(8, 8), 2, (torch.ones(4, 8),), smaller=False)
    assert throughput(plan, ()) is None
    plan.save(tmp_path / "plan.json")
    assert throughput(Plan.load(tmp_path / "plan.json"), (torch.ones(4, 8),)) is None


def test_the_command_prints_it() -> None:
    command = ("plan", "targets:tiny", "--ranks", "4", "--layout", "ddp")
    assert "samples/s, " in run(*command).stdout
    facts = json.loads(run(*command, "--json").stdout)
    assert set(facts["throughput"]) == {"rate", "unit", "utilization", "off"}
