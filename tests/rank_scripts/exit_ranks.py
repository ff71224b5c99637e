"""What test_process_groups.py starts: `python exit_ranks.py RANK STORE END`. A rank that ends while
a thread of gloo still has a tensor to let go of, for which it needs Python's lock. END: "destroyed"
where the process groups are destroyed first, as torch asks for. Dynamo is imported once the group
is open, as autopar does it; the last thing that Python does is to look for threads of gloo.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from autopar import _compat
from autopar.ir import mesh
from autopar.ops import process_groups

RANK, STORE, END = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def main() -> None:
    global stored
    dist.init_process_group("gloo", init_method=f"file://{STORE}", rank=RANK, world_size=2)
    import torch._dynamo  # whose imports hold the open group

    device_mesh = process_groups.connect(mesh.Mesh.parse("x2"), "cpu")
    stored = DTensor.from_local(torch.ones(3), device_mesh, [Shard(0)])  # as a module's parameters
    group = _compat.process_group(mesh.group_name("x2", ["x"]))
    if RANK == 1:
        time.sleep(0.3)  # so that rank 0 lets go of the work before it is done
    dist.all_reduce(tensor, group=group, async_op=True)
    if END == "destroyed":
        dist.destroy_process_group()
    sys.setswitchinterval(100)  # seconds for which no other thread gets the lock
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        pass


def threads_of_gloo() -> list[str]:
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return [name.strip() for name in names if "pt_gloo" in name]


def end_without_threads() -> None:
    left = threads_of_gloo()
    if left:
        print(f"left when Python ends: {left}", flush=True)
        os._exit(3)


stored: DTensor
tensor = torch.ones(10)

if __name__ == "__main__":
    atexit.register(end_without_threads)  # first, so that it runs last
    torch.set_num_threads(1)
    main()
