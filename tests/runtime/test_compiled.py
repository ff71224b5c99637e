"""torch.compile(model, backend="autopar"): a plain script on several ranks is the script on one."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
import models
from autopar import PlanError
from autopar.cost.memory import Budget
from autopar.passes.pass_manager import PassManager
from autopar.planner.planner import analyse, choose_plan
from autopar.planner.request import PlanRequest
from autopar.planner.tracing import trace_model
from autopar.runtime import dynamo_backend
from launch import ROOT, environment, launched

LOSS, GRADIENTS = 1e-5, 1e-4  # relative, over four steps


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def same(facts: dict[str, Any]) -> None:
    """As on one device, parameters whole and the same on every rank."""
    assert facts["loss"] < LOSS and facts["gradients"] < GRADIENTS
    assert facts["buffers"] < LOSS
    assert facts["whole"] and facts["equal"]


@pytest.mark.slow
def test_a_plain_script_trains_by_name_on_two_ranks(tmp_path: Path) -> None:
    facts = launched(tmp_path, 2, "by name", script="compiled_ranks.py")["by name"]
    same(facts)
    assert facts["ranks"] == 2 and facts["stored"] == ["I"]
    assert not {"I", "R"} >= set(facts["split"])  # work is divided
    assert set(facts["returned"]) <= {"I", "R"}
    assert {"token.weight", "blocks.1.attention.qkv.weight"} <= set(facts["names"])
    assert any("blocks.1" in name for name in facts["subgraphs"])  # repeated blocks are known


@pytest.mark.slow
def test_named_layouts_pieces_and_dropout_on_two_ranks(tmp_path: Path) -> None:
    tasks = "layouts", "pieces", "dropped", "inner", "whole step"
    facts = launched(tmp_path, 2, *tasks, script="compiled_ranks.py")
    for layout in ("ddp", "fsdp", "megatron"):
        same(facts["layouts"][layout])
    same(facts["pieces"])
    assert facts["pieces"]["plans"] == 2 and facts["pieces"]["others"] < LOSS
    assert facts["dropped"]["equal"] and len(set(facts["dropped"]["losses"])) == 3
    seeded = facts["dropped"]["seeded"]
    assert seeded[:2] == seeded[2:4] and len(set(seeded)) == 4
    same(facts["inner"])
    step = facts["whole step"]
    assert step["loss"] < LOSS and step["parameters"] < LOSS and step["plans"] == 2
    assert facts["inner"]["waits"] == [True, True]  # ddp waits in the backward, and for the loss


@pytest.mark.slow
def test_ranks_that_differ_are_reported(tmp_path: Path) -> None:
    facts = launched(tmp_path, 2, "differing", script="compiled_ranks.py")["differing"]
    for what, name in (("parameters", r"up\.weight"), ("inputs", "x")):
        assert len(facts[what]) == 2
        for message in facts[what]:
            assert re.match(r"RankError: ", message) and "is not what it is on rank 0" in message
            assert re.search(rf"\b{name} is not", message), message
    for what, kind in (("layout", "LayoutError: unknown layout"), ("world", "WorldError: ")):
        assert all(message.startswith(kind) for message in facts[what]), facts[what]
    says = "RankError: the ranks are called with different inputs: in call 2 rank 1 got other"
    assert all(message.startswith(says) for message in facts["later"]), facts["later"]


@pytest.mark.slow_cells("4d", "auto", "fsdp", "megatron")
@pytest.mark.parametrize("layout", ["auto", "ddp", "fsdp", "megatron", "4d"])
def test_everything_stored_and_returned_is_unsharded(layout: str) -> None:
    model, args, _ = models.gpt()
    world, pipeline = autopar.World.of(4), PassManager()
    budget = Budget.of(world, "auto", "adamw", "none")
    request = PlanRequest(layout, budget, outputs="replicated", replicated_parameters=True)
    source = trace_model(model, args, pipeline)
    program = choose_plan(pipeline, analyse(pipeline, source, request), world, request)
    plan = program.plan
    assert plan is not None and plan.mesh.size == 4
    assert plan.bound <= plan.seconds * (1 + 1e-6)
    assert {s.kind for layout in plan.stored.values() for s in layout.states} == {"I"}
    assert not any(layout.axes_of("S") for layout in plan.outputs.values())
    split = [c for c in plan.choices.values() if any(len(s) == 1 and s in "mnk" for s in c.splits)]
    assert split or any(x.axes_of("S") for c in plan.choices.values() for x in c.results)


def test_alone_the_graph_runs_as_it_is() -> None:
    model, args, _ = models.mlp()
    expected = model(*args)
    loss = torch.compile(copy.deepcopy(model), backend=autopar.backend())(*args)
    torch.testing.assert_close(loss, expected)


def test_ranks_without_a_process_group_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, args, _ = models.mlp()
    with pytest.warns(UserWarning, match="2 ranks were started but no process group"):
        torch.compile(model, backend=autopar.backend())(*args)


def test_a_world_that_does_not_run() -> None:
    model, args, _ = models.mlp()
    with pytest.raises(autopar.WorldError, match="the plan is for 2 ranks"):
        torch.compile(model, backend=autopar.backend(2))(*args)


def test_a_graph_that_cannot_be_planned_says_why() -> None:
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.poisson(torch.ones(4))

    call = torch.compile(noise, backend=autopar.backend(1))
    with pytest.raises(PlanError, match=r"(?s)draws random numbers.*test_compiled\.py"):
        call(torch.ones(4, requires_grad=True))


def test_the_entry_point_is_installed_and_is_the_one_of_the_project_file() -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())
    target = written["project"]["entry-points"]["torch_dynamo_backends"]["autopar"]
    installed = entry_points(group="torch_dynamo_backends")
    targets = [point.value for point in installed if point.name == "autopar"]
    assert targets == [target], "install again: make install"
    module, name = target.split(":")
    assert getattr(import_module(module), name) is dynamo_backend.by_name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("compile_backend", r"step 10 .*\nhead\.weight is \(64, 64\) here, whole on each rank\n$"),
        ("inductor", r"step 10   loss \d"),
        ("own_backend", r"(?s)(a graph of \d+ tensors:.*){2}wait_tensor.*loss 4\.\d+\n$"),
    ],
    ids=["compile_backend", "inductor", "own_backend"],
)
def test_examples_run(name: str, last: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(ROOT / "examples" / f"{name}.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert re.search(last, result.stdout), result.stdout
