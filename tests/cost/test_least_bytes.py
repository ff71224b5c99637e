"""Bytes that no plan is below: counted by hand, under every plan's peak, and a refusal by them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
import models
from autopar.cost.least_bytes import border_bytes, least_bytes
from autopar.cost.memory import Budget
from autopar.errors import PlanError
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner import planner, solve
from autopar.planner.rematerialize import RematerializationSteps
from autopar.planner.request import PlanRequest
from autopar.world import World
from end_rungs import end_rungs
from traced import annotated

WIDTH, ROWS, BLOCKS = 16, 8, 4


class Chain(nn.Module):
    """Blocks that hand one tensor on, each after an op or in another type."""

    def __init__(self, block: Callable[[], nn.Module], before: Any = lambda x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.before(x)).to(x.dtype)
        return x


def frozen() -> nn.Module:
    """A block that saves nothing of its input: the weight that meets it is not trained."""
    down, up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
    down.requires_grad_(False)
    return nn.Sequential(down, up)


def norm() -> nn.Module:
    return nn.RMSNorm(WIDTH)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


BETWEEN = (BLOCKS - 1) * ROWS * WIDTH  # numbers that go from block to block


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Chain(linear), 8 * BETWEEN),
        (Chain(norm), 8 * BETWEEN),  # torch's decomposed norm saves a copy that it makes inside
        (Chain(frozen), 0),
        (Chain(lambda: linear().float(), Tensor.float), 4 * BETWEEN),  # the copy is saved
    ],
    ids=["linear", "norm", "frozen", "in float32"],
)
def test_what_goes_from_block_to_block(model: nn.Module, expected: float) -> None:
    program = annotated(model, (torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True),))
    assert border_bytes(program) == expected


def test_states_and_gradients_are_among_the_least_bytes() -> None:
    model = Chain(linear)
    numbers = sum(p.numel() for p in model.parameters())
    program = annotated(model, (torch.randn(1, WIDTH),))
    assert least_bytes(program, 2, "adamw") == numbers * 4 * 4 / 2  # parameter, gradient, moments
    many_rows = annotated(model, (torch.randn(4096, WIDTH),))
    between = (BLOCKS - 1) * 4096 * WIDTH
    assert least_bytes(many_rows, 2, "adamw") == (numbers * 4 * 3 + between * 4) / 2


def is_below_every_peak(program: Program, world: World, layout: str, least: float) -> None:
    """Of the layout's plan on all end rungs."""
    chosen = solve.search_meshes(program, world, PlanRequest(layout))
    steps = RematerializationSteps(emit_program(chosen, world), world, Budget(1e15, "adamw"))
    for rung in end_rungs(steps):
        assert steps.tried(rung).memory.peak >= least, (layout, rung)


EXAMPLES: dict[str, Callable[[], Any]] = {
    "gpt": models.gpt, "llama": models.llama, "gpt2": models.gpt2, "bert": models.bert,
    "t5": models.t5, "gemma3": models.gemma3, "vit": models.vit,
}  # fmt: skip


@pytest.mark.slow_cells(
    "*-gpt2", "*-llama", "*-bert", "*-t5", "*-gemma3", "*-vit", "megatron-gpt", "4d-gpt"
)
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("layout", ["fsdp", "megatron", "auto", "4d"])
def test_no_peak_is_below(name: str, layout: str) -> None:
    model, args, kwargs = EXAMPLES[name]()
    program, world = annotated(model.train(), args, kwargs), World.preset("dgx-h100", ranks=4)
    least = least_bytes(program, world.ranks, "adamw")
    assert border_bytes(program) > 0
    is_below_every_peak(program, world, layout, least)


@pytest.mark.parametrize("model", [Chain(linear), Chain(norm), Chain(frozen)], ids=str)
def test_no_peak_of_a_chain_is_below(model: nn.Module) -> None:
    program = annotated(model, (torch.randn(4096, WIDTH),))
    world = World.preset("dgx-h100", ranks=4)
    for layout in ("ddp", "fsdp"):
        is_below_every_peak(program, world, layout, least_bytes(program, 4, "adamw"))


def test_what_they_exclude_is_refused_before_any_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: Any) -> Any:
        raise AssertionError("a plan that cannot fit was searched")

    monkeypatch.setattr(planner, "fastest_plans", searched)
    model, args = Chain(linear), (torch.randn(4096, WIDTH),)
    floor = least_bytes(annotated(model, args), 4, "adamw")
    for layout in ("auto", "fsdp"):
        with pytest.raises(PlanError, match=f"layout '{layout}', .* needs .*MiB") as caught:
            autopar.plan(model, 4, args, layout, memory=0.98 * floor)
        needs = float(re.findall(r"needs ([\d.]+) MiB", str(caught.value))[0])
        assert needs * 2**20 > floor
    with pytest.raises(AssertionError, match="was searched"):
        autopar.plan(model, 4, args, memory=1.1 * floor)
