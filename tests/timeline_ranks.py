"""What test_measured.py starts: measures steps on real gloo ranks.

    PYTHONPATH=.:tests torchrun --standalone --nproc-per-node 4 tests/timeline_ranks.py OUT TASK...

Rank 0 writes OUT: {task: facts}. A task asserts nothing; the test that started it does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
import models
from autopar.layouts import Grid4D

LAYOUTS: dict[str, Any] = {"fsdp": "fsdp", "4d": Grid4D(x=2, data=2)}


def measured(folder: Path, name: str, overlap: bool) -> dict[str, Any]:
    """A step of the small GPT, with the trace of rank 0 in the folder."""
    model, args, _ = models.gpt()
    plan = autopar.plan(model, dist.get_world_size(), args, layout=LAYOUTS[name], smaller=False)
    par = autopar.apply(model, plan, overlap=overlap)
    par(*args)[1].backward()
    before = [p.grad.to_local().clone() for p in par.parameters()]
    found = par.timeline(*args)
    after = [p.grad.to_local() for p in par.parameters()]
    path = folder / f"{name}-{overlap}.json"
    if dist.get_rank() == 0:
        found.save(path)
    graph = {n.name for n in par.graph.graph.nodes}
    kinds = [s.kind for s in found.spans]
    collectives = [s for s in found.spans if s.kind not in ("compute", "issue", "wait")]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(s.name, s.kind, s.track, s.bytes) for s in collectives])
    return {
        "path": str(path),
        "planned": plan.comm_bytes,
        "sent": sum(s.bytes for s in collectives),
        "nodes": [s.name.split(" and ")[0] in graph for s in collectives],
        "modules": [bool(s.module) for s in collectives],
        "named products": sorted({s.module for s in found.spans if "linear" in s.name}),
        "phases": sorted({s.phase for s in collectives}),
        "tracks": sorted({s.track for s in collectives}),
        "issues": kinds.count("issue"),
        "collectives": len(collectives),
        "seconds": found.seconds,
        "parts": [found.computing, found.exposed_seconds, found.issuing, found.other_seconds],
        "within": max(s.end for s in found.spans) <= found.seconds,
        "totals": [list(total) for total in found.totals()],
        "alike on all ranks": all(one == every[0] for one in every),
        "gradients untouched": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "modelled": plan.timeline(overlap=overlap).communication,
        "table": found.table().row_count,
    }


def one_fails() -> dict[str, Any]:
    """Rank 1 has inputs of another shape: what each rank raises, and after how long."""
    model, args, _ = models.gpt()
    par = autopar.parallelize(model, inputs=args, layout="ddp")
    own = tuple(x[:2] for x in args) if dist.get_rank() == 1 else args
    started, said = time.perf_counter(), ""
    try:
        par.timeline(*own)
    except autopar.AutoparError as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - started
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (said, seconds))
    return {"said": [text for text, _ in every], "seconds": max(s for _, s in every)}


def main() -> None:
    out, *tasks = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    facts = {}
    for task in tasks:
        if task == "one_fails":
            facts[task] = one_fails()
        else:
            name, overlap = task.split()
            facts[task] = measured(Path(out).parent, name, overlap == "overlapped")
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(facts, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
