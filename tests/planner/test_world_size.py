"""Worlds of another size: the smaller one that is as fast, the larger one that fits."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import networkx
import pytest
import torch
from torch import nn

import autopar
from autopar.cli.reasons import explain_plan
from autopar.cost.memory import Budget
from autopar.ir.plan_table import format_seconds
from autopar.ir.plan_view import how_fast
from autopar.planner.request import PlanRequest
from autopar.planner.world_size import _halves, _seconds_if_as_fast, _times
from models import gpt, mlp


@pytest.mark.slow
def test_a_smaller_world_that_is_as_fast_is_named() -> None:
    model, args, _ = mlp()
    plan = autopar.plan(model, 4, args)
    assert plan.smaller is not None
    ranks, seconds = plan.smaller
    alone = autopar.plan(model, ranks, args)
    assert ranks < 4 and seconds == pytest.approx(alone.seconds) and seconds < 1.01 * plan.seconds
    assert f"{ranks} rank would be {how_fast(plan)}: " in str(plan.table().caption)
    loaded = autopar.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert loaded.smaller == plan.smaller
    assert autopar.plan(model, 4, args, smaller=False).smaller is None


def test_a_smaller_world_must_fit() -> None:
    """What one rank cannot hold is no advice."""
    model, args, _ = mlp()
    alone = autopar.plan(model, 1, args)
    plan = autopar.plan(model, 4, args, memory=alone.peak_bytes * 0.99)
    assert plan.smaller is None or plan.smaller[0] > 1


def test_no_smaller_world_where_computing_is_all() -> None:
    model, args, _ = mlp()
    fast = autopar.World.of(4)
    links = tuple(dataclasses.replace(x, bytes_per_s=1e13, latency_s=0.0) for x in fast.levels)
    slow = dataclasses.replace(fast.device, flop_per_s={"float32": 1e8}, launch_s=0.0)
    world = dataclasses.replace(fast, levels=links, device=slow, launch_s=0.0)
    assert autopar.plan(model, world, args).smaller is None


@pytest.mark.slow
def test_a_smaller_world_is_as_fast_as_the_step_that_hides() -> None:
    """One rank is faster than the sum of four ranks' seconds, but not than their step."""
    model, args, _ = gpt()
    world = autopar.World.of(4)
    (level,) = (dataclasses.replace(x, bytes_per_s=2.8e7, latency_s=0.0) for x in world.levels)
    slow = dataclasses.replace(world.device, flop_per_s={"float32": 5e9}, launch_s=0.0)
    world = dataclasses.replace(world, levels=(level,), device=slow, launch_s=0.0)
    fewer = {n: (dataclasses.replace(level, ranks=n),) for n in (1, 2)}
    worlds = {n: dataclasses.replace(world, levels=levels) for n, levels in fewer.items()}
    plan = autopar.plan(model, world, args, "ddp")
    steps = {n: autopar.plan(model, w, args, "ddp").step_seconds for n, w in worlds.items()}
    assert plan.step_seconds * 1.01 < steps[1] < plan.seconds
    assert plan.smaller == (2, pytest.approx(steps[2])) and steps[2] < plan.step_seconds


def test_one_rank_is_looked_at_where_half_is_not_as_fast() -> None:
    """Of two ranks the plan of the least sum counts, whose step is longer than the four ranks'."""
    blocks = (
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        for _ in range(2)
    )
    model = nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 8))
    world, args = autopar.World.of(4), (torch.randn(64, 32),)
    slow = dataclasses.replace(
        world.device, flop_per_s={"float32": 2e10}, memory_bytes_per_s=5e9, launch_s=1e-5
    )
    world = dataclasses.replace(world, device=slow)
    plan = autopar.plan(model, world, args)
    assert plan.smaller is not None and plan.smaller[0] == 1
    assert plan.smaller[1] < plan.step_seconds
    source = plan.context.source if plan.context else None
    assert source is not None
    (two, _) = _halves(world)
    request = PlanRequest("auto", Budget.of(world, "auto", "adamw", "auto"), None, True)
    assert _seconds_if_as_fast(source, two, request, plan) is None


def ring(ranks: int) -> autopar.World:
    """The world of this machine's devices, joined in a ring."""
    graph = networkx.cycle_graph(ranks)
    networkx.set_edge_attributes(graph, 1e6, "bytes_per_s")
    return autopar.World.from_graph(graph, autopar.World.of(1).device)


@pytest.mark.parametrize(
    ("world", "layout"),
    [(4, autopar.Grid4D(x=2, y=2)), (3, "auto"), (6, "ddp"), (ring(4), "auto")],
    ids=["a grid", "three ranks", "six ranks", "a network without levels"],
)
def test_one_rank_is_considered_whatever_the_layout_and_the_world(
    world: autopar.World | int, layout: Any
) -> None:
    model, args = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 12)), (torch.ones(12, 12),)
    plan = autopar.plan(model, world, args, layout)
    alone = autopar.plan(model, 1, args)
    assert plan.smaller == (1, pytest.approx(alone.step_seconds))


def test_one_rank_is_no_ranks() -> None:
    model, args, _ = mlp()
    plan = autopar.plan(model, 2, args)
    for share, words in ((0.995, "as fast"), (0.5, "faster")):
        seconds = share * plan.step_seconds
        plan = dataclasses.replace(plan, smaller=(1, seconds))
        assert f"\n1 rank would be {words}: {seconds * 1e3:.1f} ms" in str(plan.table().caption)
        assert [line for line in explain_plan(plan, None).reasons if "would be" in line] == [
            f"1 rank would be {words}: {format_seconds(seconds)} a step"
        ]
    assert str(autopar.verify(model, 1, args)).startswith("1 rank equals one: ")


def test_halves_take_full_nodes_first() -> None:
    world = autopar.World.preset("dgx-h100", 32)
    sizes = [tuple(level.ranks for level in half.levels) for half in _halves(world)]
    assert sizes == [(8, 2), (8, 1), (4, 1), (2, 1), (1, 1)]
    odd = autopar.World.preset("dgx-h100", 24)
    assert [half.ranks for half in _halves(odd)] == []
    wider = _times(world, 4)
    assert wider is not None and wider.ranks == 128


@pytest.mark.slow_cells("fsdp", "megatron")
@pytest.mark.parametrize("layout", ["fsdp", "megatron"])
def test_a_refusal_names_the_world_that_would_do(layout: str) -> None:
    model, args, _ = gpt()
    frugal = autopar.plan(model, 4, args, layout, recompute="full", smaller=False)
    assert frugal.memory is not None
    with pytest.raises(autopar.PlanError, match="Try 8 devices") as error:
        autopar.plan(model, 4, args, layout, memory=0.8 * frugal.memory.waiting)
    assert "on each of 4 devices" in str(error.value)
    fits = autopar.plan(model, 8, args, layout, memory=0.8 * frugal.memory.waiting)
    assert fits.peak_bytes <= 0.8 * frugal.memory.waiting


def test_a_refusal_without_a_world_that_would_do() -> None:
    model, args, _ = mlp()
    with pytest.raises(autopar.PlanError, match=r"Try at least [0-9]+ devices"):
        autopar.plan(model, 2, args, memory=1000.0)


@pytest.mark.slow
def test_auto_names_the_world_that_the_named_layout_of_least_memory_fits() -> None:
    model, args, _ = gpt()
    needs = autopar.plan(model, 8, args, "fsdp", recompute="full", smaller=False).memory
    assert needs is not None
    with pytest.raises(autopar.PlanError, match=r"'auto'.*Try 8 devices"):
        autopar.plan(model, 4, args, memory=1.05 * needs.peak)
