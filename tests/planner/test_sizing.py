"""Worlds of another size: the smaller one that is as fast, the larger one that fits."""

from __future__ import annotations

import dataclasses
import json

import pytest

import autopar
from autopar.planner.world_size import _halves, _times
from models import gpt, mlp


def test_a_smaller_world_that_is_as_fast_is_named() -> None:
    model, args, _ = mlp()
    plan = autopar.plan(model, 4, args)
    assert plan.smaller is not None
    ranks, seconds = plan.smaller
    alone = autopar.plan(model, ranks, args)
    assert ranks < 4 and seconds == pytest.approx(alone.seconds) and seconds < 1.01 * plan.seconds
    assert f"{ranks} rank" in str(plan.table().caption) and "as fast" in str(plan.table().caption)
    loaded = autopar.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert loaded.smaller == plan.smaller
    assert autopar.plan(model, 4, args, smaller=False).smaller is None


def test_a_smaller_world_must_fit() -> None:
    """What one rank cannot hold is no advice."""
    model, args, _ = mlp()
    alone = autopar.plan(model, 1, args)
    made = autopar.plan(model, 4, args, memory=alone.peak_bytes * 0.99)
    assert made.smaller is None or made.smaller[0] > 1


def test_no_smaller_world_where_computing_is_all() -> None:
    model, args, _ = mlp()
    fast = autopar.World.of(4)
    links = tuple(dataclasses.replace(x, bytes_per_s=1e13, latency_s=0.0) for x in fast.levels)
    slow = dataclasses.replace(fast.device, flop_per_s={"float32": 1e8}, launch_s=0.0)
    world = dataclasses.replace(fast, levels=links, device=slow, launch_s=0.0)
    assert autopar.plan(model, world, args).smaller is None


def test_halves_take_whole_nodes_first() -> None:
    world = autopar.World.preset("dgx-h100", 32)
    sizes = [tuple(level.ranks for level in half.levels) for half in _halves(world)]
    assert sizes == [(8, 2), (8, 1), (4, 1), (2, 1), (1, 1)]
    odd = autopar.World.preset("dgx-h100", 24)
    assert [half.ranks for half in _halves(odd)] == []
    wider = _times(world, 4)
    assert wider is not None and wider.ranks == 128


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
