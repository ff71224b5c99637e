"""The figures of a step in micro-batches, and when a plan takes several."""

from __future__ import annotations

import functools

import pytest
import torch

import autopar
import models
from autopar.errors import PlanError
from autopar.planner.parts_search import in_fastest_parts

WORLD = autopar.World.preset("dgx-h100", 4)


@functools.cache
def planned(layout: str, count: int) -> autopar.Plan:
    with torch.device("meta"):
        model = models.Gpt(vocabulary=1024, sequence=128, hidden=256, heads=4, layers=2)
        ids = torch.zeros(32, 128, dtype=torch.long)
    return autopar.plan(
        model, WORLD, (ids, ids), layout, microbatches=count, smaller=False, outputs="sharded"
    )


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron-sp"])
def test_figures_of_parts_agree_with_one_another(layout: str) -> None:
    plan = planned(layout, 4)
    assert plan.timeline().seconds == plan.overlapped
    assert sum(row.step_seconds for row in plan.rows) == pytest.approx(plan.overlapped)
    assert float(plan.formula().bytes()) == pytest.approx(plan.comm_bytes)
    assert plan.memory is not None and plan.memory.peak == plan.peak_bytes


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_gradient_is_held_between_parts(ranks: int) -> None:
    """Those that no ranks sum, too: all of one rank's, those of weights that megatron splits."""
    with torch.device("meta"):
        model = models.Gpt(vocabulary=1024, sequence=128, hidden=256, heads=4, layers=2)
        ids = torch.zeros(32, 128, dtype=torch.long)
    layout = "megatron" if ranks > 1 else "auto"
    plan = autopar.plan(
        model, autopar.World.preset("dgx-h100", ranks), (ids, ids), layout, microbatches=4,
        smaller=False, outputs="sharded",
    )  # fmt: skip
    assert plan.memory is not None
    assert plan.memory.gradients >= 0.99 * plan.memory.parameters


def test_sums_and_the_optimizer_come_once() -> None:
    one, four = planned("ddp", 1), planned("ddp", 4)
    assert four.comm_bytes == pytest.approx(one.comm_bytes, rel=1e-3)
    sums = [c for c in four.collectives if c.backward and c.kind == "all_reduce"]
    assert sum(c.bytes for c in sums) == pytest.approx(four.comm_bytes, rel=1e-3)
    optimizer = [next(r for r in p.rows if r.subgraph == "optimizer") for p in (one, four)]
    assert optimizer[1].seconds == pytest.approx(optimizer[0].seconds)


def test_what_is_gathered_is_gathered_in_every_part() -> None:
    one, four = planned("fsdp", 1), planned("fsdp", 4)
    gathers = [sum(c.bytes for c in p.collectives if c.kind == "all_gather") for p in (one, four)]
    scatters = [
        sum(c.bytes for c in p.collectives if c.kind == "reduce_scatter") for p in (one, four)
    ]
    assert four.sums_once
    assert gathers[1] == pytest.approx(4 * gathers[0], rel=1e-3)
    assert scatters[1] == pytest.approx(scatters[0], rel=1e-3)


def test_scattered_sums_come_in_every_part_where_they_have_no_room() -> None:
    free = planned("fsdp", 4)
    with torch.device("meta"):
        model = models.Gpt(vocabulary=1024, sequence=128, hidden=256, heads=4, layers=2)
        ids = torch.zeros(32, 128, dtype=torch.long)
    limited = autopar.plan(
        model, WORLD, (ids, ids), "fsdp", microbatches=4, smaller=False,
        memory=0.9 * free.peak_bytes / 0.92, outputs="sharded",
    )  # fmt: skip
    assert free.sums_once and not limited.sums_once
    assert limited.peak_bytes <= (limited.device_limit or 0)
    assert limited.comm_bytes > 1.2 * free.comm_bytes
    assert autopar.Plan.from_json(limited.to_json()).sums_once is False


# -- how many ------------------------------------------------------------------------------------
def test_parts_are_taken_before_blocks_are_computed_again() -> None:
    with torch.device("meta"):
        model = models.Gpt(vocabulary=256, sequence=512, hidden=1024, heads=8, layers=2)
        ids = torch.zeros(64, 512, dtype=torch.long)
    free = autopar.plan(model, WORLD, (ids, ids), "ddp", smaller=False)
    limit = 0.7 * free.peak_bytes / 0.92
    one, best = (
        autopar.plan(
            model, WORLD, (ids, ids), "ddp", memory=limit, smaller=False, microbatches=count
        )
        for count in (1, "auto")
    )
    assert one.recompute and one.microbatches == 1
    assert best.microbatches > 1 and not best.recompute
    assert best.step_seconds < one.step_seconds
    assert best.peak_bytes <= (best.device_limit or 0)


def test_one_part_stands_where_it_fits_and_errors_are_those_of_one() -> None:
    tried: list[int] = []
    plan = planned("ddp", 1)

    def attempt(count: int) -> autopar.Plan:
        tried.append(count)
        if count < 8 and tried[0] != 1:
            raise PlanError("no room")
        return plan

    rows = torch.zeros(12, 3)
    assert in_fastest_parts(attempt, (rows,)) is plan
    assert tried == [1]

    def refuse(count: int) -> autopar.Plan:
        tried.append(count)
        raise PlanError(f"no room in {count}")

    tried.clear()
    with pytest.raises(PlanError, match="no room in 1"):
        in_fastest_parts(refuse, (rows,))
    assert tried == [1, 2, 4, 12]
