"""What test_measured.py starts, as on_ranks.py says: measures steps on real gloo ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
import models
from autopar.planner.request import Grid4D
from on_ranks import Facts, caught, everywhere, run_tasks

LAYOUTS: dict[str, Any] = {"fsdp": "fsdp", "4d": Grid4D(x=2, data=2)}


def measured(name: str, overlap: bool) -> Facts:
    """A step of the small GPT, with the trace of rank 0 beside the facts."""
    model, args, _ = models.gpt()
    plan = autopar.plan(model, dist.get_world_size(), args, layout=LAYOUTS[name], smaller=False)
    par = autopar.apply(model, plan, overlap=overlap)
    par(*args)[1].backward()
    before = [p.grad.to_local().clone() for p in par.parameters()]
    timeline = par.timeline(*args)
    after = [p.grad.to_local() for p in par.parameters()]
    path = Path(sys.argv[1]).with_name(f"{name}-{overlap}.json")
    if dist.get_rank() == 0:
        timeline.save(path)
    graph = {n.name for n in par.graph.graph.nodes}
    kinds = [s.kind for s in timeline.spans]
    collectives = [s for s in timeline.spans if s.kind not in ("compute", "issue", "wait", "skew")]
    every = everywhere([[s.name, s.kind, s.track, s.bytes] for s in collectives])
    return {
        "path": str(path),
        "planned": plan.comm_bytes,
        "sent": sum(s.bytes for s in collectives),
        "nodes": [s.name.split(" and ")[0] in graph for s in collectives],
        "modules": [bool(s.module) for s in collectives],
        "named products": sorted({s.module for s in timeline.spans if "linear" in s.name}),
        "phases": sorted({s.phase for s in collectives}),
        "tracks": sorted({s.track for s in collectives}),
        "issues": kinds.count("issue"),
        "collectives": len(collectives),
        "seconds": timeline.seconds,
        "parts": [
            timeline.computing,
            timeline.exposed_seconds,
            timeline.issuing,
            timeline.other_seconds,
        ],
        "skew": timeline.skew_seconds,
        "hidden and met": timeline.hidden_seconds <= timeline.communication,
        "within": max(s.end for s in timeline.spans) <= timeline.seconds,
        "totals": [list(total) for total in timeline.totals()],
        "alike on all ranks": all(answer == every[0] for answer in every),
        "gradients untouched": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "modelled": plan.timeline(overlap=overlap).communication,
        "table": timeline.table().row_count,
    }


def one_fails() -> Facts:
    """Rank 1 has inputs of another shape: what each rank raises, and after how long."""
    model, args, _ = models.gpt()
    par = autopar.parallelize(model, inputs=args, layout="ddp")
    own = tuple(x[:2] for x in args) if dist.get_rank() == 1 else args
    started = time.perf_counter()
    said = caught(lambda: par.timeline(*own))
    seconds = everywhere(time.perf_counter() - started)
    return {"said": everywhere(said), "seconds": max(seconds)}


TASKS: dict[str, Callable[[], Facts]] = {
    "fsdp in-order": lambda: measured("fsdp", False),
    "4d overlapped": lambda: measured("4d", True),
    "one_fails": one_fails,
}


if __name__ == "__main__":
    run_tasks(TASKS)
