"""A step in micro-batches on real ranks: the numbers of one device, with one sum of gradients."""

from __future__ import annotations

from typing import Any

import pytest

from launch import launched

PARTS = {"ddp": 4, "fsdp": 4, "4d": 2, "2.5d": 4}
TASKS = [f"{layout}:{count}" for layout, count in PARTS.items()]


TURNS = ["fsdp:4:turns", "megatron:4:turns"]  # two parts in turns


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("parts")
    tasks = *TASKS, "megatron:4", *TURNS, "others"
    return launched(folder, 4, *tasks, script="parts_of_step_ranks.py")


@pytest.mark.parametrize("task", [*TASKS, "megatron:4", *TURNS])
def test_three_steps_are_those_of_one_device(facts: Any, task: str) -> None:
    for found in facts:
        assert "error" not in found[task], found[task]
        assert found[task]["compared"] == 47 and found[task]["same shapes"]
        assert found[task]["apart"] < 1e-12


@pytest.mark.parametrize("task", TASKS)
def test_gradients_are_summed_across_ranks_once_a_step(facts: Any, task: str) -> None:
    held = PARTS[task.split(":")[0]] - 1
    for found in facts:
        assert found[task]["forms"] == [*["deferred"] * held, "final"] * 3


def test_two_parts_in_turns_have_one_backward(facts: Any) -> None:
    for found in facts:
        assert found["fsdp:4:turns"]["forms"] == ["deferred", "final"] * 3


def test_what_goes_on_besides_training(facts: Any) -> None:
    for found in facts:
        assert "error" not in found["others"], found["others"]
        assert found["others"]["apart"] < 1e-12
        assert found["others"]["tokens"] == pytest.approx(16 * 4)
        assert found["others"]["parts of auto"] == 1  # nothing limits the memory
        assert all(found["others"]["drops"].values()), found["others"]["drops"]


def test_what_a_step_in_parts_cannot_do_is_refused(facts: Any) -> None:
    for found in facts:
        said = found["others"]["said"]
        assert (
            "InputError: a step in micro-batches has the gradient of its loss alone"
            in (said["another_result"])
        )
        assert "PlanError: a timeline is read off one forward" in said["timeline"]
        assert "InputError: the backward of a step in micro-batches ran already" in said["twice"]
