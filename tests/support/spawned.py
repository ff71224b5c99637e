"""Runs a function of the test itself on four gloo ranks, in processes that are spawned."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing


def on_four_ranks(worker: Callable[..., None], work: Any, folder: Path) -> list[Any]:
    """What `worker(rank, file of the store, work, folder)` saved in folder/RANK.pt, by rank."""
    context = multiprocessing.start_processes(
        worker,
        (str(folder / "store"), work, str(folder)),
        nprocs=4,
        join=False,
        start_method="spawn",
    )
    try:
        deadline = time.monotonic() + 240
        while not context.join(timeout=5):  # ends early whenever one rank ends
            assert time.monotonic() < deadline, "the gloo ranks did not end in time"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]
