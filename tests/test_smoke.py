"""Ten seconds that say whether autopar works at all: plan, read, save, verify, run one GPT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.tools.decoders import Gpt, Sizes

SMALL = Sizes("gpt", layers=2, width=32, heads=4, vocabulary=64, context=16)

Batch = tuple[torch.Tensor, torch.Tensor]


def small() -> tuple[Gpt, Batch]:
    torch.manual_seed(0)
    tokens = torch.randint(SMALL.vocabulary, (8, SMALL.context + 1))
    return Gpt(SMALL), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def test_a_plan_needs_no_process_group(tmp_path: Path) -> None:
    model, inputs = small()
    plan = autopar.plan(model, 4, inputs)
    assert not dist.is_initialized()
    assert plan.mesh.size == 4
    assert plan.table().row_count > 0
    table = str(plan.table())
    assert "blocks.0-1.attention" in table and "the loop dim that each axis splits" in table
    assert min(plan.seconds, plan.comm_bytes, plan.peak_bytes) > 0
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").to_json() == plan.to_json()


@pytest.mark.slow_cells("auto-2", "auto-4", "fsdp-4")
@pytest.mark.parametrize(
    ("layout", "ranks"), [("auto", 2), ("auto", 4), ("fsdp", 4), ("megatron", 4)]
)
def test_several_ranks_compute_what_one_does(layout: str, ranks: int) -> None:
    model, inputs = small()
    check = autopar.verify(model, ranks, inputs, layout=layout)
    assert check.loss_error < 1e-12
    assert check.grad_error < 1e-9
    assert check.step_error < 1e-9


def test_one_rank_runs_the_original() -> None:
    model, inputs = small()
    par = autopar.parallelize(model, inputs=inputs)
    loss = par(*inputs)
    torch.testing.assert_close(loss, model(*inputs))
    loss.backward()
    assert all(p.grad is not None for p in par.parameters())
    assert par.state_dict().keys() == model.state_dict().keys()
