"""What test_gathers_in_flight.py runs: gathers of a group of one, many under way at once, so that
its two threads often end one at the same time.

`gathers.py FILE [torch]`; with "torch" the way that torch gathers by itself, which often ends in
malloc.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

GATHERS, AT_ONCE = 200_000, 64


def main() -> None:
    if "torch" not in sys.argv[2:]:
        import autopar  # noqa: F401  (which is what mends it)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    functional, world = torch.ops._c10d_functional, dist.group.WORLD
    assert world is not None
    x, name = torch.ones(1, 8), world.group_name
    for _ in range(GATHERS // AT_ONCE):
        for y in [functional.all_gather_into_tensor(x, 1, name) for _ in range(AT_ONCE)]:
            functional.wait_tensor(y)
    print("done", flush=True)
    os._exit(0)  # how groups end is test_process_groups.py's


if __name__ == "__main__":
    main()
