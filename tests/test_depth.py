"""Deep models read off shorter ones: what is said of them is what working them out whole finds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import models
from autopar import World
from autopar.affordable import affordable
from autopar.cost.memory import Budget
from autopar.cost.timeline import timeline
from autopar.depth import Deep
from autopar.dropping import Estimated, Rung, Rungs
from autopar.figures import Memory
from autopar.hiding import simulated
from autopar.passes import annotate, chains, choose, emitted, trace
from autopar.program import Program

LAYERS = 6
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
        found = []
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return (sum(found) if self.skip else x).square().mean()


def program_of(model: nn.Module, args: Any, given: Any = None) -> Program:
    return chains.chains(annotate.annotate(trace.trace(model, args, given or {})))


def chosen(name: str, layout: str, ranks: int) -> tuple[Program, World]:
    if name == "gpt":
        model, (args, given) = models.Gpt(layers=LAYERS).train(), (models.gpt()[1], {})
    else:
        model, args, given = models.llama(num_hidden_layers=LAYERS)
    world = World.preset("dgx-h100", ranks=ranks)
    return choose.choose(program_of(model, args, given), world, layout), world


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt", "auto"), ("gpt", "megatron-sp"), ("llama", "fsdp"), ("llama", "ddp")],
)
def test_steps_and_peaks_are_those_of_the_whole(name, layout):
    program, world = chosen(name, layout, 4)
    deep = Deep(program)
    assert [len(run) for run in deep.runs] in ([LAYERS], [LAYERS - 1], [LAYERS - 2])
    assert simulated(program, world) == pytest.approx(
        timeline(emitted(program, world), world).seconds
    )
    estimate, whole = Estimated(deep, world, BUDGET), Rungs(emitted(program, world), world, BUDGET)
    assert (estimate.names, estimate.fetching) == (whole.names, whole.fetching)
    for rung in (Rung((), ()), Rung(whole.names, ()), Rung((), whole.fetching)):
        one, other = estimate.tried(rung), whole.tried(rung)
        assert one.memory.peak == pytest.approx(other.memory.peak, rel=5e-3)
        assert one.seconds == pytest.approx(other.seconds, abs=1e-9)


def test_only_equal_blocks_are_left_out():
    world = World.of(2)
    x = torch.randn(4, 32)
    plain = choose.choose(program_of(Deepened(), (x,)), world, "ddp")
    odd = choose.choose(program_of(Deepened(odd=3), (x,)), world, "ddp")
    skip = choose.choose(program_of(Deepened(skip=True), (x,)), world, "ddp")
    assert [len(run) for run in Deep(plain).runs] == [LAYERS - 1]  # the first takes the input
    assert Deep(odd).runs == ()  # too few on either side of it
    assert Deep(skip).runs == ()  # every block is used at the end
    assert Deep(odd).shorter() is odd


def test_blocks_under_other_layouts_are_not_equal():
    program, _ = chosen("gpt", "ddp", 4)
    assert program.plan is not None
    middle = f"blocks.{LAYERS // 2}"
    nodes = [
        n
        for (prefix, number), ns in Deep(program).blocks.items()
        for n in ns
        if f"{prefix}.{number}" == middle
    ]
    names = [n.name for n in nodes if n.name in program.plan.stored]
    assert names
    other = {**program.plan.stored, names[0]: None}
    plan = dataclasses.replace(program.plan, stored=other)
    assert Deep(dataclasses.replace(program, plan=plan)).runs == ()


def test_an_estimate_that_is_too_low_costs_no_memory(monkeypatch):
    """Where estimates say a tenth too little, the plan still fits what there is."""
    model, args = models.Gpt(layers=LAYERS).train(), models.gpt()[1]
    world, program = World.preset("dgx-h100", ranks=2), program_of(model, args)
    free = affordable(program, world, "fsdp", budget=Budget(1e15))
    assert free.plan is not None
    limit = 0.7 * free.plan.peak_bytes
    honest = Estimated.memory_of

    def too_low(self: Estimated, rung: Rung) -> Memory:
        found = honest(self, rung)
        return dataclasses.replace(found, peak=0.9 * found.peak)

    monkeypatch.setattr(Estimated, "memory_of", too_low)
    plan = affordable(program, world, "fsdp", budget=Budget(limit)).plan
    assert plan is not None and plan.memory is not None
    assert plan.memory.peak <= limit == plan.limit
    whole = emitted(dataclasses.replace(program, plan=plan), world)
    again = Rungs(whole, world, Budget(limit)).planned()
    assert again.memory.peak == plan.memory.peak
