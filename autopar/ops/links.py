"""Sends and receives between the stages of a pipeline.

    links.send(1, x, "F0.1 add")                    # goes on at once
    pending = links.receive(0, like, "F0.1 add")    # posted now
    pending.wait()                                  # where the tensor is needed

Between two ranks tensors arrive in the order in which they were sent: the receiver posts its
receives in that order. Both ends say what it is, and gloo hands over nothing else: where one rank
runs another schedule or another kind of call, no tensor is taken for another one, and the ranks
raise after the timeout. NCCL goes by the order alone.

What is sent stays alive until it has left: a backend may not say so by itself (gloo's sends are
never complete before they are waited for), so the sender says what the receiver must have by now,
`links.release(1, 3)`. In a lockstep run the ranks are threads, and `comm.simulator` hands tensors
over. runtime/training/stages_run.py sends and receives.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ops import comm, process_groups

T = TypeVar("T")


class Pending(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> Tensor:
        """Return it once it has come."""


class Links:
    """The links of a rank to the same place of the other copies of a mesh. `copy`: the rank's own;
    copies are what tensors are sent to and come from.
    """

    def __init__(self, mesh: Mesh, copies: int, rank: int) -> None:
        self.copy = rank // mesh.size
        self._rank, self._size = rank, mesh.size
        self._received: dict[int, int] = defaultdict(int)  # tensors from each copy so far
        # what was sent to each copy since `finish`, and how many of the first have left
        self._leaving: dict[int, deque[tuple[dist.Work, Tensor, str]]] = defaultdict(deque)
        self._left: dict[int, int] = defaultdict(int)
        self._mesh, self._copies = mesh, copies
        if comm.simulator is None:
            process_groups.connect_stages(mesh, copies)

    def send(self, copy: int, x: Tensor, what: str) -> None:
        """Send a tensor to a copy, without waiting. `what`: what it is, as its receiver says."""
        if comm.simulator is not None:
            comm.simulator.send(self._rank + (copy - self.copy) * self._size, x)
            return
        leaving = self._leaving[copy]
        while leaving and leaving[0][0].is_completed():
            leaving.popleft()
            self._left[copy] += 1
        sent = _plain(x.detach().contiguous())
        where = f"a send to stage rank {copy} ({what})"
        work = self._guarded(
            lambda: dist.isend(
                sent, group=self._group(self.copy, copy), tag=_tag(what, x), group_dst=copy
            ),
            where,
        )
        assert work is not None
        leaving.append((work, sent, where))

    def receive(self, copy: int, like: Tensor, what: str) -> Pending:
        """Post the receive of the next tensor from a copy, with the shape, dtype and device of
        `like`. `what`: what it is, as its sender says.
        """
        number = self._received[copy]
        self._received[copy] += 1
        if comm.simulator is not None:
            return _Simulated(number, self._rank + (copy - self.copy) * self._size)
        into = torch.empty_like(like, memory_format=torch.contiguous_format)
        where = f"a receive from stage rank {copy} ({what})"
        work = self._guarded(
            lambda: dist.irecv(
                _plain(into),
                group=self._group(copy, self.copy),
                tag=_tag(what, like),
                group_src=copy,
            ),
            where,
        )
        assert work is not None
        return _Posted(work, into, lambda: self._guarded(work.wait, where))

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks at this rank's place in every copy, by their copies."""
        return self._groups[0]

    @property
    def _groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        # they are held by process_groups alone, which ends them before Python does
        return process_groups.connect_stages(self._mesh, self._copies)

    def release(self, copy: int, count: int) -> None:
        """Let go of the first `count` tensors that were sent to a copy since `finish`, which it has
        received.
        """
        if comm.simulator is not None:
            return
        while self._left[copy] < count:
            work, _, where = self._leaving[copy].popleft()
            self._guarded(work.wait, where)
            self._left[copy] += 1

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for copy, leaving in self._leaving.items():
            self.release(copy, self._left[copy] + len(leaving))
        self._left.clear()

    def _group(self, source: int, to: int) -> dist.ProcessGroup:
        return self._groups[0 if source < to else 1]

    @staticmethod
    def _guarded(work: Callable[[], T], what: str) -> T:
        try:
            return work()
        except RuntimeError as error:
            process_groups.explain(error, what)


class _Posted:
    def __init__(self, work: dist.Work, into: Tensor, wait: Callable[[], object]) -> None:
        self._work, self._into, self._wait = work, into, wait

    def wait(self) -> Tensor:
        self._wait()
        return self._into


class _Simulated:
    def __init__(self, number: int, source: int) -> None:
        self._number, self._source = number, source

    def wait(self) -> Tensor:
        assert comm.simulator is not None
        return comm.simulator.receive(self._number, self._source)


def _tag(what: str, x: Tensor) -> int:
    """Return a number by which both ends know a tensor, of what it is, its shape and its dtype."""
    return zlib.crc32(f"{what} {tuple(x.shape)} {x.dtype}".encode()) >> 1


def _plain(x: Tensor) -> Tensor:
    """Return a contiguous tensor as numbers that every backend sends; it shares x's memory."""
    if x.dtype is torch.bool:
        return x.view(torch.uint8)
    return torch.view_as_real(x) if x.is_complex() else x
