"""What the ranks of tests/benchmarks/test_cluster.py run: `python cluster_ranks.py TASK OUT`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK = int(os.environ["RANK"])
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def variables() -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ[name] for name in names}


def transfer() -> dict[str, Any]:
    """bit/s from rank 1 to rank 0, of as many bytes as `BYTES` says: the best of four after
    one that is not counted.
    """
    size = int(os.environ["BYTES"])
    if RANK == 0:
        with socket.create_server(ADDRESS) as server:
            connection, _ = server.accept()
            seconds = [_received(connection, size) for _ in range(5)]
        return {"rate": size * 8 / min(seconds[1:])}
    connection = _connected()
    for _ in range(5):
        connection.sendall(bytes(size))
        connection.recv(1)
    return {}


def _received(connection: socket.socket, size: int) -> float:
    """Seconds from the first byte to the last."""
    buffer = bytearray(1 << 20)
    left = size - connection.recv_into(buffer)
    started = time.perf_counter()
    while left:
        left -= connection.recv_into(buffer)
    seconds = time.perf_counter() - started
    connection.sendall(b"k")
    return seconds


def _connected() -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection(ADDRESS)
        except OSError:
            time.sleep(0.02)
    raise TimeoutError("rank 0 does not answer")


def gloo() -> dict[str, Any]:
    """Bytes over the cable: of a sum within the nodes, then of one over all ranks."""
    import torch
    import torch.distributed as dist

    from benchmarks.cluster import sent_bytes

    dist.init_process_group("gloo")
    inside, _ = dist.new_subgroups(2)
    x = torch.ones(1_000_000)
    counts = [_counted(sent_bytes)]
    for group in (inside, None):
        dist.all_reduce(x, group=group)
        counts.append(_counted(sent_bytes))
    dist.destroy_process_group()
    return {"inside": counts[1] - counts[0], "all": counts[2] - counts[1], "sum": float(x[0])}


def _counted(count: Callable[[], int]) -> int:
    """A count while no rank sends: each waits for the others before it and after it."""
    import torch.distributed as dist

    dist.barrier()
    counts = count()
    dist.barrier()
    return counts


def failing() -> dict[str, Any]:
    if RANK == 1:
        print("rank 1 cannot go on")
        sys.exit(7)
    time.sleep(60)
    return {}


def waiting() -> dict[str, Any]:
    Path(sys.argv[2]).with_suffix(".up").touch()
    time.sleep(60)
    return {}


if __name__ == "__main__":
    tasks = (variables, transfer, gloo, failing, waiting)
    facts = {task.__name__: task for task in tasks}[sys.argv[1]]()
    Path(f"{sys.argv[2]}.{RANK}").write_text(json.dumps(facts))
