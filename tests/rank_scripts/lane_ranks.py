"""What test_lanes.py starts, as on_ranks.py says: scheduled steps in one lane and in two."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import autopar
import models
from autopar.passes.overlap import lanes
from on_ranks import Facts, everywhere, run_tasks


def step(par: Any, args: Any) -> list[torch.Tensor]:
    """The loss, and every gradient of the rank's own parts."""
    par.zero_grad()
    loss = par(*args)[1]
    loss.backward()
    return [loss.detach().clone(), *(p.grad.to_local().clone() for p in par.parameters())]


def compared(layout: Any) -> Facts:
    model, args, _ = models.gpt()
    plan = autopar.plan(model, dist.get_world_size(), args, layout=layout, smaller=False)
    one = autopar.apply(model, plan, overlap=("schedule",))
    two = autopar.apply(model, plan, overlap=("lanes", "schedule"))
    same = True
    for _ in range(3):
        pairs = zip(step(one, args), step(two, args), strict=True)
        same = same and all(torch.equal(a, b) for a, b in pairs)
    run: Any = two._run
    groups = lanes.opened(run.forward.graph, run.backward.graph)
    return {"same": everywhere(same), "groups": sorted(groups)}


def cheap() -> Facts:
    lanes.WORTH = -10.0  # whatever it costs
    return compared("megatron-sp")


TASKS = {"lanes": cheap}


if __name__ == "__main__":
    run_tasks(TASKS)
