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


@pytest.fixture(scope="module")
def facts(tmp_path_factory: Any) -> Any:
    folder: Path = tmp_path_factory.mktemp("state")
    return launched(folder, 2, "autocast", "changed", script="state_ranks.py")


def test_a_trace_under_autocast_gives_what_eager_gives() -> None:
    model, inputs = Net(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        program, expected = trace.trace(model, inputs), model(*inputs)
    assert program.signature.autocast == (("cpu", torch.bfloat16),)
    found = run(program, inputs)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
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
    for case, found in facts["autocast"].items():
        assert found["dtypes"] == ["torch.float32", "torch.float32"], case
        assert found["loss"] < 1e-3, (case, found)
        assert found["gradients"] < 2e-2, (case, found)  # the products are of bfloat16
        assert found["again"] < 1e-6, (case, found)  # by the scheduled graphs, where there are any


def test_ranks_plan_for_another_autocast(facts: Any) -> None:
    for case, found in facts["autocast"].items():
        assert found["without"] < 1e-5, (case, found)
        assert found["with"] < 1e-3, (case, found)


def test_what_is_edited_before_the_backward_is_refused_or_does_not_matter(facts: Any) -> None:
    for case, found in facts["changed"].items():
        assert found["error"] < 1e-5, (case, found)
        if case.startswith(("parameters", "optimizer")):
            assert "a parameter of shape" in found["said"], case
            assert "modified by an inplace operation" in found["said"], case
        if case.startswith("inputs") and case.endswith("True"):  # sharded
            assert "modified by an inplace operation" in found["said"], case
        assert bool(found["said"]) <= (not case.startswith("nothing")), case
