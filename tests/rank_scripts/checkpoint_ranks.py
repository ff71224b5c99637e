"""What test_checkpoint.py starts under torchrun.

`checkpoint_ranks.py FILE FOLDER` trains for six steps under FSDP and saves after the third and the
sixth; then models of other layouts go on from the third. What they lose and hold goes into FILE.
`checkpoint_ranks.py FILE FOLDER dropout` and `… plain` go on in more layouts.
`checkpoint_ranks.py FILE FOLDER endless` saves one step after another until it is killed.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.world import ranks
from saved_run import CLASSES, HALF, STEPS, Run, fresh, parallel_run

Facts = dict[str, Any]


def facts_of(folder: Path, drop: float, layouts: Sequence[str]) -> tuple[Facts, dict[str, Run]]:
    """What a run under FSDP loses and saves, and how others go on from it: the run of each layout
    from both steps, which began with other numbers; those runs too.
    """
    first = parallel_run("fsdp", folder, drop)
    facts: Facts = {"none yet": first.checkpoints.load()}
    losses = first.losses(HALF)
    first.checkpoints.save(HALF)
    draws = [float(torch.rand(())), random.random()]
    losses += first.losses(STEPS - HALF)
    facts |= {"losses": losses, "later": {}, "draws": []}
    runs = {
        layout: parallel_run(layout, folder, drop, seed=9, asynchronous=layout == "fsdp")
        for layout in layouts
    }
    later = runs["fsdp"]
    later.checkpoints.load(HALF)
    later.checkpoints.save(STEPS)  # what is written is that of step HALF, whatever comes after
    later.losses(1)
    later.checkpoints.wait()
    facts["steps"] = later.checkpoints.steps()
    for layout, run in runs.items():
        for step in (HALF, STEPS):
            torch.manual_seed(9)
            random.seed(9)
            facts["loaded"] = run.checkpoints.load(step)
            facts["draws"].append([float(torch.rand(())), random.random()] == draws)
            run.begin()
            facts["later"][f"{layout} {step}"] = run.losses(STEPS - HALF)
    return facts, runs


Groups = list[tuple[float, float, float]]  # learning rate, that at the start, weight decay


def trained_in_groups(
    model: Any, inputs: Any, folder: Path, sizes: Sequence[int], start: float
) -> tuple[Any, autopar.Checkpoints]:
    """An optimizer whose groups have so many parameters, 0 for none, after one step."""
    left = iter(model.parameters())
    groups = [
        {
            "params": list(itertools.islice(left, size)),
            "lr": start / (n + 1),
            "weight_decay": 0.1 * n,
        }
        for n, size in enumerate(sizes)
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model(*inputs).backward()
    optimizer.step()
    schedule.step()
    return optimizer, autopar.Checkpoints(
        folder, model=model, optimizer=optimizer, schedule=schedule
    )


def groups_of(optimizer: torch.optim.Optimizer) -> Groups:
    return [(g["lr"], g["initial_lr"], g["weight_decay"]) for g in optimizer.param_groups]


def empty_groups(folder: Path, runs: dict[str, Run]) -> dict[str, Groups]:
    """What an optimizer with groups without parameters has before and after a checkpoint, which is
    of another layout and of other rates.
    """
    sizes = [0, 2, 0, 1, 0]
    facts = {}
    for layout, start in (("fsdp", 1e-2), ("megatron", 5e-3)):
        par = runs[layout].model
        par.zero_grad()
        optimizer, checkpoints = trained_in_groups(par, fresh(0.0)[1], folder, sizes, start)
        checkpoints.save(1) if layout == "fsdp" else checkpoints.load()
        facts[layout] = groups_of(optimizer)
    return facts


def refused(folder: Path) -> str:
    model, inputs = fresh(0.0)
    model.head = nn.Linear(32, CLASSES + 1)
    run = autopar.parallelize(model, inputs=inputs, layout="ddp")
    before = {name: value.clone() for name, value in run.state_dict().items()}
    try:
        autopar.Checkpoints(folder, model=run).load(HALF)
    except autopar.InputError as error:
        same = all(
            torch.equal(before[n].to_local(), v.to_local()) for n, v in run.named_parameters()
        )
        return f"{error}{'' if same else ', and the model is not as it was'}"
    return ""


def endless(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    par = autopar.parallelize(model, inputs=(torch.ones(8, 64),), layout="fsdp")
    checkpoints = autopar.Checkpoints(folder, model=par, asynchronous=True)
    for step in itertools.count(1):
        with torch.no_grad():
            for parameter in par.parameters():
                parameter.fill_(float(step))
        checkpoints.save(step)


def main() -> None:
    path, folder, *task = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if task == ["endless"]:
        endless(Path(folder))
    if task:  # plain or dropout
        drop = 0.3 if task == ["dropout"] else 0.0
        facts, _ = facts_of(Path(folder) / f"every {task[0]}", drop, ("fsdp", "megatron", "auto"))
    else:
        plain, runs = facts_of(Path(folder) / "plain", 0.0, ("fsdp", "megatron"))
        facts = {
            "plain": plain,
            "empty groups": empty_groups(Path(folder) / "empty groups", runs),
            "refused": ranks.all_of(refused(Path(folder) / "plain")),
        }
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
