"""A step in micro-batches on real ranks: the numbers of one device, with one sum of gradients."""

from __future__ import annotations

from typing import Any

import pytest

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
    assert all(found.keys() == set(tasks) for found in everyone)
    return everyone


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("besides")
    everyone = launched(folder, 4, "others", script="microbatches_ranks.py")
    return [found["others"] for found in everyone]


def test_three_steps_are_those_of_one_device(facts: Any) -> None:
    for found in facts:
        for task in found:
            assert "error" not in found[task], found[task]
            assert found[task]["compared"] == 47 and found[task]["same shapes"]
            assert found[task]["apart"] < 1e-12


def test_gradients_are_summed_across_ranks_once_a_step(facts: Any) -> None:
    """Two micro-batches in turns have one backward."""
    for found in facts:
        for task in found.keys() & {*SUMMED, "fsdp:4:turns"}:
            runs = int(task.split(":")[1]) // (2 if task.endswith("turns") else 1)
            assert found[task]["forms"] == [*["deferred"] * (runs - 1), "final"] * 3


def test_weights_are_gathered_once_a_step(facts: Any) -> None:
    for found in facts:
        for task in found.keys() & {"fsdp:4", "2.5d:4", "megatron:4"}:
            assert found[task]["forwards"] == ["gathering", *["reusing"] * 3] * 3


@pytest.mark.slow
def test_what_goes_on_besides_training(others: Any) -> None:
    for found in others:
        assert "error" not in found, found
        assert found["apart"] < 1e-12
        assert found["tokens"] == pytest.approx(16 * 4)
        assert found["micro-batches of auto"] == 1  # nothing limits the memory
        assert all(found["drops"].values()), found["drops"]


@pytest.mark.slow
def test_a_mean_may_be_returned_as_it_is(others: Any) -> None:
    for found in others:
        assert len(found["alone"]) == 3
        assert {loss: apart for loss, apart in found["alone"].items() if apart > 1e-12} == {}


@pytest.mark.slow
def test_what_a_step_in_microbatches_cannot_do_is_refused(others: Any) -> None:
    another = "InputError: a step in micro-batches has the gradient of its loss alone"
    twice = "InputError: the backward of a step in micro-batches ran already"
    for found in others:
        assert another in found["said"]["another_result"]
        assert twice in found["said"]["twice"]
        assert "PlanError: a timeline is read off one forward" in found["said"]["timeline"]
