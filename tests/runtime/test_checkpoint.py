"""Checkpoints: any layout, any number of ranks and plain torch go on from them, whenever the run
that wrote them was killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import autopar
import saved_run
from autopar.errors import InputError
from checkpoint_ranks import groups_of, trained_in_groups
from launch import RANK_SCRIPTS, environment, launched
from saved_run import HALF, STEPS, Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def facts(folder: Path) -> dict[str, Any]:
    return launched(folder, 2, str(folder), script="checkpoint_ranks.py")


def test_another_layout_goes_on_as_if_nothing_had_happened(facts: dict[str, Any]) -> None:
    _assert_goes_on(facts["plain"], "fsdp", "megatron")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["plain", "dropout"])
def test_every_layout_goes_on_as_if_nothing_had_happened(tmp_path: Path, task: str) -> None:
    answers = launched(tmp_path, 2, str(tmp_path), task, script="checkpoint_ranks.py")
    _assert_goes_on(answers, "fsdp", "megatron", "auto")


def _assert_goes_on(facts: dict[str, Any], *layouts: str) -> None:
    assert facts["none yet"] is None and facts["loaded"] == STEPS
    assert facts["steps"] == [HALF, STEPS]
    assert list(facts["later"]) == [f"{name} {step}" for name in layouts for step in (HALF, STEPS)]
    for name, losses in facts["later"].items():
        assert losses == pytest.approx(facts["losses"][HALF:], abs=1e-5), name
        if name.startswith("fsdp"):
            assert losses == facts["losses"][HALF:]  # to the bit
    assert facts["draws"] == [True] * len(facts["later"])


def batches(start: int) -> list[list[torch.Tensor]]:
    """What the run read from this step on, one process that knows no loader of autopar."""
    rows, samples = saved_run.rows(), []
    for epoch in range(2):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(1 + epoch))
        samples += [list(rows[part]) for part in order.split(saved_run.BATCH)]
    return samples[start:]


def test_plain_torch_goes_on_too(facts: dict[str, Any], folder: Path) -> None:
    model, _ = saved_run.fresh(0.0, seed=9)
    run = Run(model, batches(HALF), folder / "plain")
    run.checkpoints = autopar.Checkpoints(
        folder / "plain", model=model, optimizer=run.optimizer, schedule=run.schedule
    )
    assert run.checkpoints.load(HALF) == HALF
    assert run.losses(STEPS - HALF) == pytest.approx(facts["plain"]["losses"][HALF:], abs=1e-5)


def test_without_autopar_the_model_is_read_by_torch_alone(
    facts: dict[str, Any], folder: Path
) -> None:
    model, _ = saved_run.fresh(0.0, seed=9)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "plain" / f"step-{HALF}", no_dist=True)
    model.load_state_dict(state["model"])
    losses = [float(model(*batch).detach()) for batch in batches(HALF)[:1]]
    assert losses == pytest.approx(facts["plain"]["losses"][HALF : HALF + 1], abs=1e-5)


def test_groups_without_parameters_come_back_in_another_layout(facts: dict[str, Any]) -> None:
    saved, loaded = facts["empty groups"]["fsdp"], facts["empty groups"]["megatron"]
    assert loaded == saved and [group[1] for group in saved] == [1e-2 / n for n in range(1, 6)]


@pytest.mark.parametrize("sizes", [[8, 0], [0, 8], [0, 0, 8], [3, 0, 0, 4], [0], [0, 0]])
def test_groups_without_parameters_come_back(tmp_path: Path, sizes: list[int]) -> None:
    groups = []
    for start in (1e-2, 5e-3):
        model, inputs = saved_run.fresh(0.0)
        optimizer, checkpoints = trained_in_groups(model, inputs, tmp_path, sizes, start)
        checkpoints.save(1) if not groups else checkpoints.load()
        groups.append(groups_of(optimizer))
        state = optimizer.state_dict()["state"]
        assert len(state) == sum(sizes) and all(s["step"] == 1 for s in state.values())
    assert groups[0] == groups[1] and groups[0][0][:2] == pytest.approx((9e-3, 1e-2))


def test_another_number_of_groups_without_parameters_is_refused(tmp_path: Path) -> None:
    def checkpoints(*sizes: int) -> autopar.Checkpoints:
        model, inputs = saved_run.fresh(0.0)
        return trained_in_groups(model, inputs, tmp_path, sizes, 1e-2)[1]

    checkpoints(8, 0).save(1)
    with pytest.raises(InputError, match=r"it lacks optimizer_group_without_parameters\.1\."):
        checkpoints(8, 0, 0).load()
    with pytest.raises(
        InputError,
        match=r"it has optimizer_group_without_parameters\.0, which the optimizer has not",
    ):
        checkpoints(8).load()


def test_a_checkpoint_of_another_model_is_refused(facts: dict[str, Any], folder: Path) -> None:
    for said in facts["refused"]:
        assert "is of something else: model.head.weight is (6, 32) there and (7, 32) here" in said
        assert not said.endswith("not as it was")
    model, _ = saved_run.fresh(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.more = nn.Linear(2, 2)
    with pytest.raises(
        InputError, match=r"it lacks model\.more\.weight; it lacks model\.more\.bias"
    ):
        autopar.Checkpoints(folder / "plain", model=model).load()
    del model.more
    with pytest.raises(InputError, match=r"it lacks optimizer\.state\.up\.weight\.momentum_buffer"):
        autopar.Checkpoints(folder / "plain", model=model, optimizer=optimizer).load()
    with pytest.raises(InputError, match=r"has no checkpoint of step 5; it has \[3, 6\]"):
        autopar.Checkpoints(folder / "plain", model=model).load(5)


def test_old_ones_go_and_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoints = autopar.Checkpoints(tmp_path, model=model, most=2)
    for step in (1, 20, 5, 5):  # back to an earlier one: what is written last counts
        checkpoints.save(step)
    assert checkpoints.steps() == [20, 5] and checkpoints.load() == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-5"]
    (tmp_path / "step-5").rename(tmp_path / ".step-5.old")  # killed while it was replaced
    assert checkpoints.load() == 5 and checkpoints.steps() == [20, 5]
    with pytest.raises(InputError, match="most is 0: at least the last checkpoint stays"):
        autopar.Checkpoints(tmp_path, model=model, most=0)


def killed(folder: Path, seconds: float) -> int:
    """The step of the last checkpoint of a run that was killed so long after its first one."""
    log = folder / "log.txt"
    with log.open("w") as output:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = str(RANK_SCRIPTS / "checkpoint_ranks.py")
        process = subprocess.Popen(
            [*torchrun, "--nproc-per-node", "2", script, "-", str(folder), "endless"],
            stdout=output, stderr=output, env=environment(), start_new_session=True,
        )  # fmt: skip
        model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
        checkpoints = autopar.Checkpoints(folder, model=model)
        began = time.monotonic()
        while not checkpoints.steps():
            assert process.poll() is None and time.monotonic() < began + 120, log.read_text()
            time.sleep(0.01)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _kill_ranks(folder)
    step = checkpoints.load()
    assert step is not None
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, step))
    return step


def _kill_ranks(folder: Path) -> None:
    """torchrun gives each rank a session of its own: kill those that have this folder to write."""
    subprocess.run(["pkill", "-KILL", "-f", f"checkpoint_ranks.py - {folder}"], check=False)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))]
)
def test_a_kill_at_any_moment_leaves_the_last_one(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    first = killed(tmp_path, drawn.uniform(0, 1))
    assert killed(tmp_path, drawn.uniform(0, 1)) >= 1 and first >= 1
