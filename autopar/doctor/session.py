"""The ranks that a doctor's checks run on: which device this one has, how they talk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar import _compat
from autopar.ops import process_groups
from autopar.world import ranks

TIMEOUT = timedelta(seconds=60)  # of one collective: a rank that stays away is waited for so long


@dataclass
class Session:
    """This rank while checks run. `rank` and `ranks` are those of torchrun. `backend`: "nccl",
    "gloo", or "" for one rank alone; `note` says why it is not the one that one would expect.
    `kept` holds what several checks use, such as a trained model. `timeout`: of one collective.
    """

    device: torch.device
    rank: int
    ranks: int
    backend: str
    note: str = ""
    kept: dict[str, Any] = field(default_factory=dict)
    timeout: timedelta = TIMEOUT
    _opened: int = 0

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def world(self) -> int | None:
        """What to plan for: the ranks that run, or one."""
        return None if self.ranks > 1 else 1

    @staticmethod
    def here() -> Session:
        """By torchrun's environment: on GPUs with NCCL where every rank of this node can have one,
        else on the CPU with gloo. The rank's GPU becomes torch's current one.
        """
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        number = int(os.environ.get("LOCAL_RANK", "0"))
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        usable, note = gpus >= ranks_here, ""
        if gpus and not usable:
            note = (
                f"a process sees {gpus} GPU{'s' if gpus > 1 else ''} for the {ranks_here} ranks of "
                "its node, so they run on the CPU"
            )
        elif gpus and ranks_here > 1 and not dist.is_nccl_available():
            usable, note = False, "this torch has no NCCL, so the ranks run on the CPU"
        device = torch.device("cuda", number) if usable else torch.device("cpu")
        if usable:
            torch.cuda.set_device(device)
        several = int(os.environ.get("WORLD_SIZE", "1"))
        backend = "" if several == 1 else "nccl" if usable else "gloo"
        return Session(device, int(os.environ.get("RANK", "0")), several, backend, note)

    @contextmanager
    def open(self) -> Iterator[None]:
        """The process group of all ranks; one that runs already stays as it is, one rank alone
        needs none. Collective.
        """
        if dist.is_initialized() or not self.backend:
            yield
            return
        dist.init_process_group(self.backend, timeout=self.timeout)
        try:
            yield
        finally:
            if dist.is_initialized():
                self.kept.clear()
                process_groups.disconnect()
                dist.destroy_process_group()

    def reopen(self) -> None:
        """Open the group anew after a check in which ranks left a collective at different places:
        gloo closes the connections of a rank that waits in vain. Collective. NCCL's group stays: it
        ends the process where a collective never comes.
        """
        self.kept.clear()
        if self.backend != "gloo" or ranks.backends().get("cpu") != "gloo":
            return
        self._opened += 1
        store = dist.PrefixStore(f"doctor{self._opened}", _compat.default_store())
        process_groups.disconnect()
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=self.timeout
        )
