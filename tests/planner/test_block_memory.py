"""Peaks that are put together from blocks, against the peak of the whole model's step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import models
from autopar.cost.block_memory import Rise, peak_of
from autopar.cost.least_bytes import least_bytes
from autopar.cost.memory import Budget
from autopar.errors import LayoutError
from autopar.ir.deep_models import DeepModel
from autopar.ir.program import Program
from autopar.passes import emit_program
from autopar.planner import solve
from autopar.planner.named_layouts import NAMES
from autopar.planner.rematerialize import Estimated, RematerializationSteps
from autopar.planner.request import PlanRequest
from autopar.planner.rungs import Rematerialized
from autopar.world import World
from end_rungs import end_rungs
from traced import annotated

WORLD = World.preset("dgx-h100", ranks=4)
MODELS: dict[str, Any] = {
    "gpt": lambda: (models.GptWithLogits(layers=10).train(), (models.gpt()[1], {})),
    "llama": lambda: _hugging_face(models.llama(num_hidden_layers=10)),
    "gemma2": lambda: _hugging_face(models.gemma2(num_hidden_layers=19)),
    "t5": lambda: _hugging_face(models.t5(num_layers=10)),
    "odd_block": lambda: (Residual(12, odd=4), ((torch.randn(8, 16, 64),), {})),
    "two_runs": lambda: (nn.Sequential(Residual(10), Residual(5)), ((torch.randn(8, 64),), {})),
}


def _hugging_face(example: Any) -> Any:
    return example[0], example[1:]


class Residual(nn.Module):
    """Equal blocks, but for one that may be wider."""

    def __init__(self, count: int, odd: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(64),
                nn.Linear(64, width := 256 if n == odd else 128),
                nn.GELU(),
                nn.Linear(width, 64),
            )
            for n in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _chosen(name: str, layout: str, optimizer: str) -> tuple[Program, Budget]:
    model, (args, kwargs) = MODELS[name]()
    program = annotated(model, args, kwargs)
    contenders = solve.search_meshes(program, WORLD, PlanRequest(layout))
    return contenders, Budget(1e15, optimizer)


def check_estimates(name: str, layout: str, optimizer: str) -> None:
    """Hold peaks and seconds of every end rung, and of one between, against those of the whole."""
    program, budget = _chosen(name, layout, optimizer)
    estimate = Estimated(DeepModel(program), WORLD, budget)
    whole = RematerializationSteps(emit_program(program, WORLD), WORLD, budget)
    assert (estimate.names, estimate.fetching, estimate.cheap) == (
        whole.names,
        whole.fetching,
        whole.cheap,
    )
    half = len(whole.names) // 2
    least = least_bytes(program, WORLD.ranks, optimizer)
    for rung in (
        *end_rungs(whole),
        Rematerialized(
            whole.names[:half], (), tuple(n for n in whole.names[half:] if n in whole.cheap)
        ),
    ):
        estimated, other = estimate.tried(rung), whole.tried(rung)
        assert other.memory.peak >= least, rung
        assert estimated.memory.peak == pytest.approx(other.memory.peak, rel=0.01), rung
        assert estimated.seconds == pytest.approx(other.seconds, rel=0.01, abs=1e-9), rung


@pytest.mark.slow_cells("odd_block-fsdp-sgd")
@pytest.mark.slow_cells("gpt-megatron-sp-adamw", "llama-fsdp-adamw", "two_runs-auto-adamw")
@pytest.mark.parametrize(
    ("name", "layout", "optimizer"),
    [
        ("llama", "fsdp", "adamw"),
        ("odd_block", "fsdp", "sgd"),
        ("two_runs", "auto", "adamw"),
        ("gpt", "megatron-sp", "adamw"),
    ],
)
def test_peaks_put_together_from_blocks_are_those_of_the_full_model(
    name: str, layout: str, optimizer: str
) -> None:
    check_estimates(name, layout, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_peaks_put_together_are_those_of_the_full_model_under_every_layout(
    name: str, layout: str
) -> None:
    for optimizer in ("adamw", "sgd-momentum"):
        try:
            check_estimates(name, layout, optimizer)
        except LayoutError as refused:  # as "ep" of a model without experts
            pytest.skip(str(refused))


@pytest.mark.parametrize("seed", range(20))
def test_a_peak_is_the_highest_level_of_a_walk_there_and_back(seed: int) -> None:
    draw = random.Random(seed)
    rises = [
        Rise(draw.randint(0, 9), draw.randint(9, 20), draw.randint(-9, 2), draw.randint(0, 20))
        for _ in range(draw.randint(1, 12))
    ]
    start = level = most = draw.randint(0, 50)
    for rise in rises:
        most, level = max(most, level + rise.forward_peak), level + rise.forward
    saved = level - start
    for rise in reversed(rises):
        most, level = max(most, level + rise.backward_peak), level + rise.backward
    assert peak_of(start, rises) == (most, level, saved)
