"""The state around a call: autocast is part of a plan; what is changed between a forward and its
backward is refused, or does not matter.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.ir import program as ir_program
from autopar.passes import trace
from launch import launched
from state_ranks import Net, batch
from traced import run

# The layout under autocast, and those whose forward is edited: scheduled graphs, and those that run
# as they are. Every layout is a slow cell.
TASKS = [
    ("autocast fsdp", "changed fsdp", "changed megatron"),
    pytest.param(("autocast ddp", "autocast megatron", "changed ddp"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=TASKS, ids=", ".join)
def facts(request: Any, tmp_path_factory: Any) -> Any:
    folder: Path = tmp_path_factory.mktemp("state")
    by_rank = launched(folder, 2, *request.param, script="state_ranks.py")
    assert len(by_rank) == 3
    return by_rank


def of_task(facts: dict[str, Any], name: str) -> dict[str, Any]:
    return {task: figures for task, figures in facts.items() if task.startswith(name)}


def test_a_trace_under_autocast_gives_what_eager_gives() -> None:
    model, inputs = Net(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        program, expected = trace.trace(model, inputs), model(*inputs)
    assert program.signature.autocast == (("cpu", torch.bfloat16),)
    y = run(program, inputs)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert trace.trace(model, inputs).signature.autocast == ()


def test_autocast_is_named() -> None:
    with torch.autocast("cpu", torch.float16):
        around = ir_program.under_autocast(["cpu", "meta"])
        with ir_program.without_autocast(around):
            assert ir_program.under_autocast(["cpu"]) == ()
    assert ir_program.autocast_text(around) == "torch.autocast('cpu', torch.float16)"
    assert ir_program.autocast_text(()) == "no autocast"


def test_one_rank_plans_for_another_autocast_too() -> None:
    model = Net()
    par = autopar.parallelize(copy.deepcopy(model), 1, batch())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(par(*batch()), model(*batch()))
    torch.testing.assert_close(par(*batch()), model(*batch()))


@pytest.mark.slow
def test_ranks_under_autocast_train_as_one_does(facts: Any) -> None:
    for case, figures in of_task(facts, "autocast").items():
        assert figures["dtypes"] == ["torch.float32", "torch.float32"], case
        assert figures["loss"] < 1e-3, (case, figures)
        assert figures["gradients"] < 2e-2, (case, figures)  # the products are of bfloat16
        # By the scheduled graphs, where there are any.
        assert figures["again"] < 1e-6, (case, figures)


def test_ranks_plan_for_another_autocast(facts: Any) -> None:
    for case, figures in of_task(facts, "autocast").items():
        assert figures["without"] < 1e-5, (case, figures)
        assert figures["with"] < 1e-3, (case, figures)


def test_what_is_edited_before_the_backward_is_refused_or_does_not_matter(facts: Any) -> None:
    for task, edits in of_task(facts, "changed").items():
        assert len(edits) == 8
        for edit, figures in edits.items():
            case = f"{task}, {edit}"
            assert figures["error"] < 1e-5, (case, figures)
            if edit.startswith(("parameters", "optimizer")):
                assert "a parameter of shape" in figures["said"], case
                assert "modified by an inplace operation" in figures["said"], case
            if edit.startswith("inputs") and edit.endswith("True"):  # sharded
                assert "modified by an inplace operation" in figures["said"], case
            assert bool(figures["said"]) <= (not edit.startswith("nothing")), case
