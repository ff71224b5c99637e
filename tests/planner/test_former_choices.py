"""A further call with other rows takes the choices of the first one where they are legal, and is
right: every rank in lockstep against one device.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

import autopar
import models
import moe_models
from autopar.cost.memory import Budget
from autopar.ir.plan import Plan
from autopar.planner import planner
from autopar.planner.former_choices import NOTE
from autopar.planner.request import GridContext, GridEP, Layouts, PlanRequest
from autopar.planner.tracing import Call
from autopar.runtime.apply import plan_on_rank_0
from calls import call_of
from models import Example

ROWS = 16


class Cell(NamedTuple):
    """A model on ranks under a layout."""

    build: Any
    ranks: int
    layout: Layouts


CELLS = {
    "fsdp": Cell(models.gpt, 4, "fsdp"),
    "megatron": Cell(models.gpt, 4, "megatron"),
    "4d": Cell(models.gpt, 8, autopar.Grid4D(x=2, z=2, data=2)),
    "2.5d": Cell(models.gpt, 8, autopar.Grid25D(q=2, d=2)),
    "auto": Cell(models.gpt, 4, "auto"),
    "tied, vocabulary padded": Cell(models.gpt2, 4, "megatron"),
    "ep": Cell(moe_models.mixtral, 4, GridEP(data=2, expert=2)),
    "cp": Cell(models.llama, 4, GridContext(2)),
}


def first_plan(example: Example, cell: Cell) -> Plan:
    """The plan of the first call, as a parallel module holds it for others."""
    call = call_of(example, ROWS)
    plan = autopar.plan(
        example[0], autopar.World.preset("laptop", cell.ranks), _inputs(call), cell.layout,
        smaller=False,
    )  # fmt: skip
    layouts = plan.context.program.layouts
    entries = (e for e in plan.context.program.signature.inputs if e.kind == "parameter")
    return dataclasses.replace(plan, stored={e.target: layouts[e.node] for e in entries})


def _inputs(call: Call) -> Any:
    return call.kwargs or call.args


def further_plan(example: Example, first: Plan, call: Call) -> Plan:
    budget = Budget(first.device_limit, first.optimizer, "auto")
    request = PlanRequest.like(first, "auto", budget)
    return plan_on_rank_0(example[0], first.world, call, request, first)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The meshes that are searched for further calls."""
    meshes: list[object] = []
    honest = planner.exact

    def counted(program: Any, mesh: Any, *more: Any, **others: Any) -> Any:
        meshes.append(mesh)
        return honest(program, mesh, *more, **others)

    monkeypatch.setattr(planner, "exact", counted)
    return meshes


def require_right(example: Example, plan: Plan, call: Call) -> None:
    check = autopar.verify(example[0], None, _inputs(call), layout=plan)
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-9


@pytest.mark.slow_cells("2.5d", "auto", "tied, vocabulary padded", "ep", "cp", "4d")
@pytest.mark.parametrize("name", CELLS)
def test_other_rows_take_the_choices_of_the_first_call(name: str, searched: list[object]) -> None:
    """24 rows divide; 6 do where axes of 2 split them, and are padded to 8 where 4 ranks do."""
    cell = CELLS[name]
    example = cell.build()
    first = first_plan(example, cell)
    for rows in (24, 6):
        call = call_of(example, rows)
        plan = further_plan(example, first, call)
        assert searched == [] and NOTE in plan.notes and plan.gap == 0
        assert plan.mesh == first.mesh
        common = plan.choices.keys() & first.choices.keys()
        assert len(common) >= len(first.choices)
        same = [plan.choices[n].splits == first.choices[n].splits for n in common]
        assert all(same)
        require_right(example, plan, call)


def test_parameters_stay_where_they_are(searched: list[object]) -> None:
    cell = CELLS["fsdp"]
    example = cell.build()
    first = first_plan(example, cell)
    plan = further_plan(example, first, call_of(example, 24))
    by_name = {e.node: e.target for e in plan.context.program.signature.inputs}
    assert {by_name[node]: layout for node, layout in plan.stored.items()} == first.stored
    assert searched == []


def test_rows_that_may_not_be_padded_so_far_are_searched(searched: list[object]) -> None:
    """One row would be padded to four."""
    cell = CELLS["fsdp"]
    example = cell.build()
    first = first_plan(example, cell)
    call = call_of(example, 1)
    plan = further_plan(example, first, call)
    assert searched and NOTE not in plan.notes
    require_right(example, plan, call)


@pytest.mark.parametrize("name", ["fsdp", "megatron"])
def test_without_gradients_the_choices_stay_too(name: str, searched: list[object]) -> None:
    """As in a validation batch: what is whole is replicated, no longer invariant."""
    cell = CELLS[name]
    example = cell.build()
    first = first_plan(example, cell)
    example[0].requires_grad_(False)
    call = call_of(example, 8)
    plan = further_plan(example, first, call)
    assert searched == [] and NOTE in plan.notes
    check = autopar.verify(example[0], None, _inputs(call), layout=plan)
    assert check.loss_error < 1e-9


def test_a_node_with_another_operator_is_searched(searched: list[object]) -> None:
    """A sum over the other dim has the name of the one that was planned."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.weighted = torch.nn.Linear(8, 16), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            return (y.sum(-1) if self.weighted else y.sum(0)).square().sum()

    example: Example = Net(), (torch.randn(ROWS, 8),), {}
    first = first_plan(example, Cell(None, 2, "fsdp"))
    example[0].weighted = False
    call = call_of(example, 8)
    plan = further_plan(example, first, call)
    assert len(searched) == 1
    require_right(example, plan, call)
