"""What test_process_groups.py starts: `python fault_ranks.py OUT TASK...`. Every task has ranks of
its own, forked from this process, which plans for them; one is killed, stopped, or goes its own
way. The tasks run at the same time.

OUT gets {task: [what each rank raised and after how many seconds; None of one that never ended]}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import Grid4D, Stages
from autopar.runtime.training import inputs_watch, stages_run

TIMEOUT = 8  # seconds: of the default group
PATIENCE = 90  # seconds until all ranks are killed
WIDTH = 12
CALLS = 3  # that all goes well for

Task = Callable[[int, Any], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) ** 2).mean()


class Deep(nn.Module):
    """Equal blocks, one for each stage."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return (x**2).mean()


def model_for(layout: Any) -> tuple[nn.Module, int]:
    """Return the model of a layout and its micro-batches."""
    if not isinstance(layout, Stages):
        return Net(), 1
    assert layout.count != "auto"
    return Deep(layout.count * layout.rounds), 4


def rows() -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(5))


def parallel(plan: Any, calls: int = CALLS, **options: Any) -> nn.Module:
    stages = len(plan.stage_starts) + 1
    par = autopar.apply(Deep(stages) if stages > 1 else Net(), plan, **options)
    for _ in range(calls):
        par(rows()).backward()
    return par


def killed(rank: int, plan: Any, phase: str, **options: Any) -> Any:
    """Rank 1 dies before its forward, or between forward and backward."""
    par = parallel(plan, **options)
    if phase == "forward" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    yield
    loss = par(rows())
    if phase == "backward" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


def gone_in(rank: int, plan: Any, action: str, signal_number: int, gone: int | None = None) -> Any:
    """A rank is killed or stopped in the schedule, where it begins an action: a method of _Step.
    `gone`: the rank, the last one if None.
    """
    par = parallel(plan)
    method = getattr(stages_run._Step, action)

    def begins(self: Any, action: Any) -> None:
        if rank == (plan.ranks - 1 if gone is None else gone):
            os.kill(os.getpid(), signal_number)
        method(self, action)

    setattr(stages_run._Step, action, begins)
    yield
    for _ in range(2):
        par(rows()).backward()


def stopped(rank: int, plan: Any) -> Any:
    """The last of four ranks stands still, as under a debugger."""
    par = parallel(plan)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    yield
    for _ in range(2):
        par(rows()).backward()


def ahead(rank: int, plan: Any, calls: int) -> Any:
    """Rank 0 makes one call more than `calls`."""
    par = autopar.apply(Net(), plan)
    for _ in range(calls):
        par(rows()).backward()
    yield
    if rank == 0:
        par(rows()).backward()
    else:
        time.sleep(PATIENCE)


def unlike(rank: int, plan: Any, gone: int) -> Any:
    """A rank calls under no_grad where the others train, after a call in which all did."""
    par = parallel(plan)
    with torch.no_grad():
        par(rows())
    yield
    for _ in range(2):
        with torch.set_grad_enabled(rank != gone):
            loss = par(rows())
        if rank != gone:
            loss.backward()


def alone_without_gradients(rank: int, plan: Any) -> Any:
    """Rank 0 evaluates for the first time, alone."""
    par = parallel(plan)
    yield
    with torch.set_grad_enabled(rank > 0):
        loss = par(rows())
    if rank:
        loss.backward()


