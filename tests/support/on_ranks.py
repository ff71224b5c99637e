"""What the scripts that tests start on gloo ranks have in common: their tasks, and what every rank
says.

    PYTHONPATH=.:tests:examples torchrun --standalone --nproc-per-node 2 tests/SCRIPT OUT TASK...

Rank 0 writes OUT: {task: facts}. A task asserts nothing; the test that started it does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

Facts = dict[str, Any]


def run_tasks(known: dict[str, Callable[[], Facts]]) -> None:
    """All that such a script does: the tasks that its command line names."""
    out, *tasks = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    facts = {task: known[task]() for task in tasks}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(facts, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def run_everywhere(facts_of: Callable[[str], Facts]) -> None:
    """All that a script does whose facts every rank has its own of: [{task: facts}], by rank."""
    out, *tasks = sys.argv[1:]
    dist.init_process_group("gloo")
    everyone = everywhere({task: facts_of(task) for task in tasks})
    if not dist.get_rank():
        Path(out).write_text(json.dumps(everyone))
    dist.destroy_process_group()


def everywhere(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gathered(local: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of every rank."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return parts


def unsharded(value: Any) -> Any:
    """The whole of a DTensor, on every rank; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def caught(work: Callable[[], Any]) -> str:
    """ "Type: message" of the ValueError that this raises; "" where it raises none."""
    try:
        work()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""
