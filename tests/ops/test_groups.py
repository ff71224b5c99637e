"""The process groups that a plan names are those that its step communicates over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
import models
from autopar import RankError
from autopar.cost import peak as peaks
from autopar.ir.mesh import Mesh
from autopar.ops import collectives, comm
from autopar.ops.collectives import groups_of
from autopar.runtime import lockstep

LAYOUTS = ("fsdp", "megatron-sp", "4d", "2.5d")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt", layout) for layout in LAYOUTS] + [("t5", "fsdp")],
)
def test_a_step_communicates_over_the_groups_of_its_plan(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, kwargs = getattr(models, name)()
    plan = autopar.plan(model, 8, args or kwargs, layout=layout, smaller=False)
    program = plan.ready.program
    seen: set[str] = set()
    exchange = peaks._Shapes.exchange

    def noted(self: Any, kind: str, x: Tensor, group: str) -> Tensor:
        seen.add(group)
        return exchange(self, kind, x, group)

    monkeypatch.setattr(peaks._Shapes, "exchange", noted)
    peaks.peak(program)
    assert seen == groups_of(program.module)
    assert {f"autopar/{plan.mesh}/{group}" for group in plan.groups} == seen


def test_levels_are_groups_of_their_own() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    where = {"axis": ("data", "x"), "mesh": "data2.x4", "inside": 2}
    graph.output(graph.call_function(collectives.all_reduce, (x,), where))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    there = comm.route(("data", "x"), "data2.x4", 2)
    back = comm.route(("data", "x"), "data2.x4")
    assert groups_of(module) == {group for _, group in (*there, *back)}


def test_a_group_that_is_not_open_is_refused() -> None:
    ones = torch.ones(1)

    def step(rank: int) -> Tensor:
        return collectives.all_reduce(ones, ("data", "x"), "data2.x2")

    with pytest.raises(RankError, match=r"data2.x2/data.x, which is not open"):
        lockstep.run(Mesh.parse("data2.x2"), step, frozenset({"autopar/data2.x2/x"}))