KILLED_IN_B = partial(gone_in, action="backward", signal_number=signal.SIGKILL)
STOPPED_IN_F = partial(gone_in, action="forward", signal_number=signal.SIGSTOP)
KILLED_IN_W = partial(gone_in, action="weights", signal_number=signal.SIGKILL)
STOPPED_IN_W = partial(gone_in, action="weights", signal_number=signal.SIGSTOP)
TASKS: dict[str, tuple[int, Any, Task]] = {
    "forward": (3, "fsdp", partial(killed, phase="forward")),
    "backward": (3, "fsdp", partial(killed, phase="backward")),
    "emitted forward": (2, "fsdp", partial(killed, phase="forward", overlap=False)),
    "emitted backward": (2, "fsdp", partial(killed, phase="backward", overlap=False)),
    "stopped": (4, Grid4D(2, 2, 1, 1), stopped),
    "stage, killed": (2, Stages(2, "ddp"), partial(killed, phase="forward")),
    "stage, stopped": (4, Stages(2, "ddp"), stopped),
    "zero-bubble, killed": (2, Stages(2, "ddp", "zero-bubble"), KILLED_IN_W),
    "zero-bubble, stopped": (4, Stages(2, "fsdp", "zero-bubble"), STOPPED_IN_W),
    "zbv, killed": (2, Stages(2, "ddp", "zbv", 2), KILLED_IN_W),
    "zbv, stopped": (4, Stages(2, "fsdp", "zbv", 2), STOPPED_IN_W),
    "zbv of 4, killed": (4, Stages(4, "ddp", "zbv", 2), KILLED_IN_W),
    "dualpipev, killed": (2, Stages(2, "ddp", "dualpipev", 2), KILLED_IN_W),
    "1f1b, killed first": (4, Stages(4, "ddp"), partial(KILLED_IN_B, gone=0)),
    "1f1b, killed between": (4, Stages(4, "ddp"), partial(KILLED_IN_B, gone=1)),
    "1f1b, stopped between": (4, Stages(4, "ddp"), partial(STOPPED_IN_F, gone=2)),
    "interleaved, stopped first": (
        4,
        Stages(2, "fsdp", "interleaved", 2),
        partial(STOPPED_IN_F, gone=1),
    ),
    "unlike, 1f1b": (2, Stages(2, "ddp"), partial(unlike, gone=0)),
    "unlike, interleaved": (2, Stages(2, "ddp", "interleaved", 2), partial(unlike, gone=0)),
    "unlike, zbv": (2, Stages(2, "ddp", "zbv", 2), partial(unlike, gone=0)),
    "unlike, zbv of 4": (4, Stages(2, "ddp", "zbv", 2), partial(unlike, gone=3)),
    "alone, fsdp": (3, "fsdp", alone_without_gradients),
    "alone, stages": (2, Stages(2, "ddp"), alone_without_gradients),
    "killed, compared": (2, "ddp", partial(killed, phase="forward", calls=1)),
    "a call more": (2, "ddp", partial(ahead, calls=4)),
    "a call more, compared": (2, "ddp", partial(ahead, calls=1)),
}


# -- what starts them ------------------------------------------------------------------------------
def child(task: Task, rank: int, size: int, folder: Path, plan: Any) -> None:
    """A rank: it writes what it raised."""
    torch.set_num_threads(1)
    method, limit = f"file://{folder / 'store'}", timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", method, rank=rank, world_size=size, timeout=limit)
    steps = task(rank, plan)
    next(steps)  # all goes well until here
    began, seen = time.perf_counter(), ""
    try:
        next(steps, None)
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
    facts = {"seen": seen, "seconds": time.perf_counter() - began}
    (folder / f"part{rank}").write_text(json.dumps(facts))
    (folder / f"part{rank}").rename(folder / f"rank{rank}")
    time.sleep(PATIENCE)  # the others are still asking who is gone


def started(name: str, folder: Path) -> list[int]:
    """The ranks of a task: process ids."""
    size, layout, task = TASKS[name]
    model, count = model_for(layout)
    plan = autopar.plan(model, size, (rows(),), layout=layout, smaller=False, microbatches=count)
    folder.mkdir()
    children = []
    for rank in range(size):
        if not (pid := os.fork()):
            try:
                child(task, rank, size, folder, plan)
            finally:
                os._exit(0)
        children.append(pid)
    return children


def outcomes(names: list[str], base: Path) -> dict[str, list[Any]]:
    """All but one rank of each task end by themselves; all where they make unlike calls, or one
    evaluates alone.
    """
    children = [pid for name in names for pid in started(name, base / name)]
    ending = sum(
        1
        if name.startswith("a call")
        else TASKS[name][0] - (not name.startswith(("unlike", "alone")))
        for name in names
    )
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and len(list(base.glob("*/rank*"))) < ending:
        time.sleep(0.1)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    files = {name: [base / name / f"rank{n}" for n in range(TASKS[name][0])] for name in names}
    return {
        name: [json.loads(file.read_text()) if file.exists() else None for file in own]
        for name, own in files.items()
    }


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    inputs_watch.SHARE = 1e-9  # after the first calls nothing is compared: collectives find out
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        results = outcomes(sys.argv[2:], Path(name))
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
