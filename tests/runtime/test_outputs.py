"""What a parallel model hands out: replicated tensors, or each rank's own parts."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from launch import launched

LAYOUTS = [("megatron",), pytest.param(("fsdp", "4d", "auto"), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=LAYOUTS, ids=", ".join)
def facts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("outputs")
    return launched(folder, 2, *request.param, script="outputs_ranks.py")


def test_losses_outside_the_model_are_those_of_one_device(facts: dict[str, Any]) -> None:
    for layout, figures in facts.items():
        if layout != "sharded":
            apart = figures["apart"]
            assert len(apart) == 8 and {k: d for k, d in apart.items() if not d < 1e-5} == {}
            assert figures["kinds"] == ["Tensor"], layout


def test_an_output_that_the_backward_needs_is_not_written_over(facts: dict[str, Any]) -> None:
    for layout, figures in facts.items():
        if layout != "sharded":
            assert re.search("modified (by an )?in-?place", figures["written"]), layout


def test_outputs_stay_where_they_are_computed_on_request(
    facts: dict[str, Any],
) -> None:
    figures = facts["sharded"]
    assert figures["kinds"] == ["DTensor", "DTensor", "Tensor"]
    assert figures["kinds of an odd batch"] == figures["kinds"]  # the type hangs on no size
    assert figures["rows"] == 4


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4096)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.head(x)
        return {"loss": scores.square().mean(), "scores": scores}


def planned(outputs: Any = "replicated", layout: str = "ddp") -> autopar.Plan:
    with torch.device("meta"):
        model, x = Head(), torch.ones(4096, 64)
    world = autopar.World.preset("dgx-h100", 8)
    return autopar.plan(model, world, (x,), layout, outputs=outputs, smaller=False)


def test_the_plan_says_what_replicated_outputs_cost() -> None:
    plan, sharded = planned(), planned("sharded")
    assert plan.replicated_outputs and not sharded.replicated_outputs
    (note,) = plan.notes
    assert note.startswith("every rank receives all of ['scores'] of 67.1 MB: ")
    assert "outputs='sharded' leaves each its own part" in note and not sharded.notes
    more = plan.seconds - sharded.seconds
    said = float(note.split(": ")[1].split(" ms")[0]) / 1e3
    assert 0.8 * more < said <= more  # the rest is cutting out the own part in the backward
    assert plan.peak_bytes - sharded.peak_bytes >= 7 / 8 * 4096 * 4096 * 4
    assert [str(plan.outputs["1"]), str(sharded.outputs["1"])] == ["whole", "data:S(0)"]


def test_a_plan_whose_output_is_computed_again_has_notes_too() -> None:
    """Its gather then lies within a block that the backward runs again."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    plan = autopar.plan(model, 2, (torch.ones(8, 16),), layout="ddp", recompute="full")
    assert plan.replicated_outputs


def test_the_file_says_what_is_handed_out() -> None:
    plan = planned()
    data = plan.to_json()
    assert autopar.Plan.from_json(data) == plan
    del data["replicated_outputs"]  # a file of before
    assert not autopar.Plan.from_json(data).replicated_outputs


def test_an_edited_plan_keeps_its_word() -> None:
    model, x = Head(), torch.ones(16, 64)
    sharded = autopar.plan(model, 2, (x,), "ddp", outputs="sharded", smaller=False)
    data = copy.deepcopy(sharded.to_json())
    data["replicated_outputs"] = True
    with pytest.raises(
        PlanError, match=r"output 1 is \(S\(0,8\)\) by the plan, whose outputs are replicated"
    ):
        autopar.verify(model, None, (x,), autopar.Plan.from_json(data))


@pytest.mark.parametrize("outputs", ["Whole", None, True])
def test_other_words_are_refused(outputs: Any) -> None:
    with pytest.raises(
        PlanError, match=r"plan: outputs is .*: it is to be 'replicated' or 'sharded'"
    ):
        autopar.plan(Head(), 2, (torch.ones(16, 64),), outputs=outputs)
