"""The timelines of whole models: they say what their plans say, and what hides under what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
import models
from autopar.cost.simulator.engine import Event
from autopar.world import Level
from timeline_files import check_timeline_file

LAYOUTS = ["ddp", "fsdp", "megatron", "megatron-sp", autopar.Grid4D(2, 2, 2, 1), "2.5d", "auto"]


AGAIN = [("fsdp", "gathers"), ("fsdp", "full"), ("megatron-sp", "full")]


@pytest.mark.slow_cells("megatron-sp-full")
@pytest.mark.slow_cells(
    "2.5d-none", "Grid4D(x=2, y=2, z=2, data=1)-none", "auto-none", "ddp-none", "fsdp-full",
    "fsdp-gathers", "fsdp-none", "megatron-none", "megatron-sp-none",
)  # fmt: skip
@pytest.mark.parametrize(
    ("layout", "recompute"), [*((layout, "none") for layout in LAYOUTS), *AGAIN], ids=str
)
def test_a_timeline_adds_up_to_the_plan(layout: Any, recompute: Any, tmp_path: Path) -> None:
    model, args, _ = models.gpt()
    world = autopar.World.preset("perlmutter", 8)
    plan = autopar.plan(model, world, args, layout=layout, recompute=recompute)
    alone, over = plan.timeline(overlap=False), plan.timeline()
    assert alone.exposed_seconds == pytest.approx(alone.communication)
    assert alone.communication == pytest.approx(sum(c.seconds for c in plan.collectives))
    sent_alone = sum(event.seconds for event in over.events if event.lane)
    assert over.communication >= sent_alone * (1 - 1e-9)  # lanes share their links
    assert sum(e.bytes for e in over.events) == pytest.approx(plan.comm_bytes)
    assert over.seconds <= alone.seconds
    if layout != "2.5d":  # whose plan counts on panels under products
        assert alone.seconds == pytest.approx(plan.seconds, rel=0.01)
    for timeline in (alone, over):
        parts = [sum(column) for column in zip(*timeline.by_chain.values(), strict=True)]
        seconds = timeline.computing, timeline.communication, timeline.exposed_seconds
        assert parts == pytest.approx(list(seconds))
        assert timeline.communication == pytest.approx(
            timeline.hidden_seconds + timeline.exposed_seconds
        )
        assert timeline.computing + timeline.exposed_seconds == pytest.approx(timeline.seconds)
        check_timeline_file(timeline, tmp_path / "trace.json")


@pytest.mark.slow
def test_what_runs_again_is_modelled() -> None:
    """Weights that are gathered again arrive before the gradient does; what is computed again, and
    what that sends, waits for it and delays the backward.
    """
    model, args, _ = models.gpt()
    world = autopar.World((Level(4, 2e8, latency_s=0.0),), autopar.World.of(4).device)
    inputs = tuple(x.repeat(16, 1) for x in args)

    def step(recompute: Any) -> tuple[float, list[Event]]:
        plan = autopar.plan(model, world, inputs, "fsdp", recompute=recompute, smaller=False)
        assert plan.overlapped is not None and plan.overlapped < plan.seconds
        return plan.overlapped, [e for e in plan.timeline().events if e.phase == "backward"]

    (none, before), (gathers, fetched), (full, again) = map(step, ("none", "gathers", "full"))
    assert none < gathers < full
    ahead = [e for e in fetched if e.ahead]
    assert ahead and not any(e.ahead for e in before)
    assert {e.kind for e in ahead} == {"all_gather"} and not any(e.after for e in ahead)

    def computed(events: list[Event]) -> float:
        return sum(e.seconds for e in events if not e.lane)

    assert computed(fetched) == pytest.approx(computed(before))
    assert computed(again) > 1.2 * computed(before)


def test_a_plan_from_a_file_has_no_timeline(tmp_path: Path) -> None:
    model, args, _ = models.gpt()
    autopar.plan(model, 2, args, layout="ddp").save(tmp_path / "plan.json")
    with pytest.raises(autopar.PlanError, match="holds no graph"):
        autopar.Plan.load(tmp_path / "plan.json").timeline()


def wide(layers: int, layout: Any) -> autopar.Plan:
    with torch.device("meta"):
        model = models.GptWithLogits(
            vocabulary=4096, sequence=1024, hidden=2048, heads=16, layers=layers
        )
        ids = torch.zeros(64, 1024, dtype=torch.long)
    return autopar.plan(model, autopar.World.preset("dgx-h100", 16), (ids, ids), layout=layout)


@pytest.mark.slow
def test_gradients_and_gathers_hide_under_products() -> None:
    for layout in ("ddp", "fsdp"):
        timeline = wide(8, layout).timeline()
        assert timeline.hidden_seconds > 0.6 * timeline.communication, layout


@pytest.mark.slow
def test_dx_is_summed_under_the_matmul_for_dw() -> None:
    timeline = wide(2, "megatron").timeline()
    sums = [
        i
        for i, e in enumerate(timeline.events)
        if e.phase == "backward" and e.kind == "all_reduce" and e.bytes > 1e6
    ]
    assert len(sums) >= 2 * 2
    hidden = [timeline.events[i].seconds - timeline.run.exposed.get(i, 0.0) for i in sums]
    assert sum(h > 0 for h in hidden) >= len(hidden) - 1, hidden
