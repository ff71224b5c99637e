"""What test_lanes.py starts: scheduled steps on real gloo ranks, in one lane and in two.

PYTHONPATH=.:tests torchrun --standalone --nproc-per-node 4 tests/lane_ranks.py OUT lanes
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
import models
from autopar.passes import lanes


def step(par: Any, args: Any) -> list[torch.Tensor]:
    """The loss, and every gradient of the rank's own parts."""
    par.zero_grad()
    loss = par(*args)[1]
    loss.backward()
    return [loss.detach().clone(), *(p.grad.to_local().clone() for p in par.parameters())]


def compared(layout: Any) -> dict[str, Any]:
    model, args, _ = models.gpt()
    plan = autopar.plan(model, dist.get_world_size(), args, layout=layout, smaller=False)
    one = autopar.apply(model, plan, overlap=("schedule",))
    two = autopar.apply(model, plan, overlap=("lanes", "schedule"))
    same = True
    for _ in range(3):
        pairs = zip(step(one, args), step(two, args), strict=True)
        same = same and all(torch.equal(a, b) for a, b in pairs)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, same)
    run: Any = two._run
    groups = lanes.opened(run.forward.graph, run.backward.graph)
    return {"same": every, "groups": sorted(groups)}


def main() -> None:
    out, task = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lanes.WORTH = -10.0  # whatever it costs
    facts = {task: compared("megatron-sp")}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(facts, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
