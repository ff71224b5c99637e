"""All ranks of a mesh in one process: the emitted modules run as they are, and collectives between
real ranks are replaced by exchanges between threads.

Every rank has its own thread, so that its forward and its backward (which on the CPU runs in the
calling thread) stay plain code; but one thread runs at a time. A rank runs until it waits in a
collective, then hands over to the next rank that can go on, in rank order. So runs are
deterministic, and where no rank can go on, the error says which rank waits for what.

verify.py and many tests call `run`; ops/comm.py finds the run in `comm.simulator`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.errors import RankError
from autopar.ir.mesh import Mesh, group_ranks
from autopar.ops import comm

T = TypeVar("T")
_RANKS_LIMIT = 64
_run: _Run | None = None


def run(
    mesh: Mesh,
    rank_fn: Callable[[int], T],
    groups: frozenset[str] | None = None,
    copies: int = 1,
) -> list[T]:
    """Call `rank_fn(rank)` for every rank of `mesh`, with collectives among them, and return the
    results by rank.

    Grad mode is the caller's. `groups`: the names of the process groups that are open; None: all.
    `copies`: of the mesh, one after the other, as the stages of a pipeline have; collectives are
    within one of them.
    The first error of a rank stops all ranks and is raised again with a note that says which rank
    it was. Raises RankError where ranks of a group call different collectives, for a group that is
    not open, where a rank ends while others wait for it, for meshes above 64 ranks, and inside
    another run.

    >>> from autopar.ops import collectives
    >>> ones = torch.ones(1)
    >>> run(Mesh.parse("x2"), lambda rank: collectives.all_reduce(ones + rank, "x", "x2").item())
    [3.0, 3.0]
    """
    global _run
    if _run is not None:
        raise RankError(
            "a lockstep run inside another one: they share one wire, end the outer one first"
        )
    if mesh.size * copies > _RANKS_LIMIT:
        size = mesh.size * copies
        raise RankError(f"mesh {mesh} has {size} ranks; lockstep runs at most {_RANKS_LIMIT}")
    threads, simulator = torch.get_num_threads(), comm.simulator
    _run = comm.simulator = current = _Run(mesh, groups, copies)
    torch.set_num_threads(1)  # every thread that calls torch would start a pool of its own
    try:
        return current.execute(rank_fn)
    finally:
        _run, comm.simulator = None, simulator
        torch.set_num_threads(threads)


def meet_ranks(rank: int, value: Any, action: Callable[[list[Any]], T]) -> T:
    """Call `action` once with the values of all ranks, and return its result on every rank. Every
    rank inside `run` must call this.

    An exception of `action` ends the run.
    """
    if _run is None:
        raise RankError(f"rank {rank} meets the others, but no lockstep run is on")
    return _run.rendezvous(
        rank,
        tuple(range(_run.size)),
        "meet",
        value,
        lambda values: [action(values)] * len(values),
    )


class _Stopped(BaseException):
    """Unwinds a rank after another one failed; no `except Exception` of the model may catch it."""


@dataclass
class _Meeting:
    """The ranks of one group that wait for each other: `call` is what the first one called,
    `values` what each rank brings.
    """

    call: str
    first: int
    values: dict[int, Any]


class _Run:
    """One run. Its state needs no lock: only the rank whose turn it is touches it."""

    def __init__(self, mesh: Mesh, groups: frozenset[str] | None, copies: int) -> None:
        self.mesh, self.groups, self.size = mesh, groups, mesh.size * copies
        self.results: list[Any] = [None] * self.size
        self.error: tuple[int, BaseException] | None = None
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        self._own = threading.local()
        self._runnable = set(range(self.size))
        self._waiting: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._results_to_take: dict[int, Any] = {}
        self._groups: dict[tuple[str, int], tuple[int, ...]] = {}
        self._sent: dict[tuple[int, int], list[Tensor]] = defaultdict(list)  # by (from, to)

    def execute(self, rank_fn: Callable[[int], T]) -> list[T]:
        grad = torch.is_grad_enabled()
        ranks = range(self.size)
        threads = [
            threading.Thread(target=self._rank, args=(rank, rank_fn, grad), daemon=True)
            for rank in ranks
        ]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self._add_note(*self.error)
        return self.results

    def exchange(self, kind: str, x: Tensor, group: str) -> Tensor:
        """Perform a collective among the ranks: see `comm.Simulator`."""
        rank = getattr(self._own, "rank", None)
        if rank is None:
            raise RankError(
                f"{kind} over {group} from a thread that is no rank of the lockstep run"
            )
        if not group.startswith(f"autopar/{self.mesh}/"):
            raise RankError(f"{kind} over {group}: the lockstep run is on mesh {self.mesh}")
        if self.groups is not None and group not in self.groups:
            raise RankError(f"{kind} over {group}, which is not open: the plan does not name it")
        ranks = self._ranks(group, rank)
        dtype = str(x.dtype).removeprefix("torch.")
        call = f"{kind} of {dtype}{tuple(x.shape)} over {group.removeprefix('autopar/')}"
        return self.rendezvous(rank, ranks, call, x.detach().contiguous(), _combine_function(kind))

    def send(self, to: int, x: Tensor) -> None:
        """Send a tensor to a rank: see `comm.Simulator`."""
        rank = self._own.rank
        self._sent[rank, to].append(x.detach().clone())
        waits = self._waiting.get(to)
        if waits is not None and waits[0] == _receives(len(self._sent[rank, to]) - 1, rank):
            del self._waiting[to]
            self._runnable.add(to)

    def receive(self, number: int, source: int) -> Tensor:
        """Return the tensor that a rank has sent to this one as number so many, from 0."""
        rank, sent = self._own.rank, self._sent[source, self._own.rank]
        if self.error is not None:
            raise _Stopped
        if len(sent) <= number:
            self._runnable.discard(rank)
            self._waiting[rank] = _receives(number, source), (source,)
            self._hand_over(rank)
        return sent[number]

    def rendezvous(
        self,
        rank: int,
        ranks: tuple[int, ...],
        call: str,
        value: Any,
        combine: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """Wait until all `ranks` have brought their value, and return this rank's part of what
        `combine` makes of them.
        """
        if self.error is not None:  # a `finally` block communicates while its rank is stopped
            raise _Stopped
        meeting = self._meetings.setdefault(ranks, _Meeting(call, rank, {}))
        if meeting.call != call:
            raise RankError(
                f"rank {meeting.first} calls {meeting.call}, rank {rank} calls {call}; "
                "all ranks of a group must call the same"
            )
        meeting.values[rank] = value
        if len(meeting.values) < len(ranks):
            self._runnable.discard(rank)
            self._waiting[rank] = call, ranks
            self._hand_over(rank)
            return self._results_to_take.pop(rank)
        del self._meetings[ranks]
        results = dict(zip(ranks, combine([meeting.values[r] for r in ranks]), strict=True))
        own = results.pop(rank)
        self._results_to_take.update(results)
        self._runnable.update(results)
        for other in results:
            del self._waiting[other]
        return own

    def _rank(self, rank: int, rank_fn: Callable[[int], Any], grad: bool) -> None:
        self._own.rank = rank
        self._turns[rank].acquire()
        try:
            if self.error is None:
                with torch.set_grad_enabled(grad):
                    self.results[rank] = rank_fn(rank)
        except _Stopped:
            pass
        except BaseException as error:
            self.error = self.error or (rank, error)
        self._runnable.discard(rank)
        self._leave(rank)

    def _leave(self, rank: int) -> None:
        """End the rank. After an error all ranks are woken, to stop; else the next ready one goes
        on.
        """
        if self.error is None and not self._runnable and self._waiting:
            self.error = rank, RankError(f"rank {rank} has ended, but {self._who_waits()}")
        if self.error is not None:
            for turn in self._turns:
                turn.release()
        elif self._runnable:
            self._turns[self._next(rank)].release()

    def _hand_over(self, rank: int) -> None:
        if not self._runnable:
            raise RankError(f"no rank can go on: {self._who_waits()}")
        self._turns[self._next(rank)].release()
        self._turns[rank].acquire()
        if self.error is not None:
            raise _Stopped

    def _next(self, rank: int) -> int:
        return min(self._runnable, key=lambda other: (other - rank) % self.size)

    def _who_waits(self) -> str:
        waits = [
            f"rank {rank} waits in {call} for ranks {list(ranks)}"
            for rank, (call, ranks) in self._waiting.items()
        ]
        return "; ".join(sorted(waits)[:4])

    def _ranks(self, group: str, rank: int) -> tuple[int, ...]:
        if (group, rank) not in self._groups:
            first = rank - rank % self.mesh.size  # of this copy of the mesh
            own = group_ranks(group, rank - first)
            self._groups[group, rank] = tuple(first + other for other in own)
        return self._groups[group, rank]

    def _add_note(self, rank: int, error: BaseException) -> BaseException:
        coordinate = self.mesh.coordinate(rank % self.mesh.size)
        error.add_note(f"on rank {rank} of mesh {self.mesh}: {coordinate}")
        return error


def _receives(number: int, source: int) -> str:
    return f"the receive of tensor {number} from rank {source}"


# Sums run in rank order, so that runs are bitwise reproducible. Every rank gets a tensor of its
# own, as it may write into it.


def _all_gather(values: list[Tensor]) -> list[Tensor]:
    return [torch.cat(values) for _ in values]


def _reduce_scatter(values: list[Tensor]) -> list[Tensor]:
    return [part.clone() for part in _sum(values).chunk(len(values))]


def _all_reduce_sum(values: list[Tensor]) -> list[Tensor]:
    total = _sum(values)
    return [total.clone() for _ in values]


def _all_reduce_max(values: list[Tensor]) -> list[Tensor]:
    maximum = values[0]
    for value in values[1:]:
        maximum = torch.maximum(maximum, value)
    return [maximum.clone() for _ in values]


def _all_to_all(values: list[Tensor]) -> list[Tensor]:
    return [torch.stack([value[rank] for value in values]) for rank in range(len(values))]


def _broadcast(root: int, values: list[Tensor]) -> list[Tensor]:
    return [values[root].clone() for _ in values]


def _reduce(root: int, values: list[Tensor]) -> list[Tensor]:
    """Return the sum for the root, and nan for the other ranks, so that a use of their undefined
    result shows.
    """
    results = [torch.full_like(value, torch.nan) for value in values]
    results[root] = _sum(values)
    return results


def _sum(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def _combine_function(kind: str) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return the function that makes the ranks' results, for a call such as "all-to-all" or
    "broadcast root 2".
    """
    name, _, root = kind.partition(" root ")
    return partial(_ROOTED[name], int(root)) if root else _EXCHANGES[name]


_ROOTED: dict[str, Callable[[int, list[Tensor]], list[Tensor]]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
}
_EXCHANGES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce sum": _all_reduce_sum,
    "all-reduce max": _all_reduce_max,
    "all-to-all": _all_to_all,
}
