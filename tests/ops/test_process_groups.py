"""Process groups: those that a plan names, how they end, and what is said where one fails."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
import models
from autopar import RankError
from autopar.cost import peak as peaks
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline_schedule import SCHEDULES
from autopar.ops import collectives, comm
from autopar.ops.collectives import groups_of
from autopar.runtime import lockstep
from fault_ranks import PATIENCE, TASKS, TIMEOUT
from launch import RANK_SCRIPTS, environment, launched

LAYOUTS = ("fsdp", "megatron-sp", "4d", "2.5d")


@pytest.mark.slow_cells("gpt-2.5d", "gpt-4d", "gpt-megatron-sp", "t5-fsdp")
@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt", layout) for layout in LAYOUTS] + [("t5", "fsdp")],
)
def test_a_step_communicates_over_the_groups_of_its_plan(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, kwargs = getattr(models, name)()
    plan = autopar.plan(model, 8, args or kwargs, layout=layout, smaller=False)
    program = plan.context.program
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


# -- a process that ends while gloo's threads still have something to let go of --------------------
SECONDS = 200  # a quiet machine needs six


@pytest.mark.slow_cells("destroyed", "running")
@pytest.mark.parametrize("end", ["destroyed", "running"])
def test_no_thread_is_left_when_python_ends(tmp_path: Path, end: str) -> None:
    script = str(RANK_SCRIPTS / "exit_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "store"), end],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said


# -- ranks that are killed, stopped or one call ahead: the others say which, where, and soon -------
KILLED = ("forward", "backward", "emitted forward", "emitted backward")
IN_STEP = tuple(name for name in TASKS if name.startswith(tuple(SCHEDULES)))
QUICK_STEP = "zero-bubble, killed"
UNLIKE = tuple(name for name in TASKS if name.startswith("unlike"))
ALONE = tuple(name for name in TASKS if name.startswith("alone"))
LATE = tuple(
    n for n in TASKS if n not in {*KILLED, "stopped", *IN_STEP, *UNLIKE, *ALONE} - {QUICK_STEP}
)


def outcomes(folder: Path, *names: str) -> dict[str, list[Any]]:
    """The facts of one process that forks the ranks of these tasks."""
    return launched(folder, 1, *names, script="fault_ranks.py", seconds=PATIENCE + 60)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return outcomes(tmp_path_factory.mktemp("killed"), *KILLED)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return outcomes(tmp_path_factory.mktemp("late"), *LATE)


@pytest.fixture(scope="module")
def in_step(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    others = [name for name in IN_STEP if name != QUICK_STEP]
    return outcomes(tmp_path_factory.mktemp("step"), *others)


COLLECTIVE = {  # of a node, over an axis, of a module
    "forward": r"all_gather_into_tensor\w* \(all_gather_into_tensor over data\) of up",
    "backward": r"\w+ \((all_to_all_single|all_gather_into_tensor) over data\) of (up|down)",
    "emitted forward": r"all-gather over data in all_gather\w* of up",
    "emitted backward": r"(all-to-all|all-gather|all-reduce) over data",
}


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_rank_is_named(killed: dict[str, list[Any]], name: str) -> None:
    ranks = killed[name]
    assert ranks[1] is None
    for rank in (ranks[0], *ranks[2:]):
        says = rf"RankError: {COLLECTIVE[name]} failed in call 4: nothing is heard of rank 1 any"
        assert re.match(says, rank["seen"]), rank
        # alone, or with rank 1, where that was killed after it had said that it began call 4
        assert re.search(r"rank 0 has made 4 calls|ranks 0, .* have made 4 calls", rank["seen"])
        assert re.search(r"\[(Connection|Read error).*\]$", rank["seen"]), "gloo's own words"


@pytest.mark.slow
def test_a_stopped_rank_is_named_within_the_timeout(tmp_path: Path) -> None:
    """Groups of a grid have the default group's timeout."""
    *others, stopped = outcomes(tmp_path, "stopped")["stopped"]
    assert stopped is None
    for rank in others:
        assert "nothing is heard of rank 3 any more" in rank["seen"], rank
        assert re.search(r"over [xy]\b.* failed in call 4", rank["seen"]), rank
        assert rank["seconds"] < TIMEOUT + 15, rank


@pytest.mark.parametrize(
    "name",
    [
        "stage, killed",
        "stage, stopped",
        *(pytest.param(n, marks=() if n == QUICK_STEP else pytest.mark.slow) for n in IN_STEP),
    ],
)
def test_a_rank_that_is_gone_from_a_stage_is_named(
    request: pytest.FixtureRequest, name: str
) -> None:
    size, _, task = TASKS[name]
    everyone = request.getfixturevalue("late" if name in LATE else "in_step")[name]
    gone = task.keywords.get("gone", size - 1) if isinstance(task, partial) else size - 1
    assert everyone[gone] is None
    for rank in (*everyone[:gone], *everyone[gone + 1 :]):
        assert rank["seen"].startswith("RankError: "), rank
        assert f"nothing is heard of rank {gone} any more" in rank["seen"], rank
        assert rank["seconds"] < TIMEOUT + 15, rank


@pytest.mark.slow
def test_ranks_of_stages_that_make_unlike_calls_all_say_so(tmp_path: Path) -> None:
    """One trains and another evaluates: no tensor of one call is taken for one of the other."""
    for name, everyone in outcomes(tmp_path, *UNLIKE).items():
        for rank in everyone:
            assert rank is not None and rank["seen"].startswith("RankError: "), (name, everyone)
            assert "failed in call 5: a rank did not come in time" in rank["seen"], (name, rank)
            assert rank["seconds"] < TIMEOUT + 15, (name, rank)
        called = "".join(rank["seen"] for rank in everyone)
        assert "(training " in called and "(evaluation " in called, (name, called)


@pytest.mark.slow
def test_a_rank_that_evaluates_alone_hears_of_it_at_once(tmp_path: Path) -> None:
    for name, (first, *others) in outcomes(tmp_path, *ALONE).items():
        says = "RankError: the ranks make different calls, call 4: rank 0 makes a call without"
        assert first["seen"].startswith(f"{says} gradients; rank 1 makes a call as before"), first
        assert first["seconds"] < TIMEOUT, (name, first)
        for rank in others:
            assert rank["seen"].startswith("RankError: "), (name, rank)
            assert rank["seconds"] < TIMEOUT + 15, (name, rank)


def test_a_rank_that_was_killed_before_inputs_are_compared_is_named(late: Any) -> None:
    first, other = late["killed, compared"]
    says = "RankError: rank 1 did not come to call 2: nothing is heard of rank 1 any more"
    assert first["seen"].startswith(says) and other is None, first
    assert first["seconds"] < TIMEOUT + 15, first


@pytest.mark.parametrize("name", ["a call more", "a call more, compared"])
def test_the_rank_that_is_a_call_ahead_is_named(late: dict[str, list[Any]], name: str) -> None:
    first, other = late[name]
    count = TASKS[name][2].keywords["calls"]  # type: ignore[attr-defined]
    calls = "1 call" if count == 1 else f"{count} calls"
    assert first["seen"].startswith("RankError: ") and other is None, late
    doing = "comparing its inputs" if name.endswith("compared") else "in the forward"
    assert f"rank 0 has made {count + 1} calls ({doing})" in first["seen"], first
    assert f"rank 1 has made {calls} (after the backward)" in first["seen"], first
    assert first["seconds"] < TIMEOUT + 15, first
