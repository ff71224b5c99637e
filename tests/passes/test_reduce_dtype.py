"""Gradients of parameters added up in float32, where they are of a narrower dtype."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Plan
from autopar.cost.communication import SentCollective, sent_collectives
from autopar.errors import PlanError
from autopar.ir.layout import SUMS
from autopar.ir.mesh import Mesh
from autopar.ops import collectives
from autopar.planner.objective import cost_terms
from autopar.runtime import lockstep
from autopar.tools.decoders import Gpt, Sizes, small_weights

SIZES = Sizes("gpt", layers=1, width=32, heads=4, vocabulary=64, context=8)
WIDE = {"reduce_dtype": torch.float32}


def gpt(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    tokens = torch.zeros(8, 8, dtype=torch.int64)
    return Gpt(SIZES).apply(small_weights).to(dtype), (tokens, tokens.clone())


class Casting(nn.Module):
    """Parameters in float32 that products take in bfloat16, as mixed precision does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.bfloat16() @ self.up.weight.bfloat16().t()
        return (hidden.relu() @ self.down.weight.bfloat16().t()).float().square().mean()


@lru_cache
def planned(layout: str, reduce_dtype: Any = None) -> Plan:
    model, inputs = gpt()
    return autopar.plan(
        model, 4, inputs, layout, 1e18, recompute="none", smaller=False, reduce_dtype=reduce_dtype
    )


def of_weights(plan: Plan) -> list[SentCollective]:
    """The backward collectives of stored tensors."""
    sent = list(sent_collectives(plan.context.program))
    assert len(sent) == len(plan.collectives)
    return [
        m for m in sent if m.backward and not m.inside and m.node.meta["value"][0] in plan.stored
    ]


@pytest.mark.slow_cells("4d", "auto", "fsdp", "megatron")
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "megatron", "4d", "auto"])
def test_sums_of_gradients_are_wider_and_nothing_else(layout: str) -> None:
    plan, narrow = planned(layout, **WIDE), planned(layout)
    summed = {m.element_bytes for m in of_weights(plan) if m.traffic.collective in SUMS}
    assert summed == {4} if layout in ("ddp", "fsdp") else summed <= {4}
    assert {m.element_bytes for m in of_weights(narrow)} <= {2}
    others = [
        m
        for m in sent_collectives(plan.context.program)
        if not m.inside and m not in of_weights(plan)
    ]
    assert all(m.element_bytes == 2 for m in others if m.node.meta["value"][0] in plan.stored)
    assert plan.seconds >= narrow.seconds and plan.bound <= plan.seconds


def test_fsdp_sends_half_as_much_again() -> None:
    """Gathers in bfloat16, scatters in float32: three units of two bytes where there were two."""
    plan, narrow = planned("fsdp", **WIDE), planned("fsdp")
    mine = sum(c.bytes for c in plan.collectives if c.kind == "reduce_scatter")
    assert mine == 2 * sum(c.bytes for c in narrow.collectives if c.kind == "reduce_scatter")
    assert plan.comm_bytes == sum(c.bytes for c in plan.collectives)
    assert float(plan.formula().bytes()) == pytest.approx(plan.comm_bytes, rel=1e-12)


@pytest.mark.slow_cells("auto")
@pytest.mark.parametrize("layout", ["auto", "fsdp"])
def test_the_search_reckons_as_the_price_does(layout: str) -> None:
    plan = planned(layout, **WIDE)
    program = plan.context.source
    assert sum(cost_terms(program, program.plan, plan.world).values()) == pytest.approx(
        program.plan.seconds, rel=1e-9
    )


def test_casts_of_parameters_count_as_parameters() -> None:
    """Stored in float32, gathered as bfloat16 after the cast, added up in float32."""
    inputs = (torch.zeros(8, 32),)
    plan = autopar.plan(Casting(), 4, inputs, layout="fsdp", smaller=False, **WIDE)
    sent = [m for m in sent_collectives(plan.context.program) if not m.inside]
    gathers = {m.element_bytes for m in sent if m.traffic.collective == "all_gather"}
    scatters = {m.element_bytes for m in sent if m.traffic.collective == "reduce_scatter"}
    assert gathers == {2} and scatters == {4}


@pytest.mark.slow
def test_float32_stays_as_it_is() -> None:
    model, inputs = gpt(torch.float32)
    plans = [autopar.plan(model, 4, inputs, smaller=False, **more) for more in ({}, WIDE)]
    assert plans[0].seconds == plans[1].seconds and plans[0].choices == plans[1].choices
    assert not any("reduce_dtype" in n.kwargs for n in plans[1].context.program.module.graph.nodes)


# -- what runs -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_small_parts_survive_the_sum(dtype: torch.dtype | None) -> None:
    """1 + three times 2^-9 in bfloat16: nothing is left of each small one by itself."""
    mesh = Mesh.parse("x4")
    parts = [torch.tensor([1.0 if rank == 0 else 2.0**-9]) for rank in range(4)]

    def on_rank(rank: int) -> list[Tensor]:
        whole = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        copy = collectives.replicate(whole, "x", str(mesh), reduce_dtype=dtype)
        copy.backward(parts[rank].bfloat16())
        shard = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        gathered = collectives.all_gather(shard, "x", 0, str(mesh), reduce_dtype=dtype)
        gathered.backward(parts[rank].bfloat16().expand(4))
        assert whole.grad is not None and shard.grad is not None
        return [whole.grad, shard.grad]

    expected = sum(parts).bfloat16() if dtype else torch.ones(1, dtype=torch.bfloat16)
    for grads in lockstep.run(mesh, on_rank):
        for grad in grads:
            assert grad.dtype == torch.bfloat16
            assert torch.equal(grad, expected)


@pytest.mark.slow_cells("fsdp")
@pytest.mark.parametrize("layout", ["fsdp", "2.5d"])
def test_such_plans_are_verified(layout: str) -> None:
    torch.manual_seed(0)
    model, inputs = gpt()
    plan = autopar.plan(model, 4, inputs, layout=layout, smaller=False, **WIDE)
    assert autopar.verify(model, None, inputs, layout=plan).grad_error < 1e-9


# -- files and mistakes ----------------------------------------------------------------------------
def test_a_file_keeps_it(tmp_path: Path) -> None:
    from autopar.runtime.apply import renew_plan

    model, inputs = gpt()
    plan = planned("fsdp", **WIDE)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.reduce_dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = renew_plan(model, loaded, inputs)
    assert again.comm_bytes == plan.comm_bytes and not again.changed_figures


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(PlanError, match="float32"):
        planned("fsdp", reduce_dtype="bfloat16")
    assert planned("fsdp", reduce_dtype="float32").reduce_dtype == torch.float32
