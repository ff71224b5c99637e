"""A step in micro-batches on real ranks: the numbers of one device, with one sum of gradients."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
import models
from autopar.cost.memory import Recompute
from autopar.planner.request import PlanOptions
from autopar.runtime.apply import plan_on_rank_0
from launch import launched

LAUNCHES = [
    (2, ["fsdp:4", "fsdp:auto"]),
    pytest.param(
        (4, ["fsdp:4", "ddp:4", "ddp:auto", "auto:auto", "fsdp:4:turns"]), marks=pytest.mark.slow
    ),
    pytest.param((4, ["4d:2", "2.5d:4", "megatron:4", "megatron:4:turns"]), marks=pytest.mark.slow),
]
SUMMED = ["ddp:4", "fsdp:4", "4d:2", "2.5d:4"]  # whose gradients ranks sum


@pytest.fixture(scope="module", params=LAUNCHES, ids=str)
def facts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("microbatches")
    ranks, tasks = request.param
    everyone = launched(folder, ranks, *tasks, script="microbatches_ranks.py")
    assert all(of_rank.keys() == set(tasks) for of_rank in everyone)
    return everyone


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("besides")
    everyone = launched(folder, 4, "others", script="microbatches_ranks.py")
    return [of_rank["others"] for of_rank in everyone]


def test_three_steps_are_those_of_one_device(facts: Any) -> None:
    for of_rank in facts:
        for task in of_rank:
            assert "error" not in of_rank[task], of_rank[task]
            assert of_rank[task]["compared"] == 47 and of_rank[task]["same shapes"]
            assert of_rank[task]["apart"] < 1e-12


def test_gradients_are_summed_across_ranks_once_a_step(facts: Any) -> None:
    """Two micro-batches in turns have one backward."""
    for of_rank in facts:
        for task in of_rank.keys() & {*SUMMED, "fsdp:4:turns"}:
            runs = int(task.split(":")[1]) // (2 if task.endswith("turns") else 1)
            assert of_rank[task]["forms"] == [*["deferred"] * (runs - 1), "final"] * 3


def test_weights_are_gathered_once_a_step(facts: Any) -> None:
    for of_rank in facts:
        for task in of_rank.keys() & {"fsdp:4", "2.5d:4", "megatron:4"}:
            assert of_rank[task]["forwards"] == ["gathering", *["reusing"] * 3] * 3


@pytest.mark.slow
def test_what_goes_on_besides_training(others: Any) -> None:
    for of_rank in others:
        assert "error" not in of_rank, of_rank
        assert of_rank["apart"] < 1e-12
        assert of_rank["tokens"] == pytest.approx(16 * 4)
        assert of_rank["micro-batches of auto"] == 1  # nothing limits the memory
        assert all(of_rank["drops"].values()), of_rank["drops"]


@pytest.mark.slow
def test_a_mean_may_be_returned_as_it_is(others: Any) -> None:
    for of_rank in others:
        assert len(of_rank["alone"]) == 3
        assert {loss: apart for loss, apart in of_rank["alone"].items() if apart > 1e-12} == {}


@pytest.mark.slow
def test_what_a_step_in_microbatches_cannot_do_is_refused(others: Any) -> None:
    another = "InputError: a step in micro-batches has the gradient of its loss alone"
    twice = "InputError: the backward of a step in micro-batches ran already"
    for of_rank in others:
        assert another in of_rank["said"]["another_result"]
        assert twice in of_rank["said"]["twice"]
        assert "PlanError: a timeline is read off one forward" in of_rank["said"]["timeline"]


@pytest.mark.parametrize(("microbatches", "recompute"), [(1, "full"), (4, "full"), (2, "none")])
def test_a_plan_that_was_searched_before_has_the_same_figures(
    microbatches: int, recompute: Recompute
) -> None:
    """With open micro-batches rank 0 searches first; all ranks then finish what it found."""
    model, inputs, _ = models.gpt()
    world, how = autopar.World.of(4), {"microbatches": microbatches, "recompute": recompute}
    plan = autopar.plan(model, world, inputs, "fsdp", **how)  # type: ignore[arg-type]
    request = PlanOptions("fsdp", recompute=recompute).request(world).divided(microbatches)
    again = plan_on_rank_0(model, world, inputs, request, known=plan)
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-12)
    assert again.bound == pytest.approx(plan.bound, rel=1e-12)
    assert again.overlapped == plan.overlapped and again.peak_bytes == plan.peak_bytes
