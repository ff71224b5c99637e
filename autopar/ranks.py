"""The running ranks: failing together, with the reason, and agreeing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .errors import RankError

T = TypeVar("T")


def running() -> int:
    """How many ranks the running process group has; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if running() > 1 else 0


def together(what: str, work: Callable[[], T]) -> T:
    """Do the same work on every rank; if it fails on one, it fails on all, within the time of one
    small gather.

    Where all ranks fail alike, each raises its own error. Else all raise a RankError that names the
    first failing rank and its error.
    """
    error: Exception | None = None
    result: list[T] = []
    try:
        result.append(work())
    except Exception as caught:
        error = caught
    reports = all_of(None if error is None else (type(error).__name__, str(error)))
    failed = [number for number, report in enumerate(reports) if report is not None]
    if failed and len(set(reports)) > 1:
        kind, message = reports[failed[0]]
        raise RankError(
            f"rank {failed[0]} of {len(reports)} failed while {what}: {kind}: {message}"
        ) from error
    if error is not None:
        raise error
    return result[0]


def agree(what: str, value: str) -> None:
    """Raise a RankError on all ranks unless all hold the same value."""
    found = all_of(value)
    if len(set(found)) > 1:
        odd = next(i for i, v in enumerate(found) if v != found[0])
        raise RankError(
            f"the ranks hold different {what}s: rank 0 {found[0]}, rank {odd} {found[odd]}; build "
            "the same model from the same "
            f"configuration and call with inputs of the same shapes on every rank"
        )


def meet() -> None:
    """Wait until all ranks are here."""
    if running() > 1:
        dist.barrier()


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if running() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_of(value: Any) -> list[Any]:
    """The value of every rank, in their order, on every rank."""
    if running() == 1:
        return [value]
    found: list[Any] = [None] * running()
    dist.all_gather_object(found, value)
    return found
